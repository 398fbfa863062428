"""The connection of a server to one TSA: its child process, its evidence.

After a connection breaks, the call is repeated on a new one if it is still the same TSA. A TSA that
restarted has another identity and does not know the old offers: they are lost. A TSA that does not
answer is unreachable, but still has its seeds: the breaker opens, calls fail at once, and now and
then one of them is let through, until the TSA answers again.

The child process is started when a task first needs it. It outlives a server that is killed, so
that the next server finds its open groups; a server that stops cleanly ends it, and its contents
are lost and counted. Aggregators with one data folder share the child: each holds a lock while it
uses it, and the last one to stop ends it. A child that is stuck in its start is killed. Calls
block, so make them on threads; `stop` ends what could block longest, the start of the child.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import selectors
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Event, Lock
from typing import IO, TextIO, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.aggregator.masked_sum import LOST, TsaError
from papaya.aggregator.tsa import TsaAdapter, TsaEvidence
from papaya.aggregator.work import FAILED
from papaya.attestation.software import SoftwarePlatform, measurement_of
from papaya.config import Deployment
from papaya.errors import OperatorError
from papaya.messages.events import TsaBack, TsaUnreachable
from papaya.messages.storage import CLUSTER_KEY, ClusterKeyRow, Transaction
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.unmask import TakeBlock
from papaya.secagg.words import Entropy
from papaya.server.logs import log
from papaya.server.public_log import own_record
from papaya.server.state_thread import AsyncState
from papaya.tsa import endpoint
from papaya.tsa.client import ANSWER_S, CONNECT_S, Dial, TsaClient
from papaya.tsa.errors import TsaRefused, Unavailable
from papaya.tsa.measurement import measure

logger = logging.getLogger("papaya.server")

_COLLATERAL_LIFE_S = 3600.0
_PID_FILE = "tsa-child.pid"
# An aggregator of 0.4.0 that stops ends the process with this id, even if others use it.
_PID_FILE_OF_0_4 = "tsa.pid"
_USERS_LOCK = "tsa.lock"  # shared: held while a server uses the child
_START_LOCK = "tsa-start.lock"  # held while a server starts the child or ends it
_LONGEST_SOCKET_PATH = 100  # the kernel's limit is 107
T = TypeVar("T")
_KEY_BYTES = 32
_ATTEMPTS = 5
_PROBE_S = 1.0  # between attempts to reach a TSA that does not answer
_START_S = 60.0  # for the child to listen, and for another aggregator to start it
_END_S = 5.0  # for the child to end by itself
_RELEASE_S = 20.0  # more than another aggregator needs to end a frozen child: three times _END_S
_POLL_S = 0.02


async def load_cluster_key(state: AsyncState, entropy: Entropy) -> Ed25519PrivateKey:
    """The key of this cluster; the first server creates it."""
    for _ in range(_ATTEMPTS):
        row = (await state.read((CLUSTER_KEY,))).get(CLUSTER_KEY)
        if isinstance(row, ClusterKeyRow):
            return Ed25519PrivateKey.from_private_bytes(row.key)
        new = ClusterKeyRow(entropy(_KEY_BYTES))
        # Always read it back: another server may have been faster.
        await state.transact(Transaction(require=((CLUSTER_KEY, None),), put=((CLUSTER_KEY, new),)))
    raise OperatorError(
        "cannot store the key of this cluster",
        hint="the log says why the state store failed; check for a full disk",
    )


class Breaker:
    """Open while the TSA does not answer. Then a call is let through every `_PROBE_S`.

    It logs when it opens and when it closes. Not thread-safe: the connection locks it.
    """

    def __init__(self, address: str, now: Callable[[], float]) -> None:
        self.outages = 0
        self._address = address
        self._now = now
        self._opened_at: float | None = None
        self._probe_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._opened_at is not None

    @property
    def open_s(self) -> float:
        """For how long it has been open; 0 while it is closed."""
        return 0.0 if self._opened_at is None else self._now() - self._opened_at

    def check(self) -> None:
        """Raise Unavailable if a call would probably not be answered."""
        if self.is_open and self._now() < self._probe_at:
            raise Unavailable(
                f"the TSA at {self._address} has not answered for {self.open_s:.0f} s; "
                "updates wait for it"
            )

    def open(self, error: Unavailable) -> None:
        self._probe_at = self._now() + _PROBE_S
        if not self.is_open:
            self._opened_at = self._now()
            self.outages += 1
            log(TsaUnreachable(self._address, str(error)))

    def close(self) -> None:
        if self.is_open:
            log(TsaBack(self._address, round(self.open_s, 1)))
            self._opened_at = None


class _Stopping(Unavailable):
    """No outage: this server starts no child any more."""

    def __init__(self) -> None:
        super().__init__("no TSA is started: the server is stopping")


class TsaConnection:
    """Implements `Tsa` over a connection that is opened when needed. Thread-safe."""

    def __init__(
        self,
        deployment: Deployment,
        address: str,
        now: Callable[[], float],
        cluster_key: Ed25519PrivateKey,
        connect_s: float = CONNECT_S,
        answer_s: float = ANSWER_S,
        start_s: float = _START_S,
        dial: Dial = endpoint.connect,
    ) -> None:
        """`address`: empty for a child of this process."""
        self._deployment = deployment
        self._address = address
        self._dial = dial
        self._cluster_key = cluster_key
        self._deadlines_s = (connect_s, answer_s)
        self._start_s = start_s
        self._data = Path(deployment.data)
        self._now = now
        # Guards the connection, the child and the breaker.
        self._guard = Lock()
        self._is_stopping = Event()
        self._client: TsaClient | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._use: TextIO | None = None  # the lock of those who use the child
        self.breaker = Breaker(address or "the socket of this server", now)
        # Software evidence: the collateral, and when it was made.
        self._collateral = (b"", float("-inf"))
        self._collateral_problem = ""
        self.adapter = TsaAdapter(self, self._prove)

    @property
    def identity_public_key(self) -> bytes:
        return self._connected().identity_public_key

    def register(self, parameters: PublicParameters) -> bytes:
        return self._call(lambda client: client.register(parameters))

    def offers(self, parameters_hash: bytes, count: int) -> list[Offer]:
        return self._call(lambda client: client.offers(parameters_hash, count))

    def accept(self, index: int, group: int, sealed: bytes) -> None:
        self._call(lambda client: client.accept(index, group, sealed))

    def release(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None:
        self._call(lambda client: client.release(parameters, group, members, take))

    def open_groups(self, parameters_hash: bytes) -> list[int]:
        status = self._call(lambda client: client.status(parameters_hash))
        return [number for number, _ in status.groups]

    def drop(self, parameters_hash: bytes, group: int) -> int:
        return self._call(lambda client: client.drop(parameters_hash, group))

    def forget(self, parameters_hash: bytes) -> None:
        """Tell a running TSA to forget. None is started for this."""
        if self._client is not None or self._address:
            self._call(lambda client: client.forget(parameters_hash))

    def stop(self) -> None:
        """End the start of a child at once, and start none any more. Does not block."""
        self._is_stopping.set()

    def close(self) -> None:
        self.stop()
        with self._guard:
            self._disconnect()
            if not self._address:
                self._release_child()

    # -- the connection -----------------------------------------------------------------------

    def _call(self, ask: Callable[[TsaClient], T]) -> T:
        """Call, and repeat once on a new connection. Safe: the TSA does nothing twice.

        A call that was not answered in time is not repeated: the breaker opens.
        """
        client = self._connected()
        try:
            return self._ask(client, ask)
        except Unavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                self._give_up(error)
                raise
        again = self._connected()
        if again.identity_public_key != client.identity_public_key:
            raise TsaError(LOST, "the TSA was restarted")
        try:
            return self._ask(again, ask)
        except Unavailable as error:
            self._give_up(error)
            raise

    def _ask(self, client: TsaClient, ask: Callable[[TsaClient], T]) -> T:
        """Call on this connection, and close it if it is broken. Any answer closes the breaker."""
        try:
            answer = ask(client)
        except Unavailable:
            with self._guard:
                if self._client is client:
                    self._disconnect()
            raise
        except TsaRefused:
            self._on_answer()
            raise
        self._on_answer()
        return answer

    def _on_answer(self) -> None:
        if self.breaker.is_open:
            with self._guard:
                self.breaker.close()

    def _give_up(self, error: Unavailable) -> None:
        with self._guard:
            self.breaker.open(error)

    def _connected(self) -> TsaClient:
        with self._guard:
            if self._client is None:
                self.breaker.check()
                try:
                    self._client = self._connect()
                except _Stopping:
                    raise
                except Unavailable as error:
                    self.breaker.open(error)
                    raise
                except OSError as error:  # a limit on processes or open files, or a full disk
                    away = Unavailable(f"the TSA cannot be started: {error}")
                    self.breaker.open(away)
                    raise away from error
            return self._client

    def _connect(self) -> TsaClient:
        """Connect to the running TSA; on one machine, start it if none runs."""
        if self._address:
            return self._client_of(self._address)
        with self._start_lock():
            if self._use is None:
                self._use = _flock(self._data / _USERS_LOCK, fcntl.LOCK_SH)
            try:
                # A killed server may have left it, or another aggregator has started it.
                client = self._client_of(self._own_address)
            except Unavailable as error:
                if not isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
                    raise  # it runs but does not answer: its groups are not lost
                self._start_child()
                client = self._client_of(self._own_address)
            else:
                self._keep_from_0_4()
        if self._deployment.coordinators:
            logger.warning(
                "the TSA is a child process, which ends with the last aggregator on %s that uses "
                "it, and open buffers are lost with it (hint: run the TSA as a process of its own: "
                "papaya serve tsa --listen unix:/path/to/socket, and set tsa to this address)",
                self._data,
            )
        logger.warning(
            "INSECURE: the TSA runs as a child process with software evidence, which proves "
            "nothing; devices accept it only with allow_insecure_software = true"
        )
        return client

    def _client_of(self, address: str) -> TsaClient:
        return TsaClient(address, self._cluster_key, *self._deadlines_s, self._dial)

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    # -- the child ----------------------------------------------------------------------------

    @property
    def _own_address(self) -> str:
        return child_address(self._data)

    def _start_lock(self) -> TextIO:
        path = self._data / _START_LOCK
        try:
            return _flock_within(self._start_s, path, self._is_stopping)
        except BlockingIOError:
            if self._is_stopping.is_set():
                raise _Stopping from None
            raise Unavailable(
                f"another aggregator has held {path} for {self._start_s:g} s"
            ) from None

    def _start_child(self) -> None:
        if self._is_stopping.is_set():
            raise _Stopping
        command = [sys.executable, "-m", "papaya", "serve", "tsa"]
        words = self._data / "tsa.log"  # not stderr: its reader would wait for the child
        with words.open("wb") as stderr:
            child = subprocess.Popen(
                [*command, "--listen", self._own_address],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C on the server must not end it
            )
        if self._child is not None:
            self._child.poll()  # collect the exit status of the previous child
        assert child.stdout is not None
        try:
            with child.stdout:
                self._hear_from(child.stdout, words)
        except BaseException:
            _kill(child)
            self._remove_socket()
            raise
        self._child = child
        (self._data / _PID_FILE).write_text(f"{child.pid}\n")

    def _hear_from(self, stdout: IO[bytes], words: Path) -> None:
        """Wait until the child prints its address: then it listens.

        The whole line: with PYTHONUNBUFFERED its end is written apart, and must find the pipe open.
        """
        ends_at, heard = time.monotonic() + self._start_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in heard:
                if self._is_stopping.is_set():
                    raise _Stopping
                if time.monotonic() >= ends_at:
                    within = f"within {self._start_s:g} s"
                    raise Unavailable(f"the TSA did not start {within}; its output is in {words}")
                if selector.select(_POLL_S):
                    heard = os.read(stdout.fileno(), 1 << 10)
                    if not heard:
                        raise Unavailable(f"the TSA did not start; its output is in {words}")

    def _keep_from_0_4(self) -> None:
        """Keep an aggregator of 0.4.0 that stops from ending its child, which this server uses."""
        earlier = self._data / _PID_FILE_OF_0_4
        if self._child_in(earlier) is not None:
            earlier.replace(self._data / _PID_FILE)

    def _release_child(self) -> None:
        """End the child, unless another aggregator on the same folder uses it."""
        if self._use is not None:
            self._use.close()
            self._use = None
        if not (self._data / _PID_FILE).exists():
            return
        path = self._data / _START_LOCK
        try:
            starting = _flock_within(_RELEASE_S, path, Event())
        except BlockingIOError:
            logger.warning(
                "the TSA is left running: another aggregator has held %s for %.0f s (hint: if no "
                "aggregator runs there, end the process that %s names)",
                path,
                _RELEASE_S,
                self._data / _PID_FILE,
            )
            return
        with starting:
            try:
                users = _flock(self._data / _USERS_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            with users:
                self._end_child()

    def _end_child(self) -> None:
        """End our child, or the one that another server left on the same folder."""
        if (pid := self._child_in(self._data / _PID_FILE)) is not None:
            os.kill(pid, signal.SIGTERM)
        if self._child is not None:
            try:
                self._child.wait(_END_S)
            except subprocess.TimeoutExpired:  # a stopped process does not handle SIGTERM
                _kill(self._child)
        give_up = time.monotonic() + _END_S
        while self._child_in(self._data / _PID_FILE) is not None and time.monotonic() < give_up:
            time.sleep(_POLL_S)  # the child of another server cannot be waited for
        (self._data / _PID_FILE).unlink(missing_ok=True)
        self._remove_socket()

    def _remove_socket(self) -> None:
        """Unless a TSA answers there: an aggregator of 0.4.0 starts its child without a lock."""
        with suppress(OSError):
            endpoint.remove_left_over(self._own_address.removeprefix("unix:"))

    def _child_in(self, file: Path) -> int | None:
        """The process that `file` names, if it is the TSA of this folder: another one may have got
        its number.
        """
        try:
            pid = int(file.read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if self._own_address.encode() in command.split(b"\0") else None

    # -- evidence ---------------------------------------------------------------------------

    def _prove(self, parameters_hash: bytes) -> TsaEvidence:
        quote = self._call(lambda client: client.evidence(parameters_hash))
        if self._deployment.tsa_platform == "software":
            # The TSA may be of another version than this server.
            leaf = own_record(self._data, measurement_of(quote))
            return TsaEvidence("software", quote, self._software_collateral(), leaf)
        collateral = self._read_collateral()
        return TsaEvidence(
            self._deployment.tsa_platform, quote, collateral, self._deployment.tsa_leaf
        )

    def _software_collateral(self) -> bytes:
        made, at = self._collateral
        if self._now() - at > _COLLATERAL_LIFE_S:
            made = SoftwarePlatform(measure()).collateral(self._now())
            self._collateral = (made, self._now())
        return made

    def _read_collateral(self) -> bytes:
        path = Path(str(self._deployment.tsa_collateral))
        try:
            data = path.read_bytes()
            json.loads(data)
        except (OSError, ValueError) as error:
            problem = f"cannot use the collateral in {path}: {error}"
            if problem != self._collateral_problem:  # it is read again for each request for offers
                logger.warning(problem)
            self._collateral_problem = problem
            # The TSA answers, so seeds of earlier offers are still accepted. Owners and viewers of
            # tasks read the text, so it does not contain the path.
            told = "the collateral of the TSA cannot be used: see the log of the aggregator"
            raise TsaError(FAILED, told) from error
        self._collateral_problem = ""
        return data


def _flock(path: Path, how: int) -> TextIO:
    """A file with a lock on it, which ends when the file is closed or the process ends."""
    file = path.open("w", encoding="ascii")
    try:
        fcntl.flock(file, how)
    except BaseException:
        file.close()
        raise
    return file


def _flock_within(timeout_s: float, path: Path, is_over: Event) -> TextIO:
    """A file with an exclusive lock. Raises BlockingIOError if it is late, or when `is_over`."""
    ends_at = time.monotonic() + timeout_s
    while True:
        try:
            return _flock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends_at or is_over.wait(_POLL_S):
                raise


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with suppress(subprocess.TimeoutExpired):  # in a call to a disk that hangs, it ends later
        child.wait(_END_S)


def child_address(data: Path) -> str:
    """Where the TSA listens that is a child of the server with this data folder."""
    path = (data / "tsa.sock").resolve()
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        path = _private_folder() / f"{sha256(os.fsencode(path)).hexdigest()[:16]}.sock"
    return f"unix:{path}"


def _private_folder() -> Path:
    """A folder with a short path for sockets, for a data folder with a long one.

    Refused if it does not belong to this user alone.
    """
    folder = Path("/tmp") / f"papaya-{os.getuid()}"  # not TMPDIR, which may be as long
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise Unavailable(f"{folder} does not belong to this user alone")
    return folder
