"""The admin API over HTTP: typed JSON in and out, parameters as files.

    PUT  /admin/tasks/{task}/parameters?model_length=N     a parameters file, before the task
    PUT  /admin/tasks/{task}/program                        the archive of a bundle, before the task
    PUT  /admin/tasks/{task}/frozen                         its frozen tensors, before the task
    POST /admin/tasks                                       submit
    POST /admin/tasks/{task}/revise                         new settings, signed
    GET  /admin/tasks   /admin/tasks/{task}   …/points?after=V   …/versions   …/bundle   …/revisions
    GET  /admin/tasks/{task}/versions/{version}/parameters  a number, or `newest`
    POST /admin/tasks/{task}/pause | resume | cancel | delete | rollback | mark | evaluate | share
    GET  /admin/status   /admin/whoami   /admin/events
    GET  /admin/revocations                                 POST: revoke a device, or undo it
    GET  /admin/accounts                                    POST: add an account
    POST /admin/accounts/{account}/revoke | quota
    POST /admin/maintenance                                 …/end: let training go on
    POST /admin/keys/rotate                                 replace all ticket keys now
    GET  /admin/audit?after=N                               POST …/prune: delete exported rows

Errors are {"error", "hint"} with 400, 401, 403, 404, 409, 413, 503 or 507. `Gate` checks the token
and the role (papaya/server/admin/access.py). Bodies are bounded: JSON to 1 MiB, parameters by
`model_length`. Every POST is a change: it is done with a row in the audit trail, or refused with
one; a repeated one that has nothing left to change has none. A request without a valid token has
none either, because strangers must not fill the state store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import sha256
from typing import Protocol, TypeAlias, TypeVar
from urllib.parse import parse_qs, unquote

import msgspec

from papaya.bundle.archive import MAX_ARCHIVE_BYTES
from papaya.config import MAX_MODEL_LENGTH
from papaya.config.checks import require_known_fields
from papaya.errors import ConfigError, MissingBlob, OperatorError, ProtocolError
from papaya.http.exchange import Exchange
from papaya.http.routes import HttpRoute, Receiver
from papaya.learning.frozen_file import MAX_FROZEN_BYTES
from papaya.messages.audit_trail import Attempt
from papaya.messages.storage import Outcome, TaskRow, TaskState, Transaction
from papaya.server.admin import accounts, bundles, maintenance, rollouts, submissions
from papaya.server.admin.access import Begin, Caller, Gate, Identifies
from papaya.server.admin.problems import AdminProblem, Forbidden, NotFound
from papaya.server.admin.service import AdminService
from papaya.server.admin.views import (
    BeginMaintenance,
    BeginRollout,
    ChangeReason,
    EndRollout,
    Evaluate,
    Mark,
    NewAccount,
    NewTask,
    ProblemBody,
    PruneTrail,
    Revision,
    Revoke,
    RevokeAccount,
    RollBack,
    RotateTicketKeys,
    SetQuota,
    SetShare,
    Stored,
)

logger = logging.getLogger("papaya.admin")

MAX_JSON_BYTES = 1 << 20
_MAX_DETAIL = 100
T = TypeVar("T")


class Explained(Protocol):
    """A change that says why it is made."""

    @property
    def why(self) -> str: ...


C = TypeVar("C", bound=Explained)
PendingAnswer = Awaitable[object]
MakeChange: TypeAlias = Callable[[str, C, Attempt], Awaitable[object]]
"""Makes a change to a task or an account, as requested, for this attempt."""
MakeChangeFor: TypeAlias = Callable[[Caller, str, C, Attempt], Awaitable[object]]
"""The same, if it depends on who asks."""
_TASK = "/admin/tasks/{task}"
_STATES: dict[str, TaskState] = {"pause": "paused", "resume": "running", "cancel": "cancelled"}


class AdminRoutes:
    """Passes requests to the service. Every request is answered, also after an error."""

    def __init__(self, service: AdminService, identities: Identifies) -> None:
        self._service = service
        self._gate = Gate(identities)
        self._running: set[asyncio.Task[None]] = set()

    def routes_of_every_role(self) -> list[HttpRoute]:
        """What a server without a coordinator answers too."""
        service = self._service
        return [
            self._get("/admin/status", lambda caller, exchange: service.status()),
            self._get(
                "/admin/events",
                lambda caller, _: service.events(for_operator=caller.role == "operator"),
            ),
            self._get("/admin/whoami", lambda caller, _: accounts.whoami(service.state, caller)),
        ]

    def routes(self) -> list[HttpRoute]:
        return [*self.routes_of_every_role(), *self._task_routes(), *self._other_routes()]

    def _task_routes(self) -> list[HttpRoute]:
        service = self._service
        return [
            self._get("/admin/tasks", lambda caller, exchange: service.tasks()),
            self._get(_TASK, lambda caller, exchange: service.task(_task(exchange))),
            self._get(f"{_TASK}/points", self._points),
            self._get(f"{_TASK}/versions", lambda _, exchange: service.versions(_task(exchange))),
            self._gate.route(
                "GET",
                f"{_TASK}/versions/{{version}}/parameters",
                _with_body(lambda caller, exchange, body: self._on_parameters(exchange)),
            ),
            self._change_for("submit", "/admin/tasks", NewTask, self._submit),
            *(self._state_route(action, state) for action, state in _STATES.items()),
            self._change("rollback", f"{_TASK}/rollback", RollBack, service.roll_back),
            self._change("mark", f"{_TASK}/mark", Mark, service.mark),
            self._change("share", f"{_TASK}/share", SetShare, service.set_share),
            self._change_for("evaluate", f"{_TASK}/evaluate", Evaluate, self._evaluate),
            self._change("delete", f"{_TASK}/delete", ChangeReason, self._delete),
            self._get(
                f"{_TASK}/revisions",
                self._revisions,
            ),
            self._get(
                f"{_TASK}/bundle", lambda _, exchange: bundles.newest(service, _task(exchange))
            ),
            self._change_for(
                "revise", f"{_TASK}/revise", Revision, partial(bundles.revise, service)
            ),
            self._change_for(
                "begin-rollout", f"{_TASK}/rollout", BeginRollout, partial(rollouts.begin, service)
            ),
            self._change(
                "end-rollout", f"{_TASK}/rollout/end", EndRollout, partial(rollouts.end, service)
            ),
            self._upload("program", bundles.store_program, MAX_ARCHIVE_BYTES),
            self._upload("frozen", bundles.store_frozen, MAX_FROZEN_BYTES),
            self._gate.route(
                "PUT",
                f"{_TASK}/parameters",
                self._receive_parameters,
                submissions.max_parameters_bytes(MAX_MODEL_LENGTH),
            ),
        ]

    def _other_routes(self) -> list[HttpRoute]:
        service, account = self._service, "/admin/accounts/{account}"
        revoke, set_quota = partial(accounts.revoke, service), partial(accounts.set_quota, service)
        return [
            self._get("/admin/revocations", lambda caller, exchange: service.revocations()),
            self._change(
                "revoke", "/admin/revocations", Revoke, self._revoke, service.check_revocation
            ),
            self._get("/admin/accounts", lambda caller, exchange: accounts.listed(service)),
            self._change("add-account", "/admin/accounts", NewAccount, self._add_account),
            self._change("revoke-account", f"{account}/revoke", RevokeAccount, revoke),
            self._change("set-quota", f"{account}/quota", SetQuota, set_quota),
            self._change(
                "begin-maintenance", "/admin/maintenance", BeginMaintenance, self._begin_maintenance
            ),
            self._change(
                "end-maintenance", "/admin/maintenance/end", ChangeReason, self._end_maintenance
            ),
            self._change(
                "rotate-ticket-keys", "/admin/keys/rotate", RotateTicketKeys, self._rotate
            ),
            self._get("/admin/audit", self._audit),
            self._change("prune-audit-trail", "/admin/audit/prune", PruneTrail, self._prune),
        ]

    # -- kinds of routes --------------------------------------------------------------------

    def _get(self, path: str, ask: Callable[[Caller, Exchange], PendingAnswer]) -> HttpRoute:
        def handle(caller: Caller, exchange: Exchange, body: bytes) -> None:
            self._answer(exchange, ask(caller, exchange))

        return self._gate.route("GET", path, _with_body(handle))

    def _change(
        self,
        action: str,
        path: str,
        kind: type[C],
        change: MakeChange[C],
        check: Callable[[C], None] = lambda request: None,
    ) -> HttpRoute:
        return self._change_for(action, path, kind, lambda caller, *asked: change(*asked), check)

    def _change_for(
        self,
        action: str,
        path: str,
        kind: type[C],
        change: MakeChangeFor[C],
        check: Callable[[C], None] = lambda request: None,
    ) -> HttpRoute:
        """`check` raises before what is in the request is recorded."""

        def handle(caller: Caller, exchange: Exchange, body: bytes) -> None:
            async def attempt() -> object:
                target = _target(exchange)
                made = Attempt(caller.name, action, target)
                try:
                    request = _parsed(body, kind)
                    check(request)
                    made = _attempt(caller.name, action, target, request)
                    return await change(caller, target, request, made)
                except Exception as error:
                    await self._service.trail.refuse(made, error)
                    raise

            self._answer(exchange, attempt())

        def refuse(caller: Caller, exchange: Exchange, problem: Forbidden) -> None:
            async def attempt() -> object:
                made = Attempt(caller.name, action, _target(exchange))
                await self._service.trail.refuse(made, problem)
                raise problem

            self._answer(exchange, attempt())

        return self._gate.route("POST", path, _with_body(handle), MAX_JSON_BYTES, refuse)

    def _state_route(self, action: str, state: TaskState) -> HttpRoute:
        async def change(task: str, reason: ChangeReason, attempt: Attempt) -> object:
            return await self._service.set_state(task, state, attempt)

        return self._change(action, f"{_TASK}/{action}", ChangeReason, change)

    async def _submit(self, caller: Caller, _: str, new: NewTask, attempt: Attempt) -> object:
        return await submissions.submit(self._service, caller, new, attempt)

    async def _evaluate(
        self, caller: Caller, task: str, request: Evaluate, attempt: Attempt
    ) -> object:
        async def transact(change: Transaction) -> Outcome:
            [config] = [
                row.config
                for _, row in change.put
                if isinstance(row, TaskRow) and row.config.evaluates is not None
            ]
            service = self._service
            return await accounts.transact_within_quota(service, caller, config, change, attempt)

        return await self._service.evaluate(task, request, attempt, transact)

    async def _add_account(self, _: str, new: NewAccount, attempt: Attempt) -> object:
        return await accounts.add(self._service, new, attempt)

    async def _delete(self, task: str, _: ChangeReason, attempt: Attempt) -> object:
        return await self._service.delete(task, attempt)

    async def _revoke(self, _: str, request: Revoke, attempt: Attempt) -> object:
        return await self._service.revoke(request, attempt)

    async def _prune(self, _: str, request: PruneTrail, attempt: Attempt) -> object:
        return await self._service.trail.prune(request, attempt)

    async def _begin_maintenance(
        self, _: str, request: BeginMaintenance, attempt: Attempt
    ) -> object:
        await maintenance.begin(self._service, request, attempt)
        return await self._service.status()

    async def _end_maintenance(self, _: str, request: ChangeReason, attempt: Attempt) -> object:
        await maintenance.end(self._service, attempt)
        return await self._service.status()

    async def _rotate(self, _: str, request: RotateTicketKeys, attempt: Attempt) -> object:
        await self._service.rotate_ticket_keys(attempt)
        return await self._service.status()

    async def _audit(self, caller: Caller, exchange: Exchange) -> object:
        return await self._service.trail.page(_number(exchange, "after", 0))

    async def _revisions(self, caller: Caller, exchange: Exchange) -> object:
        return await bundles.revisions(self._service, _task(exchange))

    async def _points(self, caller: Caller, exchange: Exchange) -> object:
        return await self._service.points(_task(exchange), _number(exchange, "after", -1))

    # -- answers ----------------------------------------------------------------------------

    def _answer(self, exchange: Exchange, asked: PendingAnswer) -> None:
        async def answer() -> None:
            exchange.answer(200, msgspec.json.encode(await asked))

        self._start(exchange, answer())

    def _on_parameters(self, exchange: Exchange) -> None:
        async def answer() -> None:
            version = exchange.captured["version"]
            row, path = await self._service.parameters(_task(exchange), version)
            headers = (("Papaya-Version", str(row.version)), ("ETag", f'"{row.parameters}"'))
            exchange.answer_file(path, headers)

        self._start(exchange, answer())

    def _start(self, exchange: Exchange, answer: Awaitable[None]) -> None:
        task = asyncio.ensure_future(_answer_errors(exchange, answer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    # -- blobs of a new task ----------------------------------------------------------------

    def _upload(
        self,
        what: str,
        keep: Callable[[AdminService, str, bytes], Awaitable[Stored]],
        limit: int,
    ) -> HttpRoute:
        def receive(caller: Caller, exchange: Exchange) -> Receiver:
            def store(data: bytes) -> None:
                self._answer(exchange, keep(self._service, _task(exchange), data))

            return _Whole(exchange.head.length, store)

        return self._gate.route("PUT", f"{_TASK}/{what}", receive, limit)

    def _receive_parameters(self, caller: Caller, exchange: Exchange) -> Receiver | None:
        length = _number(exchange, "model_length", 0)
        most = submissions.max_parameters_bytes(min(length, MAX_MODEL_LENGTH))
        if length < 1 or exchange.head.length > most:
            problem = ProblemBody(
                f"{exchange.head.length} bytes for model_length = {length}",
                "declare the model's length: PUT …/parameters?model_length=N",
            )
            exchange.answer(400 if length < 1 else 413, msgspec.json.encode(problem))
            return None

        def store(data: bytes) -> None:
            stored = submissions.store_parameters(self._service, _task(exchange), length, data)
            self._answer(exchange, stored)

        return _Whole(exchange.head.length, store)


def _with_body(handle: Callable[[Caller, Exchange, bytes], None]) -> Begin:
    def begin(caller: Caller, exchange: Exchange) -> Receiver:
        return _Whole(exchange.head.length, lambda body: handle(caller, exchange, body))

    return begin


class _Whole:
    """A body in one piece of memory, received in place."""

    def __init__(self, length: int, done: Callable[[bytes], None]) -> None:
        self._data = bytearray(length)
        self._place = 0
        self._done = done

    def buffer(self, remaining: int) -> memoryview:
        return memoryview(self._data)[self._place :]

    def received(self, count: int) -> None:
        self._place += count

    def finished(self) -> None:
        data, self._data = bytes(self._data), bytearray()
        self._done(data)

    def broken(self) -> None:
        self._data = bytearray()


async def _answer_errors(exchange: Exchange, answer: Awaitable[None]) -> None:
    try:
        await answer
    except Exception as error:
        status, problem = as_problem(error)
        exchange.answer(status, msgspec.json.encode(problem))


def as_problem(error: Exception) -> tuple[int, ProblemBody]:
    """The answer to an error: the caller's errors in detail, internal errors without."""
    match error:
        case AdminProblem():
            return error.status, ProblemBody(str(error), error.hint)
        case MissingBlob():
            return NotFound.status, ProblemBody(str(error), error.hint)
        case OperatorError() | ProtocolError():
            return 400, ProblemBody(str(error), error.hint)
    logger.error("an admin request failed", exc_info=error)
    return 500, ProblemBody("internal server error", "check the server's log")


def _attempt(actor: str, action: str, target: str, request: Explained) -> Attempt:
    """What a request asks for. Long values, like settings and bundles, are named by digests."""
    details = {}
    for name, value in msgspec.to_builtins(request).items():
        encoded = msgspec.json.encode(value)
        if name != "why" and value is not None:
            is_long = len(encoded) > _MAX_DETAIL
            details[name] = f"sha256:{sha256(encoded).hexdigest()}" if is_long else value
    if isinstance(request, NewTask):
        target = request.config.task
    if isinstance(request, Revoke):
        target = request.device
    if isinstance(request, Revoke | RevokeAccount) and not request.revoked:
        action = f"undo-{action}"
    if isinstance(request, NewAccount):
        target = request.name
    return Attempt(actor, action, target, msgspec.json.encode(details).decode(), request.why)


def _task(exchange: Exchange) -> str:
    return exchange.captured.get("task", "")


def _target(exchange: Exchange) -> str:
    """The task or the account that a path names."""
    return unquote(exchange.captured.get("account", "")) or _task(exchange)


def _number(exchange: Exchange, name: str, default: int) -> int:
    values = parse_qs(exchange.head.query).get(name, [])
    if not values:
        return default
    text = values[-1]
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else default


def _parsed(body: bytes, kind: type[T]) -> T:
    try:
        found = msgspec.json.decode(body or b"{}", type=kind)
        if isinstance(
            found, NewTask | Revision | BeginRollout
        ):  # people write the configuration in it
            written = msgspec.json.decode(body)["config"]
            require_known_fields(written, msgspec.to_builtins(found.config), ".config")
        return found
    except ConfigError:
        raise
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OperatorError(
            f"invalid {kind.__name__}: {str(error)[:200]}", hint="use --help with the command"
        ) from error
