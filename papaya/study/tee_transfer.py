"""What crosses into a trusted execution environment: asynchronous secure aggregation and naive.

Paper, figure "Data transfer time versus aggregation goal": "Naive TSA" moves every update of K
clients across the boundary, O(K x m) bytes; here each client sends a sealed seed, and one sum of
masks comes back, O(K + m). The paper measured K = 1 and extrapolated the rest.

`bytes_into_tee` and `bytes_out_of_tee` count, from the wire format itself. `measure_transfer` moves
those bytes between two processes, message by message, each answered before the next is sent, and
says what that took: there is no computation in it, on either side, and nothing is extrapolated. A
process is not an enclave: real boundaries are slower, for both designs.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final, Literal, TypeAlias

from papaya.secagg.channel import SEALED_BYTES
from papaya.secagg.parameters import EXTRA_WORDS, HASH_BYTES
from papaya.secagg.words import WORD_BYTES
from papaya.tsa import endpoint, wire

Design: TypeAlias = Literal["asynchronous", "naive"]
DESIGNS: Final[tuple[Design, ...]] = ("asynchronous", "naive")
MODEL_BYTES: Final = 20_000_000
GOALS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

SEED_MESSAGE_BYTES: Final = len(wire.accept_request(0, 0, bytes(SEALED_BYTES)))
_NO_HASH: Final = bytes(HASH_BYTES)
NAME_BYTES: Final = len(wire.release_request(_NO_HASH, 0, (0,))) - len(
    wire.release_request(_NO_HASH, 0, ())
)
BYTES_PER_CLIENT: Final = SEED_MESSAGE_BYTES + NAME_BYTES  # its seed, and its place in the list
_ANSWER_BYTES: Final = len(wire.frame(wire.DONE))
_FRAME: Final = struct.Struct(">QQ")  # bytes that come, and bytes that are wanted back
_TIMEOUT_S: Final = 60.0
_ENOUGH_S: Final = 5.0  # of both designs, for one K
_PIECE_BYTES: Final = 1 << 20


def bytes_into_tee(k: int, model_bytes: int, design: Design) -> int:
    """Of K clients, for one sum."""
    return sum(into for into, _ in _messages(k, model_bytes, design))


def bytes_out_of_tee(k: int, model_bytes: int, design: Design) -> int:
    """One vector, and an answer to each client's message."""
    return sum(out for _, out in _messages(k, model_bytes, design))


def _messages(k: int, model_bytes: int, design: Design) -> list[tuple[int, int]]:
    """Bytes of each message and of its answer: one per client, then the question for the sum."""
    listed = len(wire.release_request(_NO_HASH, 0, range(k)))
    if design == "naive":
        per_client = len(wire.frame_head(wire.DONE, model_bytes)) + model_bytes
        answer = len(wire.frame_head(wire.DONE, model_bytes)) + model_bytes
    else:
        per_client = SEED_MESSAGE_BYTES
        answer = len(wire.frame_head(wire.DONE, 0)) + model_bytes + EXTRA_WORDS * WORD_BYTES
    return [*[(per_client, _ANSWER_BYTES)] * k, (listed, answer)]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One sum of K clients; `seconds` is None where nothing was moved, only counted.

    `seconds` is the median of `turns`.
    """

    design: Design
    k: int
    bytes_in: int
    bytes_out: int
    seconds: float | None = None
    turns: int = 0


def measure_transfer(
    goals: Sequence[int] = GOALS,
    model_bytes: int = MODEL_BYTES,
    *,
    naive_up_to: int = 100,
    turns: int = 3,
) -> list[Transfer]:
    """Both designs for every K, naive beyond `naive_up_to` only counted. Medians of `turns`.

    For one K the designs take turns, so each has as many as the other, on the same machine in the
    same mood; fewer than were asked for where a turn takes long.
    """
    found = []
    with _boundary() as stream:
        for k in goals:
            messages = {design: _messages(k, model_bytes, design) for design in DESIGNS}
            moved = [design for design in DESIGNS if design != "naive" or k <= naive_up_to]
            moves = [partial(_moved_s, stream, messages[design]) for design in moved]
            times = dict(zip(moved, in_turns(moves, turns), strict=True))
            for design in DESIGNS:
                into, out = (sum(sizes) for sizes in zip(*messages[design], strict=True))
                taken = times.get(design, [])
                seconds = median(taken) if taken else None
                found.append(Transfer(design, k, into, out, seconds, len(taken)))
    return sorted(found, key=lambda transfer: DESIGNS.index(transfer.design))


def in_turns(moves: Sequence[Callable[[], float]], turns: int) -> list[list[float]]:
    """What each move took, every time; once at least, not again when all took `_ENOUGH_S`."""
    times: list[list[float]] = [[] for _ in moves]
    for _ in range(turns):
        for move, taken in zip(moves, times, strict=True):
            taken.append(move())
        if sum(map(sum, times)) >= _ENOUGH_S:
            break
    return times


def _moved_s(stream: socket.socket, messages: Sequence[tuple[int, int]]) -> float:
    buffer = memoryview(bytearray(_PIECE_BYTES))
    start_s = time.perf_counter()
    for size, answer in messages:
        stream.sendall(_FRAME.pack(size, answer))
        _send(stream, size, buffer)
        _receive(stream, answer, buffer)
    return time.perf_counter() - start_s


def _send(stream: socket.socket, size: int, buffer: memoryview) -> None:
    while size:
        stream.sendall(buffer[: min(size, len(buffer))])
        size -= min(size, len(buffer))


def _receive(stream: socket.socket, size: int, buffer: memoryview) -> bool:
    """False when the other side is gone before the first byte."""
    left = size
    while left:
        got = stream.recv_into(buffer[: min(left, len(buffer))])
        if got == 0:
            if left == size:
                return False
            raise ConnectionResetError("the other side of the boundary is gone")
        left -= got
    return True


def answer_messages(address: str) -> None:
    """The far side: takes what comes, answers with as many bytes as are wanted."""
    with endpoint.connect(address, _TIMEOUT_S) as stream:
        head, buffer = memoryview(bytearray(_FRAME.size)), memoryview(bytearray(_PIECE_BYTES))
        while _receive(stream, len(head), head):
            size, answer = _FRAME.unpack(head)
            _receive(stream, size, buffer)
            _send(stream, answer, buffer)


@contextmanager
def _boundary() -> Iterator[socket.socket]:
    """A connection to another process, which ends with it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        address = f"unix:{folder}/boundary"
        with endpoint.listen(address) as listener:
            listener.settimeout(_TIMEOUT_S)
            spawn = multiprocessing.get_context("spawn")
            process = spawn.Process(target=answer_messages, args=(address,))
            process.start()
            try:
                stream, _ = listener.accept()
                with stream:
                    endpoint.tune(stream)
                    yield stream
            finally:
                process.terminate()
                process.join()
