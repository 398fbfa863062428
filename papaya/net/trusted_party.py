"""The trusted party beside a server: its connection, its child process, its evidence.

A connection that broke is made again at the next call; a trusted party that was restarted in
between has another identity and knows none of the old offers, which `papaya/aggregator/trusted.py`
tells as lost. The child is started when a task first asks for it and ends with the server: what it
held is lost then, as DESIGN says, and counted. Calls block, so they belong on threads.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import TypeVar

from papaya.aggregator.trusted import Evidence, TrustedPartyOverTsa
from papaya.attestation.software import SoftwarePlatform
from papaya.config import Deployment
from papaya.net.public_log import own_record
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.words import Words
from papaya.tsa.client import TrustedAggregatorClient
from papaya.tsa.errors import Unavailable
from papaya.tsa.measurement import measure

logger = logging.getLogger("papaya.net")

_COLLATERAL_LIFE_S = 3600.0
T = TypeVar("T")


class TrustedLink:
    """Implements `Tsa` over a connection that is made when it is needed. Threads may share it."""

    def __init__(self, deployment: Deployment, now: Callable[[], float]) -> None:
        self._deployment = deployment
        self._data = Path(deployment.data)
        self._now = now
        self._guard = Lock()
        self._client: TrustedAggregatorClient | None = None
        self._child: subprocess.Popen[str] | None = None
        self._collateral = (b"", float("-inf"))
        self.party = TrustedPartyOverTsa(self, self._prove)

    @property
    def identity_public_key(self) -> bytes:
        return self._connected().identity_public_key

    def register(self, parameters: PublicParameters) -> bytes:
        return self._call(lambda client: client.register(parameters))

    def offers(self, parameters_hash: bytes, count: int) -> list[Offer]:
        return self._call(lambda client: client.offers(parameters_hash, count))

    def accept(self, index: int, group: int, sealed: bytes) -> None:
        self._call(lambda client: client.accept(index, group, sealed))

    def release(self, parameters: PublicParameters, group: int, members: Sequence[int]) -> Words:
        return self._call(lambda client: client.release(parameters, group, members))

    def close(self) -> None:
        with self._guard:
            self._disconnect()
            self._end_child()

    # -- the connection -----------------------------------------------------------------------

    def _call(self, ask: Callable[[TrustedAggregatorClient], T]) -> T:
        client = self._connected()
        try:
            return ask(client)
        except Unavailable:
            with self._guard:
                if self._client is client:
                    self._disconnect()
            raise

    def _connected(self) -> TrustedAggregatorClient:
        with self._guard:
            if self._client is None:
                self._client = TrustedAggregatorClient(self._address())
            return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _address(self) -> str:
        if self._deployment.trusted_party:
            return self._deployment.trusted_party
        if self._child is None or self._child.poll() is not None:
            self._end_child()
            self._start_child()
        return f"unix:{(self._data / 'tsa.sock').resolve()}"

    def _start_child(self) -> None:
        """It ends when our end of its standard input closes: with us, however we end. Signals to
        our group are not for it: uploads that are on their way need it to the last.
        """
        address = f"unix:{(self._data / 'tsa.sock').resolve()}"
        logger.warning(
            "INSECURE: the trusted party runs as a child of this server, with software evidence "
            "that proves nothing; only devices that are told to will believe it"
        )
        options = ["serve", "tsa", "--listen", address, "--until-eof"]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "papaya.cli.main", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert self._child.stdout is not None
        if not self._child.stdout.readline():  # it says where it listens, once it does
            self._end_child()
            raise Unavailable("the trusted party did not start; its own words are in the log")

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.terminate()
            self._child.communicate()  # closes its streams, and waits for it
            self._child = None

    # -- evidence ---------------------------------------------------------------------------

    def _prove(self, parameters_hash: bytes) -> Evidence:
        quote = self._call(lambda client: client.evidence(parameters_hash))
        if self._deployment.trusted_platform == "software":
            leaf = own_record(self._data, measure())
            return Evidence("software", quote, self._software_collateral(), leaf)
        collateral = self._read_collateral()
        return Evidence(
            self._deployment.trusted_platform, quote, collateral, self._deployment.trusted_leaf
        )

    def _software_collateral(self) -> bytes:
        made, at = self._collateral
        if self._now() - at > _COLLATERAL_LIFE_S:
            made = SoftwarePlatform(measure()).collateral(self._now())
            self._collateral = (made, self._now())
        return made

    def _read_collateral(self) -> bytes:
        path = Path(str(self._deployment.trusted_collateral))
        try:
            data = path.read_bytes()
            json.loads(data)
        except (OSError, ValueError) as error:
            raise Unavailable(f"the collateral in {path} cannot be used: {error}") from error
        return data
