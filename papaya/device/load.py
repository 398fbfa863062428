"""Devices that follow the protocol but do not train, many in one event loop.

For load tests (`papaya load`) and for tests of faults. A visit is a real one: the Client machine,
its driver (`papaya/device/visit.py`) and real sockets. Only training is a stand-in, and nothing is
kept: each visit is that of a device that has never taken part, so a fleet of hundreds makes any
number of visits.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple, Protocol, Self

from msgspec import Struct

from papaya.client.client import Client, Stage
from papaya.client.history import History, Participated
from papaya.client.work import Finish
from papaya.config import DeviceConfig
from papaya.credentials.token_files import Secret
from papaya.device.eligibility import Eligibility
from papaya.device.events import Event, UploadRerouted
from papaya.device.example_store import ExampleStore
from papaya.device.limits import CheckInPacing
from papaya.device.process import DeviceProcess
from papaya.device.selectors import Failed, Selectors, check_urls
from papaya.device.training import ProtocolTrainer, Trainer
from papaya.device.trust import Trust
from papaya.device.visit import DeviceVisit, Equipment
from papaya.errors import OperatorError
from papaya.learning.compression import FEWEST_BITS
from papaya.learning.definition import TaskTerms
from papaya.messages.base import Message, SessionId, TaskId
from papaya.messages.participation import Completed, Joined, UploadGranted
from papaya.messages.selection import Capabilities
from papaya.messages.tickets import UploadTicket, claim_of

UpdateKind = Literal["zeros", "digit"]
Ask = Callable[[], Awaitable[Message | None]]

_SHORTEST_PAUSE_S = 0.02
_MOST_DEVICES = 100_000
_MOST_REASONS = 100
_TELL_S = 0.5
_BUCKETS_PER_OCTAVE = 8


class Exchanges(Protocol):
    """Watches the requests of a fleet, and may hold them up or lose their answers."""

    async def exchange(self, selector: str, message: Message, ask: Ask) -> Message | None: ...


class WatchedSelectors(Selectors):
    exchanges: Exchanges
    direct = 0  # updates that aggregators took themselves

    async def ask(
        self,
        selector: str,
        token: Secret | None,
        message: Message,
        timeout_s: float,
        moving: Callable[[], None] = lambda: None,
        *,
        failed: Failed | None = None,
    ) -> Message | None:
        ask = partial(super().ask, failed=failed)
        answer = await self.exchanges.exchange(
            selector, message, lambda: ask(selector, token, message, timeout_s, moving)
        )
        is_direct = failed is not None
        self.direct += is_direct and isinstance(answer, Completed)
        return answer


class LoadProcess(DeviceProcess):
    """What the devices of one fleet share. They are always eligible."""

    def __init__(
        self,
        exchanges: Exchanges,
        certificates: Path | None = None,
        trust: Trust | None = None,
        blobs_hosts: Sequence[str] = (),
        upload_hosts: Sequence[str] = (),
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(
            now=now,
            pacing=CheckInPacing(pause_s=0, backoff_s=0.05, max_backoff_s=0.2),
            eligibility=Eligibility((), ()),
            max_parallel=_MOST_DEVICES,
            certificates=certificates,
            trust=trust,
            blobs_hosts=blobs_hosts,
            upload_hosts=upload_hosts,
            notify=self._on_event,
        )
        self._exchanges = exchanges
        # Direct uploads that went on through selectors, by the reason.
        self.rerouted: Counter[str] = Counter()

    @property
    def direct(self) -> int:
        """Updates that were uploaded to aggregators and not through selectors."""
        return self._watched.direct

    def _on_event(self, event: Event) -> None:
        if isinstance(event, UploadRerouted):
            self.rerouted[event.reason] += 1

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._watched = WatchedSelectors(self._session, self.limits, self._on_reachable)
        self._watched.exchanges = self._exchanges
        self.selectors = self._watched
        self.examples = ExampleStore(":memory:")
        return self

    async def __aexit__(self, *error: object) -> None:
        self.examples.close()
        await super().__aexit__(*error)


class _NoHistory:
    """Forgets every participation."""

    def remember(self, task: TaskId, participated: Participated) -> None:
        pass

    def remember_declined(self, task: TaskId, at: float) -> None:
        pass


class LoadDevice:
    """One device, which remembers nothing between visits."""

    def __init__(
        self,
        process: LoadProcess,
        *,
        selectors: Sequence[str],
        trainer: Trainer,
        token: str | None,
        config: DeviceConfig,
        rng: Random,
        labels: tuple[str, ...] = (),
        ended: Callable[[Finish, Joined | None], None] = lambda finish, joined: None,
    ) -> None:
        """`ended` gets the end of each visit and, if it joined, the answer to that."""
        self._config = config
        self._ended = ended
        self._rng = rng
        self._capabilities = Capabilities(
            trainer.engine,
            trainer.modules,
            labels=labels,
            trust_policy=process.trust is not None,
            engine_version=trainer.engine_version,
            upload_bits=FEWEST_BITS,
        )
        secret = None if token is None else Secret(token)
        addresses = check_urls(selectors)
        self._equipment = Equipment(
            process, addresses, secret, config, process.examples, _NoHistory(), trainer
        )

    async def visit(self) -> Finish:
        machine = Client(
            self._equipment.selectors, self._capabilities, History(0.0), self._config, self._rng
        )
        finish = await DeviceVisit(machine, self._equipment, _reached).run()
        self._ended(finish, machine.joined)
        return finish


def _reached(stage: Stage) -> None:
    """Stages are not reported: answers are."""


class Visitor(Protocol):
    async def visit(self) -> Finish: ...


class LoadFleet:
    """Each device makes one visit after the other until the fleet is stopped.

    `rate`: visits that begin per second, at most, over all devices; None: as many as servers allow.
    """

    def __init__(
        self,
        devices: Sequence[Visitor],
        rng: Random,
        rate: float | None = None,
    ) -> None:
        self._rng = rng
        self._interval_s = 0.0 if rate is None else 1 / rate
        self._next_at = time.monotonic()
        self._going_home = asyncio.Event()
        self._running = [asyncio.create_task(self._visits(device)) for device in devices]

    def stop_visits(self) -> None:
        """Begin no further visits."""
        self._going_home.set()

    async def wait(self, seconds: float) -> int:
        """Wait for the visits that have begun; how many have not ended after `seconds`."""
        done, pending = await asyncio.wait(self._running, timeout=seconds)
        for task in done:
            task.result()
        return len(pending)

    async def vanish(self) -> None:
        """Cancel all visits at once, as if all devices lost power."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _visits(self, device: Visitor) -> None:
        while not self._going_home.is_set():
            await self._pause(self._until_turn())
            if self._going_home.is_set():
                return
            finish = await device.visit()
            window = (finish.retry_from_s, finish.retry_until_s)
            pause_s = self._rng.uniform(min(window), max(window))
            await self._pause(max(_SHORTEST_PAUSE_S, pause_s))

    def _until_turn(self) -> float:
        now = time.monotonic()
        self._next_at = max(now, self._next_at) + self._interval_s
        return self._next_at - self._interval_s - now

    async def _pause(self, seconds: float) -> None:
        if seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._going_home.wait()
        except TimeoutError:
            pass


# -- what devices upload --------------------------------------------------------------------------


class Digits:
    """Each participation adds 1 to a coordinate that no other one uses.

    So the model tells which participations were counted, and how often. `numbers` maps sessions to
    coordinates.
    """

    def __init__(self) -> None:
        self.numbers: dict[SessionId, int] = {}

    def __call__(self, session: SessionId, length: int) -> bytes:
        number = self.numbers.setdefault(session, len(self.numbers))
        if number >= length:
            raise OperatorError(
                f"all {length:,} coordinates are used", hint="use a larger --update-bytes"
            )
        update = array("f", bytes(4 * length))
        update[number] = 1.0
        return update.tobytes()


def zeros(session: SessionId, length: int) -> bytes:
    """An update that changes nothing."""
    return bytes(4 * length)


class LoadTrainer(ProtocolTrainer):
    """Waits, then gives `update`; knows the terms of the tasks that it was told."""

    def __init__(
        self,
        update: Callable[[SessionId, int], bytes],
        seconds: Callable[[], float],
        terms: dict[TaskId, TaskTerms],
    ) -> None:
        super().__init__(update, seconds)
        self._terms = terms

    def terms(self, program: TaskId) -> TaskTerms | None:
        return self._terms.get(program)


# -- what a load has seen -------------------------------------------------------------------------


class Percentiles(Struct, frozen=True):
    """Of times in seconds, within 5 %."""

    count: int
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


class Times:
    """A distribution of times in bounded memory."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._longest_s = 0.0

    def add(self, seconds: float) -> None:
        self._buckets[math.ceil(_BUCKETS_PER_OCTAVE * math.log2(max(seconds, 1e-6)))] += 1
        self._longest_s = max(self._longest_s, seconds)

    def percentiles(self) -> Percentiles:
        p50, p90, p99 = (self._at(share) for share in (0.5, 0.9, 0.99))
        return Percentiles(self._buckets.total(), p50, p90, p99, self._longest_s)

    def _at(self, share: float) -> float:
        left = share * self._buckets.total()
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                middle: float = 2.0 ** ((bucket - 0.5) / _BUCKETS_PER_OCTAVE)
                return min(middle, self._longest_s)
        return 0.0


class LoadOutcome(Struct, frozen=True):
    """How the participation of one session ended, as its device was told.

    `number`: its coordinate, if it uploaded a digit. `staleness`: the values that the servers
    granted its upload with; empty if it uploaded nothing. `at`: when it ended, in Unix time.
    """

    task: TaskId
    session: SessionId
    number: int
    staleness: tuple[int, ...]
    ending: str
    reason: str
    at: float


class LoadLog:
    """Counts, times and outcomes. `note` gets every participation that has ended."""

    def __init__(self, digits: Digits, note: Callable[[LoadOutcome], None]) -> None:
        self.counted = 0
        self.visits = 0
        # By ending, then by reason.
        self.outcomes: dict[str, Counter[str]] = {}
        # By the kind of request, from the first byte to the answer.
        self.times: dict[str, Times] = {}
        self.unanswered = 0
        self._digits = digits
        self._note = note
        self._open: dict[SessionId, Joined] = {}
        self._staleness: dict[SessionId, list[int]] = {}

    async def exchange(self, selector: str, message: Message, ask: Ask) -> Message | None:
        began_at = time.monotonic()
        answer = await ask()
        if answer is None:
            self.unanswered += 1
        else:
            times = self.times.setdefault(type(message).__name__, Times())
            times.add(time.monotonic() - began_at)
        match answer:
            case Joined():
                self._open[answer.session] = answer
            case UploadGranted():
                granted = claim_of(answer.ticket)
                assert isinstance(granted, UploadTicket)
                known = self._staleness.setdefault(granted.session, [])
                if granted.staleness not in known:
                    known.append(granted.staleness)
        return answer

    def ended(self, finish: Finish, joined: Joined | None) -> None:
        self.visits += 1
        self.counted += finish.ending == "counted"
        reasons = self.outcomes.setdefault(finish.ending, Counter())
        is_known = finish.reason in reasons or len(reasons) < _MOST_REASONS
        reasons[finish.reason if is_known else "other"] += 1
        if joined is not None:
            self._end(joined, finish.ending, finish.reason)

    def close(self) -> None:
        """Those that have not ended never learn what became of them."""
        for joined in list(self._open.values()):
            self._end(joined, "vanished", "")

    def _end(self, joined: Joined, ending: str, reason: str) -> None:
        session = joined.session
        if self._open.pop(session, None) is None:
            return
        number = self._digits.numbers.get(session, -1)
        staleness = tuple(self._staleness.pop(session, ()))
        self._note(
            LoadOutcome(joined.task, session, number, staleness, ending, reason, time.time())
        )


class LoadPlan(NamedTuple):
    """A load ends after `seconds`, or after `updates` that were counted. Visits that have begun
    have `drain_s` to end.
    """

    selectors: Sequence[str]
    token: str | None
    devices: int
    rate: float | None
    seconds: float
    updates: int | None
    drain_s: float
    config: DeviceConfig
    seed: int
    labels: tuple[str, ...]


async def run_load(
    plan: LoadPlan,
    process: LoadProcess,
    trainer: Trainer,
    log: LoadLog,
    stopping: asyncio.Event,
    tell: Callable[[float], None],
) -> float:
    """Run until the plan's end or `stopping`; how long it took. `tell` gets the share done."""
    rng = Random(plan.seed)
    async with process:
        devices = [
            LoadDevice(
                process,
                selectors=plan.selectors,
                trainer=trainer,
                token=plan.token,
                config=plan.config,
                rng=Random(rng.getrandbits(64)),
                labels=plan.labels,
                ended=log.ended,
            )
            for _ in range(plan.devices)
        ]
        fleet = LoadFleet(devices, rng, plan.rate)
        began_at = time.monotonic()
        try:
            while not stopping.is_set():
                done = (time.monotonic() - began_at) / plan.seconds
                if plan.updates is not None:
                    done = max(done, log.counted / plan.updates)
                if done >= 1:
                    break
                tell(done)
                try:
                    async with asyncio.timeout(_TELL_S):
                        await stopping.wait()
                except TimeoutError:
                    pass
            took_s = time.monotonic() - began_at
            fleet.stop_visits()
            await fleet.wait(plan.drain_s)
        finally:
            await fleet.vanish()
            log.close()
    return took_s
