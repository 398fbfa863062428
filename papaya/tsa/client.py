"""The aggregator's side of the wire: blocking calls, for a worker thread.

One connection, one call at a time (by a lock). A broken connection is not reopened. After
connecting again, compare `identity_public_key`: a restarted TSA has another one, and has lost its
open groups and outstanding offers. Raises `TsaRefused` for a refusal by the TSA and `Unavailable`
for everything else, including an answer of unexpected length.

Deadlines are on progress: each wait for the next bytes has one, a whole call does not, because a
release grows with the aggregation goal and the model. The TSA has one thread. Before it answers it
may have to add masks, so the wait for the first bytes grows with the masks that this can be.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.secagg.errors import ChannelError
from papaya.secagg.offer import KEY_BYTES, OFFER_BYTES, Offer
from papaya.secagg.parameters import HASH_BYTES, PublicParameters
from papaya.secagg.unmask import TakeBlock
from papaya.secagg.words import BLOCK, blocks
from papaya.tsa import endpoint, wire
from papaya.tsa.errors import TsaRefused, Unavailable
from papaya.tsa.group import BATCH
from papaya.tsa.tsa import TsaStatus
from papaya.tsa.wire import Operation

MAX_SMALL_ANSWER_BYTES: Final = 1 << 20
CONNECT_S: Final = 3.0  # to connect, and for each answer until the connection is authenticated
ANSWER_S: Final = 5.0  # for the next bytes, if the TSA has nothing to add up
ADDED_BYTES_PER_S: Final = 200e6  # masks that a slow TSA makes and adds
NOISE_AS_MASKS: Final = 100  # masks that take at least as long as the noise (bench/noise.py)

Dial: TypeAlias = Callable[[str, float], socket.socket]
"""Connects to an address within so many seconds; raises OSError."""


class TsaClient:
    """Connects and authenticates with `cluster_key` when constructed; close it after use."""

    def __init__(
        self,
        address: str,
        cluster_key: Ed25519PrivateKey,
        connect_s: float = CONNECT_S,
        answer_s: float = ANSWER_S,
        dial: Dial = endpoint.connect,
    ) -> None:
        """`dial` opens the connection; for a TSA on another machine it adds TLS."""
        self._lock = threading.Lock()
        self._answer_s = connect_s
        self._largest_bytes = 0  # of the vectors of tasks that were registered here
        try:
            self._stream = dial(address, connect_s)
        except OSError as error:
            raise Unavailable(f"no TSA at {address}: {error}") from error
        try:
            self.identity_public_key, challenge = self._identity()
            self._authenticate(cluster_key, challenge)
        except BaseException:
            self.close()
            raise
        self._answer_s = answer_s

    def __enter__(self) -> TsaClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()

    def register(self, parameters: PublicParameters) -> bytes:
        """Returns the hash by which the TSA knows these parameters."""
        vector_bytes = parameters.vector_bytes
        with self._lock:
            self._largest_bytes = max(self._largest_bytes, vector_bytes)
        return self._call(wire.register_request(parameters.encode()), HASH_BYTES)

    def offers(self, parameters_hash: bytes, count: int) -> list[Offer]:
        """At most `wire.MAX_OFFERS` new offers."""
        request = wire.offers_request(parameters_hash, count)
        body = self._call(request, count * OFFER_BYTES)
        try:
            return wire.decode_offers(body)
        except ChannelError as error:
            raise Unavailable(f"invalid answer of the TSA: {error}") from error

    def accept(self, index: int, group: int, sealed: bytes) -> None:
        """A refusal REPLAYED means that the TSA already has this seed in this group."""
        self._call(wire.accept_request(index, group, sealed), 0)

    def release(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None:
        """Pass the sum of the members' masks to `take`, block by block while it arrives."""
        request = wire.release_request(parameters.digest(), group, sorted(members))
        words = parameters.vector_words
        scratch = np.empty(min(words, BLOCK), parameters.ring.word)
        with self._lock, _Broken(self._stream):
            masks = len(members) + (NOISE_AS_MASKS if parameters.is_private else 0)
            self._ask(request, parameters.vector_bytes, masks * parameters.vector_bytes)
            for block in blocks(words):
                part = scratch[: block.stop - block.start]
                self._read_into(part.nbytes, part.data.cast("B"))
                take(block.start, part)

    def drop(self, parameters_hash: bytes, group: int) -> int:
        """Returns how many seeds are lost."""
        return self._count(wire.group_request(Operation.DROP, parameters_hash, group))

    def forget(self, parameters_hash: bytes) -> int:
        """Returns how many seeds are lost."""
        return self._count(wire.task_request(Operation.FORGET, parameters_hash))

    def status(self, parameters_hash: bytes) -> TsaStatus:
        body = self._call(wire.task_request(Operation.STATUS, parameters_hash), None)
        try:
            return wire.decode_status(body)
        except struct.error as error:
            raise Unavailable(f"invalid answer of the TSA: {error}") from error

    def evidence(self, parameters_hash: bytes) -> bytes:
        return self._call(wire.task_request(Operation.EVIDENCE, parameters_hash), None)

    def _identity(self) -> tuple[bytes, bytes]:
        answer = self._call(wire.identity_request(), 1 + KEY_BYTES + wire.CHALLENGE_BYTES)
        if answer[0] != wire.VERSION:
            raise Unavailable(f"the TSA has protocol version {answer[0]}, not {wire.VERSION}")
        return answer[1 : 1 + KEY_BYTES], answer[1 + KEY_BYTES :]

    def _authenticate(self, cluster_key: Ed25519PrivateKey, challenge: bytes) -> None:
        signature = cluster_key.sign(wire.proof_of(self.identity_public_key, challenge))
        cluster = cluster_key.public_key().public_bytes_raw()
        self._call(wire.authenticate_request(cluster, signature), 0)

    def _count(self, request: bytes) -> int:
        return wire.decode_count(self._call(request, len(wire.encode_count(0))))

    def _call(self, request: bytes, expected: int | None) -> bytes:
        """Send a request, return the answer. `expected` is its size; None for any up to a limit."""
        with self._lock, _Broken(self._stream):
            body = bytearray(self._ask(request, expected))
            self._read_into(len(body), memoryview(body))
            return bytes(body)

    def _ask(self, request: bytes, expected: int | None, to_add_bytes: int = 0) -> int:
        """Send a request and return the size of the answer's body. Raises a refusal.

        `to_add_bytes`: of masks that the TSA may have to add for this request.
        """
        to_add_bytes += BATCH * self._largest_bytes  # for the seeds that are waiting
        self._stream.settimeout(self._answer_s + to_add_bytes / ADDED_BYTES_PER_S)
        self._stream.sendall(request)
        head = bytearray(wire.LENGTH.size + 1)
        self._read_into(len(head), memoryview(head))
        self._stream.settimeout(self._answer_s)
        (size,) = wire.LENGTH.unpack_from(head)
        code, rest = head[-1], int(size) - 1
        if code == wire.DONE:
            fits = rest == expected if expected is not None else rest <= MAX_SMALL_ANSWER_BYTES
        else:
            fits = rest <= wire.MAX_TEXT_BYTES
        if rest < 0 or not fits:
            raise ConnectionAbortedError(f"an answer of {size} bytes, {expected} expected")
        if code != wire.DONE:
            text = bytearray(rest)
            self._read_into(rest, memoryview(text))
            raise wire.decode_refusal(code, bytes(text))
        return rest

    def _read_into(self, size: int, target: memoryview) -> None:
        at = 0
        while at < size:
            got = self._stream.recv_into(target[at:])
            if got == 0:
                raise ConnectionResetError("the TSA closed the connection")
            at += got


class _Broken:
    """Closes the stream on an error, because the start of the next answer is unknown."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, TsaRefused):
            return
        self._stream.close()
        if isinstance(error, OSError):
            raise Unavailable(f"lost the connection to the TSA: {error}") from error
