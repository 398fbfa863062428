"""Who may call which route of the admin API.

    viewer      reads states, numbers and histories
    owner       also submits, changes and downloads the tasks under its prefixes
    operator    everything

`ACCESS` names the role that each route needs. A route that is not listed is refused for everybody.
The token is checked before any of the body is kept: while the state store is asked about an
account, the body waits in the network. Only the operator's token from the file needs no store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from papaya.bundle.manifest import name_in
from papaya.errors import PapayaError
from papaya.http.exchange import Exchange
from papaya.http.routes import HttpRoute, Receiver, Streamed
from papaya.messages.base import TaskId
from papaya.messages.events import CredentialsRejected
from papaya.messages.owner import evaluated_in
from papaya.messages.storage import AccountRole
from papaya.server.admin.problems import Forbidden
from papaya.server.admin.views import ProblemBody
from papaya.server.logs import log

logger = logging.getLogger("papaya.admin")

_IDENTIFY_S = 10.0
_RANKS: Final[dict[AccountRole, int]] = {"viewer": 0, "owner": 1, "operator": 2}
_TASK = "/admin/tasks/{task}"
_FAILED = ProblemBody("internal server error", "check the server's log")


class Caller(Struct, frozen=True):
    """Who makes a request."""

    name: str
    role: AccountRole
    prefixes: tuple[str, ...] = ()

    def owns(self, task: TaskId) -> bool:
        """Whether it may change tasks with this name or id. The name decides: with the prefix
        `vision-` it owns neither a run of `vision` nor its evaluations, whose ids begin like that.
        """
        name = name_in(evaluated_in(task))
        return self.role == "operator" or (
            self.role == "owner" and name.startswith(self.prefixes or ("\0",))
        )

    def require_owner(self, task: TaskId) -> None:
        if not self.owns(task):
            may = " or ".join(f"{prefix}…" for prefix in self.prefixes) or "no task"
            raise Forbidden(
                f"{self.name} ({self.role}) may not change {task[:64]!r}, only {may}",
                hint="use a name under your prefix, or ask an operator: papaya whoami",
            )


class AccessRule(Struct, frozen=True):
    """The least role. `of_task`: an owner needs to own the task in the path."""

    role: AccountRole
    of_task: bool = False


_VIEWER, _OPERATOR = AccessRule("viewer"), AccessRule("operator")
_OWNER, _OWNER_OF_TASK = AccessRule("owner"), AccessRule("owner", of_task=True)

ACCESS: Final[dict[tuple[str, str], AccessRule]] = {
    ("GET", "/admin/status"): _VIEWER,
    ("GET", "/admin/whoami"): _VIEWER,
    ("GET", "/admin/events"): _VIEWER,
    ("GET", "/admin/tasks"): _VIEWER,
    ("GET", _TASK): _VIEWER,
    ("GET", f"{_TASK}/points"): _VIEWER,
    ("GET", f"{_TASK}/versions"): _VIEWER,
    ("GET", f"{_TASK}/revisions"): _VIEWER,
    ("GET", f"{_TASK}/bundle"): _OWNER_OF_TASK,
    ("GET", f"{_TASK}/versions/{{version}}/parameters"): _OWNER_OF_TASK,
    ("POST", "/admin/tasks"): _OWNER,  # the task is in the body, and is checked there
    ("PUT", f"{_TASK}/parameters"): _OWNER_OF_TASK,
    ("PUT", f"{_TASK}/program"): _OWNER_OF_TASK,
    ("PUT", f"{_TASK}/frozen"): _OWNER_OF_TASK,
    ("POST", f"{_TASK}/pause"): _OWNER_OF_TASK,
    ("POST", f"{_TASK}/resume"): _OWNER_OF_TASK,
    ("POST", f"{_TASK}/cancel"): _OWNER_OF_TASK,
    ("POST", f"{_TASK}/delete"): _OWNER_OF_TASK,
    ("POST", f"{_TASK}/rollback"): _OWNER_OF_TASK,
    ("POST", f"{_TASK}/mark"): _OWNER_OF_TASK,
    ("POST", f"{_TASK}/evaluate"): _OWNER_OF_TASK,
    ("POST", f"{_TASK}/revise"): _OWNER_OF_TASK,
    ("POST", f"{_TASK}/rollout"): _OWNER_OF_TASK,
    ("POST", f"{_TASK}/rollout/end"): _OWNER_OF_TASK,
    ("POST", f"{_TASK}/share"): _OPERATOR,
    ("GET", "/admin/revocations"): _OPERATOR,
    ("POST", "/admin/revocations"): _OPERATOR,
    ("GET", "/admin/accounts"): _OPERATOR,
    ("POST", "/admin/accounts"): _OPERATOR,
    ("POST", "/admin/accounts/{account}/revoke"): _OPERATOR,
    ("POST", "/admin/accounts/{account}/quota"): _OPERATOR,
    ("POST", "/admin/maintenance"): _OPERATOR,
    ("POST", "/admin/maintenance/end"): _OPERATOR,
    ("POST", "/admin/keys/rotate"): _OPERATOR,
    ("GET", "/admin/audit"): _OPERATOR,
    ("POST", "/admin/audit/prune"): _OPERATOR,
}


def refusal(method: str, path: str, caller: Caller, task: TaskId = "") -> Forbidden | None:
    """Why a caller may not use a route; None if it may. `path` is that of the route."""
    rule = ACCESS.get((method, path))
    if rule is None:
        return Forbidden("no role may use this path", hint="add it to the table ACCESS")
    if _RANKS[caller.role] < _RANKS[rule.role]:
        return Forbidden(
            f"{caller.name} is {_with_article(caller.role)}; this needs {_with_article(rule.role)}",
            hint="log in with another account: papaya login URL",
        )
    try:
        if rule.of_task:
            caller.require_owner(task)
    except Forbidden as problem:
        return problem
    return None


def _with_article(role: AccountRole) -> str:
    return f"an {role}" if role[0] in "aeiou" else f"a {role}"


class Identifies(Protocol):
    """Finds out whose token it is."""

    def at_once(self, authorization: str | None) -> Caller | None:
        """The caller, if that needs no waiting."""
        ...

    async def identify(self, authorization: str | None) -> Caller | None:
        """The caller; None if the token is refused."""
        ...


Begin = Callable[[Caller, Exchange], Receiver | None]
"""Starts to receive the body; None if it has answered already."""
Refuse = Callable[[Caller, Exchange, Forbidden], None]
"""Answers a caller that may not do this."""


class Gate:
    """Makes routes that only callers with the right role can use."""

    def __init__(self, identities: Identifies) -> None:
        self._identities = identities
        self._running: set[asyncio.Task[None]] = set()

    def route(
        self,
        method: str,
        path: str,
        begin: Begin,
        max_body_bytes: int = 0,
        refuse: Refuse | None = None,
    ) -> HttpRoute:
        """`refuse` answers callers whose role does not allow it; None answers with the problem."""

        def enter(caller: Caller, exchange: Exchange) -> Receiver | None:
            task = exchange.captured.get("task", "")
            if (problem := refusal(method, path, caller, task)) is None:
                return begin(caller, exchange)
            if refuse is None:
                _answer(exchange, problem.status, ProblemBody(str(problem), problem.hint))
                return None
            refuse(caller, exchange, problem)
            return _Nothing()

        def receive(exchange: Exchange) -> Receiver | None:
            authorization = exchange.head.headers.get("authorization")
            if (caller := self._identities.at_once(authorization)) is not None:
                return enter(caller, exchange)
            exchange.pause_reading()
            waiting = _Waiting(exchange)
            work = self._admit(exchange, waiting, authorization, enter)
            running = asyncio.ensure_future(work)
            self._running.add(running)
            running.add_done_callback(self._running.discard)
            return waiting

        return Streamed(method, path, receive, max_body_bytes)

    async def _admit(
        self, exchange: Exchange, waiting: _Waiting, authorization: str | None, enter: Begin
    ) -> None:
        caller = None
        try:
            async with asyncio.timeout(_IDENTIFY_S):
                caller = await self._identities.identify(authorization)
        except (PapayaError, TimeoutError) as error:
            silent = "the state store or the identity provider does not answer"
            logger.warning("cannot check a token: %s", str(error) or silent)
            unknown = ProblemBody("the token cannot be checked now", "try again in a few seconds")
            _answer(exchange, 503, unknown, (("Retry-After", "5"),))
        except Exception:
            logger.exception("cannot check a token")
            _answer(exchange, 500, _FAILED)
        else:
            if caller is None:
                hint = "papaya login URL, or --token-file FILE"
                body = ProblemBody("the token is missing, wrong, expired or revoked", hint)
                _answer(exchange, 401, body, (("WWW-Authenticate", "Bearer"),))
                log(CredentialsRejected("admin", exchange.peer.rpartition(":")[0]))
            elif exchange.is_open:
                try:
                    waiting.open(enter(caller, exchange))
                except Exception:  # no memory for the body, for example
                    logger.exception("an admin request failed")
                    _answer(exchange, 500, _FAILED)


def _answer(
    exchange: Exchange, status: int, body: ProblemBody, headers: tuple[tuple[str, str], ...] = ()
) -> None:
    if exchange.is_open:
        exchange.answer(status, msgspec.json.encode(body), headers)


class _Nothing:
    """Discards a body until the answer ends the request."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(1 << 14))

    def buffer(self, remaining: int) -> memoryview:
        return self._buffer

    def received(self, count: int) -> None:
        """No-op."""

    def finished(self) -> None:
        """No-op."""

    def broken(self) -> None:
        """No-op."""


class _Waiting:
    """Takes the place of a receiver until the caller is known; the connection does not read."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._receiver: Receiver | None = None
        self._is_whole = False  # there is no body

    def open(self, receiver: Receiver | None) -> None:
        if receiver is None:
            return  # it was answered
        self._receiver = receiver
        if self._is_whole:
            receiver.finished()
        else:
            self._exchange.resume_reading()

    def buffer(self, remaining: int) -> memoryview:
        assert self._receiver is not None, "the connection reads although it was paused"
        return self._receiver.buffer(remaining)

    def received(self, count: int) -> None:
        assert self._receiver is not None
        self._receiver.received(count)

    def finished(self) -> None:
        self._is_whole = True
        if self._receiver is not None:
            self._receiver.finished()

    def broken(self) -> None:
        if self._receiver is not None:
            self._receiver.broken()
