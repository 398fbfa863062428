"""A device: makes visits while it is eligible and its own history allows it.

For an app:

    clock = Clock()
    async with (
        DeviceProcess(now=clock.now) as process,
        sandboxed([Path("my_task.py")], clock.now) as trainer,
    ):
        with Device(
            process, selectors=["https://papaya.example"], store="device.db", trainer=trainer
        ) as device:
            finish = await device.visit()        # one visit: how it ended
            await device.run_forever()           # or all of them, until device.stop()

`DeviceRuntime` runs many devices in one process; the failure of one does not affect the others.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Self

from papaya.bundle.errors import BundleError
from papaya.client.client import Client, Stage
from papaya.client.work import Finish
from papaya.config import DeviceConfig
from papaya.credentials.token_files import Secret
from papaya.device.bundles import BlobSource, Bundle, BundleStore, VisitBundles
from papaya.device.device_file import DeviceHistory
from papaya.device.download import DownloadsFrom
from papaya.device.events import (
    NotEligible,
    Notify,
    StageReached,
    StepsTrained,
    Troubled,
    VisitEnded,
    VisitScheduled,
    nobody,
)
from papaya.device.example_store import ExampleStore
from papaya.device.executor import GivenUp
from papaya.device.ledger import PlannedUse, PrivacyAccount, PrivacyLedger
from papaya.device.process import DeviceProcess
from papaya.device.selectors import check_urls
from papaya.device.training import Trainer
from papaya.device.use_policy import UsePolicies
from papaya.device.visit import DeviceVisit, Equipment, in_words
from papaya.errors import OperatorError, PapayaError
from papaya.learning.compression import FEWEST_BITS
from papaya.messages.base import BlobKey, TaskId
from papaya.messages.selection import Capabilities, refused

_SHORTEST_PAUSE_S = 0.05
_WENT_WELL = ("counted", "discarded", "aborted")


class Device:
    """One device with its own store, history, session and token."""

    def __init__(
        self,
        process: DeviceProcess,
        *,
        selectors: Sequence[str],
        store: Path | str,
        trainer: Trainer,
        policies: UsePolicies | None = None,
        token: str | None = None,
        name: str = "device",
        memory_mb: int = 0,
        labels: Sequence[str] = (),
        config: DeviceConfig | None = None,
        bundles: BundleStore | None = None,
        notify: Notify = nobody,
        rng: Random | None = None,
    ) -> None:
        self.name = name
        self._process = process
        self._config = config or DeviceConfig()
        # Without a trust policy the device could not mask: it says so before it takes a slot.
        trusts = process.trust is not None
        declared = tuple(sorted(labels))
        self._bundles = bundles
        self._trainer = trainer
        self._capabilities = Capabilities(
            trainer.engine,
            trainer.modules,
            memory_mb,
            declared,
            trust_policy=trusts,
            owners=() if bundles is None else bundles.owners,
            engine_version=trainer.engine_version,
            upload_bits=FEWEST_BITS,
        )
        self._notify = notify
        self._rng = rng or Random()
        addresses = check_urls(selectors)
        secret = None if token is None else Secret(token)
        self.store = ExampleStore(store, policies)
        with ExitStack() as opened:
            opened.callback(self.store.close)
            self._history = opened.enter_context(DeviceHistory(store))
            self._ledger = opened.enter_context(PrivacyLedger(store))
            opened.pop_all()
        self._account = PrivacyAccount(self._ledger, self.store)
        self._equipment = Equipment(
            process,
            addresses,
            secret,
            self._config,
            self.store,
            self._history,
            trainer,
            bundles,
            self._account,
        )
        self._visit: DeviceVisit | None = None
        self._stopping = asyncio.Event()
        self._failures = 0

    def close(self) -> None:
        self._ledger.close()
        self._history.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- visits -----------------------------------------------------------------------------

    async def visit(self) -> Finish:
        """Make one visit, eligible or not; leave it if the device becomes ineligible."""
        if self._bundles is not None:
            await self._load(self._bundles)
        history = await asyncio.to_thread(
            self._history.load,
            self._config.participation_floor_s,
            self._process.limits.max_exclusion_s,
        )
        store, now = self._bundles, self._process.now
        excluded = {} if store is None else await self._excluded(store)
        bundles = None if store is None else VisitBundles(store, now, excluded)
        machine = Client(
            self._equipment.selectors,
            self._capabilities,
            history,
            self._config,
            self._rng,
            bundles,
        )
        visit = self._visit = DeviceVisit(
            machine,
            self._equipment,
            lambda stage: self._reached(machine, stage),
            lambda done, steps: self._step_done(machine, done, steps),
            bundles,
        )
        if self._stopping.is_set():
            visit.interrupt("the device was told to stop")
        watch = asyncio.create_task(self._watch(visit))
        try:
            finish = await visit.run()
        finally:
            self._visit = None
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        detail = visit.detail or finish.detail
        if finish.ending == "unprepared":
            assert machine.task is not None
            detail = await self._prepare(machine.task, finish.reason)
        if finish.ending == "rejected":
            reasons = (detail, *excluded.values(), *await self._spent())
            detail = "; ".join(dict.fromkeys(filter(None, reasons)))
            detail = detail or self._no_task_of_owners()
        ended = (finish.ending, finish.reason, machine.task, detail, visit.explanation)
        self._notify(VisitEnded(self.name, self._process.now(), *ended))
        return finish

    def _no_task_of_owners(self) -> str:
        """A server explains rejections for the owners that a check-in names. If it says nothing, it
        has no task of them that needs this device; the pinned key may be the wrong one.
        """
        owners = self._capabilities.owners
        if not owners or self._capabilities.modules:
            return ""
        return (
            f"no task of the pinned owners ({', '.join(owners)}) needs this device now; if there "
            "should be one, compare the ids: papaya owner show"
        )

    async def _excluded(self, store: BundleStore) -> dict[str, str]:
        """Bundles that this device does not train now, as a check-in names them, and why."""
        now = self._process.now()

        def why_not(bundle: Bundle) -> str:
            manifest, share = bundle.manifest, store.policy_of(bundle).budget_share
            use = PlannedUse(bundle.terms, manifest.owner, manifest.task, share, evaluates=False)
            return self._account.why_not(use, now)

        without_examples = await asyncio.to_thread(store.without_examples, self.store)
        over_budget = await asyncio.to_thread(store.barred, why_not)
        return store.refused(now) | without_examples | over_budget

    async def _spent(self) -> list[str]:
        """Task files that this device cannot train now because of its privacy budgets, in words.
        The server does not know why: the device only excludes the task, or declines it.
        """
        bundles, trainer = self._bundles, self._trainer
        names: tuple[TaskId, ...] = getattr(trainer, "tasks", ())  # an app's own may have none
        found = []
        for name in names:
            terms = trainer.terms(name)
            is_file = bundles is None or bundles.of_run(name) is None
            if is_file and terms is not None and terms.privacy:
                use = PlannedUse.of_file(terms, name, evaluates=False)
                found.append(
                    await asyncio.to_thread(self._account.why_not, use, self._process.now())
                )
        return found

    async def _load(self, store: BundleStore) -> None:
        """Load the bundles on disk, before the first visit takes a slot."""
        now = self._process.now()
        loading = asyncio.create_task(store.load(self._trainer.add_bundle, now))
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            loading.cancel()
            await asyncio.gather(loading, stopped, return_exceptions=True)
        if loading.cancelled():
            return
        for head_key, error in loading.result().items():
            # The program cannot run here: do not try it again. Anything else may be mended by
            # fetching it, such as a damaged file or a lease that is over.
            if isinstance(error, BundleError) and error.reason == "engine":
                name = refused(head_key.partition("/")[0], head_key)
                store.refuse(name, error.reason, now, in_words(error))

    async def _prepare(self, task: TaskId, head_key: BlobKey) -> str:
        """Fetch the bundle of a task, outside any session. Returns the problem, if there is one."""
        store, selectors = self._bundles, self._equipment.selectors
        assert store is not None
        source = _CountedSource(DownloadsFrom(self._process.downloads, selectors))
        now = self._process.now()
        try:
            bundle = await store.fetch(head_key, source, self._trainer.add_bundle, now)
        except PapayaError as error:
            if isinstance(error, BundleError):  # asking again does not help: exclude it
                # Rejections are explained for tasks of pinned owners only.
                words = "" if error.reason == "unknown_owner" else in_words(error)
                store.refuse(refused(task, head_key), error.reason, now, words)
            elif isinstance(error, OperatorError) and not isinstance(error, GivenUp):
                # Such as a full disk: take no slot for a while. If it could not be tried (GivenUp),
                # the next visit tries it again.
                store.refuse(refused(task, head_key), "cannot_keep", now, in_words(error))
            self._failures += 1
            return in_words(error)
        self._failures = 0
        return f"{'fetched' if source.files else 'loaded'} the bundle of {bundle.manifest.task}"

    async def run_forever(self, visits: int | None = None) -> None:
        """Make visits until `stop()`, or until this many visits ended, whatever their outcome."""
        sweeping = asyncio.create_task(self._sweep_forever())
        try:
            await self._visit_forever(visits)
        finally:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)

    async def _visit_forever(self, visits: int | None) -> None:
        ended = 0
        while not self._stopping.is_set():
            try:
                finish = await self._visit_if_eligible()
            except OperatorError as error:  # such as a full disk or a locked file: try again
                self._tell_trouble(error)
                pause_s = self._back_off()
            else:
                if finish is None:  # not eligible, so there was no visit
                    await self._wait(self._process.pacing.eligibility_poll_s)
                    continue
                pause_s = self._pause_after(finish)
            ended += 1
            if visits is not None and ended >= visits:
                return
            await self._wait(pause_s)

    async def _visit_if_eligible(self) -> Finish | None:
        reasons = await self._process.reasons_against()
        if not reasons:
            return await self.visit()
        words = tuple(reason.reason for reason in reasons)
        self._notify(NotEligible(self.name, self._process.now(), words))
        return None

    async def _sweep_forever(self) -> None:
        """Delete expired examples, also while the device does not take part."""
        while True:
            try:
                await asyncio.to_thread(self.store.sweep, self._process.now())
            except OperatorError as error:
                self._tell_trouble(error)
            await asyncio.sleep(self._process.pacing.sweep_s)

    def _tell_trouble(self, error: OperatorError) -> None:
        self._notify(Troubled(self.name, self._process.now(), str(error)))

    def stop(self, even_sending: bool = False) -> None:
        """Leave the current visit and start no other. An upload goes on, unless told otherwise."""
        self._stopping.set()
        if self._visit is not None:
            self._visit.interrupt("the device was told to stop", even_sending)

    # -- between and beside visits ------------------------------------------------------------

    def _pause_after(self, finish: Finish) -> float:
        pacing = self._process.pacing
        if finish.ending == "rejected":
            self._failures = 0
            window = (finish.retry_from_s, finish.retry_until_s)
            return self._rng.uniform(min(window), max(window))
        if finish.ending == "unprepared" and self._failures == 0:
            return 0.0
        if finish.ending in _WENT_WELL:
            self._failures = 0
            return pacing.pause_s * self._rng.uniform(0.5, 1.5)
        return self._back_off()

    def _back_off(self) -> float:
        pacing = self._process.pacing
        ceiling = min(pacing.max_backoff_s, pacing.backoff_s * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return self._rng.uniform(ceiling / 2, ceiling)

    async def _wait(self, seconds: float) -> None:
        seconds = max(_SHORTEST_PAUSE_S, seconds)
        self._notify(VisitScheduled(self.name, self._process.now(), seconds))
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _watch(self, visit: DeviceVisit) -> None:
        """Leave when ineligible. On a metered network uploads stop too: they cost money."""
        while True:
            await asyncio.sleep(self._process.pacing.eligibility_poll_s)
            if reasons := await self._process.reasons_against():
                is_metered = any(reason.condition == "unmetered" for reason in reasons)
                visit.interrupt("; ".join(reason.reason for reason in reasons), is_metered)

    def _reached(self, machine: Client, stage: Stage) -> None:
        if stage is not Stage.OVER:
            self._notify(StageReached(self.name, self._process.now(), stage.value, machine.task))

    def _step_done(self, machine: Client, done: int, steps: int) -> None:
        at = self._process.now()
        self._notify(StepsTrained(self.name, at, machine.task or "", done, steps))


class _CountedSource:
    """Counts the files that were downloaded beside the head of a bundle."""

    def __init__(self, source: BlobSource) -> None:
        self._source = source
        self.files = 0

    async def blob(self, key: BlobKey, limit: int) -> bytes:
        return await self._source.blob(key, limit)

    async def file(self, key: BlobKey, limit: int, path: Path) -> None:
        self.files += 1
        await self._source.file(key, limit, path)


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DeviceRuntime:
    """Runs many devices until they are done, or until a signal.

    On SIGTERM or SIGINT every device leaves its session. Running uploads have `drain_s` to finish,
    the other devices leave at once, and after another `leave_s` the process ends in any case.
    """

    def __init__(self, process: DeviceProcess, devices: Sequence[Device]) -> None:
        self._pacing = process.pacing
        self._devices = tuple(devices)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, visits: int | None = None) -> None:
        """Run until every device made its `visits`, or until `stop()`."""
        running = [asyncio.create_task(device.run_forever(visits)) for device in self._devices]
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await self._until_over(running, stopped)
        finally:
            for task in (*running, stopped):
                task.cancel()
            await asyncio.gather(*running, stopped, return_exceptions=True)

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def _until_over(
        self, running: list[asyncio.Task[None]], stopped: asyncio.Task[bool]
    ) -> None:
        pending = {*running, stopped}
        while not stopped.done() and pending != {stopped}:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a bug or a broken disk: report it
        for even_sending, seconds in ((False, self._pacing.drain_s), (True, self._pacing.leave_s)):
            if left := [task for task in running if not task.done()]:
                for device in self._devices:
                    device.stop(even_sending)
                await asyncio.wait(left, timeout=seconds)
