"""One visit: runs the Client machine under asyncio and carries out its effects.

Every effect becomes a task whose outcome comes back as a message; one loop feeds the machine, so
that it never sees two things at once. `Remember` is the exception: it is durable before the effect
after it is carried out, and if it cannot be, nothing after it happens.

If a visit fails, the server learns one reason code (`papaya/messages/reasons.py`). The text of an
error may quote a path, a policy or an example: it is for the device's owner (`detail`,
`explanation`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from traceback import format_exception
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec import structs

from papaya.client.client import Client, Stage
from papaya.client.history import Participated
from papaya.client.work import (
    Answered,
    DirectUploadFailed,
    Download,
    Downloaded,
    Finish,
    Moving,
    Remember,
    RememberDeclined,
    Seal,
    SendRequest,
    Stop,
    Train,
    Trained,
    Unanswered,
    WorkFailed,
)
from papaya.config import DeviceConfig
from papaya.credentials.token_files import Secret
from papaya.device.bundles import Bundle, BundleStore, VisitBundles
from papaya.device.download import task_of
from papaya.device.example_store import ExampleStore, UseRefused
from papaya.device.executor import GivenUp
from papaya.device.ledger import PlannedUse, PrivacyAccount
from papaya.device.measurements import trained_length, uploaded
from papaya.device.process import DeviceProcess
from papaya.device.training import Trainer, TrainingRequest
from papaya.device.trust import no_tag
from papaya.errors import PapayaError, ProtocolError
from papaya.learning.client_training import StepDone, unwatched
from papaya.learning.compression import encode_update, session_seed
from papaya.learning.parameters import FLOAT32
from papaya.machine import Effects
from papaya.messages.base import Message, TaskId
from papaya.messages.participation import Joined, Leave, LeaveReason, UploadGranted
from papaya.messages.selection import CheckIn
from papaya.secagg.parameters import PublicParameters

_SENDING = (Stage.UPLOADING, Stage.COMPLETING)
_LONGEST_WAIT_S = 3600.0
_NO_TRUST = "this device has no trust policy for secure aggregation"
_TRUST_HINT = "papaya client --trust FILE"
_UPLOAD_HOST_HINT = "to allow it: --upload-host HOST:PORT; the scheme is https if the selector's is"
_REROUTED = {
    "moved": (
        "it does not serve the task now",
        "if this does not stop, upload_url points to the wrong aggregator",
    ),
    "refused": ("it refused the request", "an upload_url must lead to one aggregator only"),
    "unexpected": ("another server seems to answer there", "check upload_url at the aggregator"),
}


class Participations(Protocol):
    """Where participations are recorded (`DeviceHistory` on a real device)."""

    def remember(self, task: TaskId, participated: Participated) -> None: ...

    def remember_declined(self, task: TaskId, at: float) -> None: ...


class Equipment(NamedTuple):
    """What one device uses in its visits."""

    process: DeviceProcess
    selectors: tuple[str, ...]
    token: Secret | None
    config: DeviceConfig
    store: ExampleStore
    history: Participations
    trainer: Trainer
    bundles: BundleStore | None = None
    account: PrivacyAccount | None = None


class _LeftState(NamedTuple):
    """The arguments of `ExampleStore.keep_state`."""

    task: str
    run: str
    collection: str
    state: bytes
    began_at: float
    trained_from: bytes


class DeviceVisit:
    """One visit. If cancelled, it stops without a message, like a device that lost its power."""

    def __init__(
        self,
        machine: Client,
        equipment: Equipment,
        reached: Callable[[Stage], None],
        step_done: StepDone = unwatched,
        bundles: VisitBundles | None = None,
    ) -> None:
        """`bundles`: where the machine looks bundles up; None if the device has pinned no owner."""
        self.machine = machine
        self._bundles = bundles
        # What went wrong, in a line, and all that is known about it.
        self.detail = ""
        self.explanation = ""
        self._equipment = equipment
        self._process = equipment.process
        self._reached = reached
        self._step_done = step_done
        self._stage: Stage | None = None
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._tasks: dict[asyncio.Task[None], bool] = {}  # is it a goodbye?
        self._parameters = b""
        # Was the cost of this participation written to the ledger?
        self._is_charged = False
        self._planned: PlannedUse | None = None  # what it trained or sealed under
        # What training leaves on the device, until the update is counted.
        self._left: _LeftState | None = None
        self._finish: Finish | None = None
        # Why the last request to an aggregator itself had no answer, and a hint.
        self._direct_problem = ("no answer came in time", "")

    async def run(self) -> Finish:
        try:
            await self._carry_out(self.machine.start(self._process.now()))
            while self._finish is None:
                message = await self._next_message()
                now = self._process.now()
                if message is not None:
                    await self._carry_out(self.machine.receive(now, message))
                elif now >= self.machine.next_wake():
                    await self._carry_out(self.machine.wake(now))
            await self._say_goodbye()
            return self._finish
        finally:
            await self._cancel(list(self._tasks))

    def interrupt(self, detail: str, even_sending: bool = False) -> None:
        """Leave. A running upload is finished, unless told otherwise: the participation is already
        recorded, and the rest takes seconds.
        """
        if even_sending or self.machine.stage not in _SENDING:
            self.detail = detail
            self._inbox.put_nowait(Stop())

    # -- the loop ---------------------------------------------------------------------------

    async def _next_message(self) -> Message | None:
        wait_s = self.machine.next_wake() - self._process.now()
        try:
            async with asyncio.timeout(min(max(0.0, wait_s), _LONGEST_WAIT_S)):
                return await self._inbox.get()
        except TimeoutError:
            return None

    async def _carry_out(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case SendRequest():
                    self._spawn(self._request(effect), isinstance(effect.message, Leave))
                case Download():
                    self._spawn(self._download(effect))
                case Train():
                    self._spawn(self._train(effect))
                case Seal():
                    self._spawn(self._seal(effect))
                case Remember():
                    if not await self._remember(effect):
                        break
                case RememberDeclined():
                    await self._remember_declined(effect)
                case DirectUploadFailed():
                    self._tell_of_reroute(effect)
                case Finish():
                    if effect.ending == "counted":
                        await self._keep_state()
                    self._finish = effect
        if self.machine.stage is not self._stage:
            self._stage = self.machine.stage
            self._reached(self._stage)

    def _spawn(self, work: Coroutine[Any, Any, None], is_goodbye: bool = False) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = is_goodbye
        task.add_done_callback(self._tasks.pop)

    async def _say_goodbye(self) -> None:
        await self._cancel([task for task, is_goodbye in self._tasks.items() if not is_goodbye])
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._process.pacing.leave_s)

    async def _cancel(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fail(self, error: Exception, otherwise: LeaveReason) -> None:
        """Leave because of this error; `otherwise` is the code if the error has none."""
        self.detail = in_words(error)
        self.explanation = _explained(error)
        code: LeaveReason = "declined" if isinstance(error, UseRefused) else otherwise
        self._inbox.put_nowait(WorkFailed(error.code if isinstance(error, GivenUp) else code))

    # -- effects ----------------------------------------------------------------------------

    async def _request(self, effect: SendRequest) -> None:
        config, message = self._equipment.config, effect.message
        is_held = isinstance(message, CheckIn)
        timeout_s = config.check_in_timeout_s if is_held else config.request_timeout_s
        moving = partial(self._inbox.put_nowait, Moving(effect.attempt))
        answer = await self._process.selectors.ask(
            effect.to,
            self._equipment.token,
            message,
            timeout_s,
            moving,
            failed=None if effect.to in self._equipment.selectors else self._direct_failed,
        )
        if isinstance(answer, UploadGranted):
            answer = self._with_allowed_url(self._within_signed_time(answer), effect.to)
        outcome = Unanswered(effect.attempt) if answer is None else Answered(effect.attempt, answer)
        self._inbox.put_nowait(outcome)

    def _with_allowed_url(self, granted: UploadGranted, selector: str) -> UploadGranted:
        hosts, url = self._process.upload_hosts, granted.upload_url
        if not url or hosts.allows_upload(url, selector):
            return granted
        if hosts:  # otherwise the owner wants no direct uploads
            problem = "the owner of the device does not allow this address"
            self._process.upload_rerouted(url, "not_allowed", problem, _UPLOAD_HOST_HINT)
        return structs.replace(granted, upload_url="")

    def _direct_failed(self, problem: str, hint: str) -> None:
        self._direct_problem = (problem, hint)

    def _tell_of_reroute(self, failed: DirectUploadFailed) -> None:
        problem, hint = _REROUTED.get(failed.reason) or self._direct_problem
        self._process.upload_rerouted(failed.url, failed.reason, problem, hint)

    def _within_signed_time(self, granted: UploadGranted) -> UploadGranted:
        """Upload as long as the server allows, and not longer than the task's owner has signed."""
        joined = self.machine.joined
        bundle = None if joined is None else self._bundle(task_of(joined.parameters))
        if bundle is None:
            return granted
        timeout_s = min(granted.upload_timeout_s, bundle.manifest.upload_timeout_s)
        return structs.replace(granted, upload_timeout_s=timeout_s)

    def _bundle(self, program: TaskId) -> Bundle | None:
        bundles = self._equipment.bundles
        return None if bundles is None else bundles.of_run(program)

    async def _download(self, effect: Download) -> None:
        try:
            self._check_offer(effect)
            await self._check_budget()
            self._parameters = await self._process.downloads.get(
                effect.parameters, effect.model_length, self._equipment.selectors
            )
        except Exception as error:  # `knows` and `terms` are the app's code
            self._fail(error, "no_parameters")
        else:
            self._inbox.put_nowait(Downloaded())

    def _check_offer(self, effect: Download) -> None:
        joined = self.machine.joined
        assert joined is not None
        program = task_of(effect.parameters)
        if program != joined.task and not joined.evaluates:
            raise GivenUp(
                "protocol", f"for task {joined.task!r}, the server sent parameters of {program!r}"
            )
        bundles = self._equipment.bundles
        if bundles is not None and (reason := bundles.why_not(program, self._process.now())):
            raise GivenUp("declined", f"task {program!r}: {reason}")
        self._check_manifest(program)
        bundle = self._bundle(program)
        if bundle is not None and joined.evaluates:
            bundle.check_evaluation()
        if not self._equipment.trainer.knows(program):
            # An app's own trainer need not list its tasks.
            names: tuple[TaskId, ...] = getattr(self._equipment.trainer, "tasks", ())
            name = names[0] if len(names) == 1 else "NAME-IN-THE-FILE"
            raise GivenUp(
                "no_program",
                f"this device has no task file for {program!r}",
                hint=f"if it was submitted under another name: --alias {program}={name}",
            )
        terms = self._equipment.trainer.terms(program)
        if terms is not None and terms.secure != joined.secure:
            has_it = "has" if terms.secure else "does not have"
            raise GivenUp(
                "mismatch",
                f"the device's file of {program!r} and the server's task differ on secure "
                f"aggregation: the file {has_it} it",
                hint="give devices exactly the file that was submitted",
            )
        _check_upload_bits(program, joined, bundle)
        if joined.secure and self._process.trust is None:
            raise GivenUp("declined", _NO_TRUST, hint=_TRUST_HINT)  # now, not after training
        limit = self._process.limits.max_model_bytes
        if 4 * max(joined.model_length, joined.update_length) > limit:
            raise GivenUp(
                "declined",
                f"the task has {joined.model_length} parameters and updates of "
                f"{joined.update_length} values, above this device's limit of {limit} bytes",
            )

    async def _check_budget(self) -> None:
        account, use = self._equipment.account, self._use()
        if account is None:
            if use.terms is not None and use.terms.privacy:
                raise GivenUp("declined", "this device has no ledger for a private task")
        elif reason := await asyncio.to_thread(account.why_not, use, self._process.now()):
            raise GivenUp("declined", reason, hint="papaya client budget shows what was spent")
        elif not use.evaluates:
            account.check_window(use)

    def _use(self) -> PlannedUse:
        """What this visit would be charged for."""
        joined, bundles = self.machine.joined, self._equipment.bundles
        assert joined is not None
        program = task_of(joined.parameters)
        terms, bundle = self._equipment.trainer.terms(program), self._bundle(program)
        if bundle is None or bundles is None:
            return PlannedUse.of_file(terms, program, evaluates=joined.evaluates)
        share, manifest = bundles.policy_of(bundle).budget_share, bundle.manifest
        return PlannedUse(terms, manifest.owner, manifest.task, share, joined.evaluates)

    def _check_manifest(self, program: TaskId) -> None:
        """Check that this visit trains under the manifest that it joined under. Another visit of
        this process may have replaced it; then the server would weigh the update wrongly.
        """
        accepted = None if self._bundles is None else self._bundles.accepted
        if accepted is None:
            return
        assert self._equipment.bundles is not None
        newest = self._equipment.bundles.of_run(program)
        if newest is None or newest.manifest != accepted:
            raise GivenUp("mismatch", f"task {program!r}: the owner has replaced this revision")

    async def _train(self, effect: Train) -> None:
        joined = self.machine.joined
        assert joined is not None
        program, store = task_of(effect.parameters), self._equipment.store
        try:
            async with self._process.training_slot():
                self._check_manifest(program)
                self._planned = self._use()
                terms = self._planned.terms
                length = trained_length(terms, joined)
                began_at = self._process.now()
                state = await asyncio.to_thread(store.state_of, self._state_name(program), program)
                self._check_state(state)
                assignment = TrainingRequest(
                    effect.task,
                    program,
                    effect.session,
                    self._parameters,
                    joined.model_length,
                    length,
                    joined.evaluates and not joined.norms,
                    joined.secure,
                    self._training_s(program, effect.timeout_s),
                    self._step_done,
                    is_clipped=not joined.norms,
                    device_state=state,
                )
                trained = await self._equipment.trainer.train(assignment, store)
                self._check_state(trained.device_state)
                if trained.device_state and terms and terms.collection and not joined.evaluates:
                    self._left = _LeftState(
                        self._state_name(program),
                        program,
                        terms.collection,
                        trained.device_state,
                        began_at,
                        state,
                    )
            _check_update(trained, length)
            trained = uploaded(trained, terms, joined)
            _check_update(trained, joined.update_length)
            if joined.upload_bits != 32 and not joined.secure:
                clip = None if terms is None else terms.clip
                trained = await asyncio.to_thread(_in_fewer_bits, trained, joined, clip)
        except Exception as error:  # `knows` and `terms` are the app's code
            self._fail(error, "training_failed")
        else:
            self._inbox.put_nowait(trained)

    def _state_name(self, program: TaskId) -> str:
        """Under which name this device keeps the state of a task: the same for all its runs."""
        bundle = self._bundle(program)
        return program if bundle is None else f"{bundle.manifest.owner}/{bundle.manifest.task}"

    def _check_state(self, state: bytes) -> None:
        if (account := self._equipment.account) is not None and self._planned is not None:
            account.check_state(self._planned, state)

    async def _keep_state(self) -> None:
        """Once the server has acknowledged the update: an update that is not counted must not
        change what the device keeps. If it is lost here, the device trains from the earlier state.
        """
        if self._left is None:
            return
        try:
            await asyncio.to_thread(self._equipment.store.keep_state, *self._left)
        except PapayaError as error:
            problem = "the update is counted, but the personal tensors could not be stored"
            self.detail = f"{problem}: {in_words(error)}"

    def _training_s(self, program: TaskId, asked_s: float) -> float:
        """The time that the server gives, and not more than the task's owner has signed."""
        bundle = self._bundle(program)
        return asked_s if bundle is None else min(asked_s, bundle.manifest.training_timeout_s)

    async def _seal(self, effect: Seal) -> None:
        joined, trust = self.machine.joined, self._process.trust
        assert joined is not None
        program = task_of(joined.parameters)
        terms = self._equipment.trainer.terms(program)
        try:
            self._check_manifest(program)
            self._planned = self._use()
            if trust is None or terms is None:
                raise GivenUp("declined", _NO_TRUST, hint=_TRUST_HINT)
            bundle = self._bundle(program)
            if bundle is not None and joined.evaluates:
                offered = PublicParameters.decode(effect.offer.parameters)
                bundle.check_evaluation(offered.aggregation_goal)
            account = self._equipment.account
            tag = no_tag if account is None else account.tag
            done = await trust.seal_aside(
                effect, terms, evaluates=joined.evaluates, norms=joined.norms, tag=tag
            )
        except Exception as error:  # whatever goes wrong, nothing was masked
            self._fail(error, "untrusted")
        else:
            self._inbox.put_nowait(done)

    async def _remember(self, effect: Remember) -> bool:
        """Write the participation and its cost, before the first byte of the update is sent."""
        history = self._equipment.history
        try:
            await self._spend()
            await asyncio.to_thread(history.remember, effect.task, effect.participated)
        except PapayaError as error:
            self._fail(error, "storage")
            return False
        return True

    async def _remember_declined(self, effect: RememberDeclined) -> None:
        history = self._equipment.history
        try:
            await asyncio.to_thread(history.remember_declined, effect.task, effect.at)
        except PapayaError as error:  # the visit ends all the same
            self.detail = in_words(error)

    async def _spend(self) -> None:
        account = self._equipment.account
        if account is not None and not self._is_charged:
            planned = self._planned or self._use()
            await asyncio.to_thread(account.spend, planned, self._process.now())
            self._is_charged = True


def _check_update(trained: Trained, length: int) -> None:
    if len(trained.update) != 4 * length:
        raise ProtocolError(
            f"training gave {len(trained.update)} bytes, the task takes {4 * length}"
        )


def _in_fewer_bits(trained: Trained, joined: Joined, clip: float | None) -> Trained:
    numbers = np.frombuffer(trained.update, FLOAT32)
    seed = session_seed(joined.session)
    encoded = encode_update(numbers, joined.upload_bits, seed, clip)
    return structs.replace(trained, update=encoded)


def _explained(error: Exception) -> str:
    """All that is known about an error, for the device's own log."""
    if isinstance(error, GivenUp):
        return error.traceback
    return "" if isinstance(error, PapayaError) else "".join(format_exception(error))


def _check_upload_bits(program: TaskId, joined: Joined, bundle: Bundle | None) -> None:
    bits = joined.upload_bits
    signed = bits if bundle is None else bundle.manifest.upload_bits or 32
    if bits != signed and not joined.evaluates:
        raise GivenUp(
            "mismatch",
            f"the server asks for updates in {bits} bits, the owner of {program!r} has signed "
            f"{signed}",
        )
    if bits != 32 and (joined.evaluates or (joined.secure and bits != 16)):
        raise GivenUp("protocol", f"updates of {program!r} cannot have {bits} bits")


def in_words(error: Exception) -> str:
    """The error and its hint, for the device's own log."""
    if not isinstance(error, PapayaError):
        return f"{type(error).__name__}: {error}"
    return f"{error}; hint: {error.hint}" if error.hint else str(error)
