"""The admin API over HTTP: typed JSON in and out, parameters as files.

    PUT  /admin/tasks/{task}/parameters?model_length=N     a parameters file, before the task
    PUT  /admin/tasks/{task}/program                        the archive of a bundle, before the task
    POST /admin/tasks                                       submit
    POST /admin/tasks/{task}/revise                         new settings, signed
    GET  /admin/tasks   /admin/tasks/{task}   …/points?after=V   …/versions   …/bundle   …/revisions
    GET  /admin/tasks/{task}/versions/{version}/parameters  a number, or `newest`
    POST /admin/tasks/{task}/pause | resume | cancel | delete | rollback | mark | evaluate
    GET  /admin/status
    GET  /admin/revocations                                 POST: revoke a device, or undo it

Errors are {"error", "hint"} with 400, 404, 409, 413, 503 or 507. `guarded` in
papaya/server/auth.py checks the token. Bodies are bounded: JSON to 1 MiB, parameters by
`model_length`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import parse_qs

import msgspec

from papaya.bundle.archive import MAX_ARCHIVE_BYTES
from papaya.config import MAX_MODEL_LENGTH
from papaya.config.checks import require_known_fields
from papaya.errors import ConfigError, MissingBlob, OperatorError, ProtocolError
from papaya.http.exchange import Exchange
from papaya.http.routes import Buffered, HttpRoute, Receiver, Streamed
from papaya.messages.storage import TaskState
from papaya.server.admin import bundles, submissions
from papaya.server.admin.problems import AdminProblem, NotFound
from papaya.server.admin.service import AdminService
from papaya.server.admin.views import (
    ChangeReason,
    Evaluate,
    Mark,
    NewTask,
    ProblemBody,
    Revision,
    Revoke,
    RollBack,
)

logger = logging.getLogger("papaya.admin")

MAX_JSON_BYTES = 1 << 20
T = TypeVar("T")
PendingAnswer = Awaitable[object]
_TASK = "/admin/tasks/{task}"
_STATES: dict[str, TaskState] = {"pause": "paused", "resume": "running", "cancel": "cancelled"}


class AdminRoutes:
    """Passes requests to the service. Every request is answered, also after an error."""

    def __init__(self, service: AdminService) -> None:
        self._service = service
        self._running: set[asyncio.Task[None]] = set()

    def status_route(self) -> HttpRoute:
        return self._get("/admin/status", lambda exchange: self._service.status())

    def routes(self) -> list[HttpRoute]:
        service = self._service
        return [
            self.status_route(),
            self._get("/admin/tasks", lambda exchange: service.tasks()),
            self._get(_TASK, lambda exchange: service.task(_task(exchange))),
            self._get(f"{_TASK}/points", self._points),
            self._get(f"{_TASK}/versions", lambda exchange: service.versions(_task(exchange))),
            Buffered("GET", f"{_TASK}/versions/{{version}}/parameters", self._on_parameters),
            self._post("/admin/tasks", NewTask, lambda _, new: submissions.submit(service, new)),
            *(self._state_route(action, state) for action, state in _STATES.items()),
            self._post(f"{_TASK}/rollback", RollBack, service.roll_back),
            self._post(f"{_TASK}/mark", Mark, service.mark),
            self._post(f"{_TASK}/evaluate", Evaluate, service.evaluate),
            self._post(f"{_TASK}/delete", ChangeReason, lambda task, _: service.delete(task)),
            self._get(
                f"{_TASK}/revisions",
                lambda exchange: bundles.revisions(service, _task(exchange)),
            ),
            self._get(f"{_TASK}/bundle", lambda exchange: bundles.newest(service, _task(exchange))),
            self._post(
                f"{_TASK}/revise",
                Revision,
                lambda task, revision: bundles.revise(service, task, revision),
            ),
            Streamed("PUT", f"{_TASK}/program", self._receive_program, MAX_ARCHIVE_BYTES),
            self._get("/admin/revocations", lambda exchange: service.revocations()),
            self._post("/admin/revocations", Revoke, lambda _, asked: service.revoke(asked)),
            Streamed(
                "PUT",
                f"{_TASK}/parameters",
                self._receive_parameters,
                submissions.max_parameters_bytes(MAX_MODEL_LENGTH),
            ),
        ]

    # -- kinds of routes --------------------------------------------------------------------

    def _get(self, path: str, ask: Callable[[Exchange], PendingAnswer]) -> HttpRoute:
        return Buffered("GET", path, lambda exchange, _: self._answer(exchange, ask(exchange)))

    def _post(self, path: str, kind: type[T], ask: Callable[[str, T], PendingAnswer]) -> HttpRoute:
        def handle(exchange: Exchange, body: bytes) -> None:
            async def ask_parsed() -> object:
                return await ask(_task(exchange), _parsed(body, kind))

            self._answer(exchange, ask_parsed())

        return Buffered("POST", path, handle, MAX_JSON_BYTES)

    def _state_route(self, action: str, state: TaskState) -> HttpRoute:
        async def change(task: str, reason: ChangeReason) -> object:
            return await self._service.set_state(task, state, reason.why)

        return self._post(f"{_TASK}/{action}", ChangeReason, change)

    async def _points(self, exchange: Exchange) -> object:
        return await self._service.points(_task(exchange), _number(exchange, "after", -1))

    # -- answers ----------------------------------------------------------------------------

    def _answer(self, exchange: Exchange, asked: PendingAnswer) -> None:
        async def answer() -> None:
            exchange.answer(200, msgspec.json.encode(await asked))

        self._start(exchange, answer())

    def _on_parameters(self, exchange: Exchange, body: bytes) -> None:
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

    def _receive_program(self, exchange: Exchange) -> Receiver:
        def store(data: bytes) -> None:
            self._answer(exchange, bundles.store_program(self._service, _task(exchange), data))

        return _Whole(exchange.head.length, store)

    def _receive_parameters(self, exchange: Exchange) -> Receiver | None:
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


def _task(exchange: Exchange) -> str:
    return exchange.captured.get("task", "")


def _number(exchange: Exchange, name: str, default: int) -> int:
    values = parse_qs(exchange.head.query).get(name, [])
    if not values:
        return default
    text = values[-1]
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else default


def _parsed(body: bytes, kind: type[T]) -> T:
    try:
        found = msgspec.json.decode(body or b"{}", type=kind)
        if isinstance(found, NewTask | Revision):  # people write the configuration in it
            written = msgspec.json.decode(body)["config"]
            require_known_fields(written, msgspec.to_builtins(found.config), ".config")
        return found
    except ConfigError:
        raise
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OperatorError(
            f"invalid {kind.__name__}: {str(error)[:200]}", hint="papaya task --help"
        ) from error
