"""Which route a request takes: literal segments, `{name}` for one, a last `{name...}` for the rest.

A route decides how a body is received. Buffered: the handler gets it whole. Streamed: a receiver
says where the next bytes go, so the kernel puts them where they belong (DESIGN, "Wire").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from papaya.http.errors import HttpError, MisuseError
from papaya.http.exchange import Exchange, log


class Receiver(Protocol):
    """Takes one body. Exactly one of `finished` and `broken` is called, once, and nothing after."""

    def buffer(self, remaining: int) -> memoryview:
        """Where the next bytes go; at least one. Asking again without `received` is no surprise.

        What is longer than `remaining` is cut. The buffer must not be resized before `received`
        has returned.
        """
        ...

    def received(self, count: int) -> None:
        """The first `count` bytes of the last buffer are there."""
        ...

    def finished(self) -> None:
        """The whole body is there."""
        ...

    def broken(self) -> None:
        """The rest will never come: the peer died, was cut off, or was answered early."""
        ...


def end_receiver(receiver: Receiver, is_whole: bool) -> None:
    """The last call that a receiver gets; what it raises has nobody left to be answered."""
    try:
        if is_whole:
            receiver.finished()
        else:
            receiver.broken()
    except Exception:
        log.exception("a receiver failed at its end")


def everyone(exchange: Exchange) -> bool:
    """No question is asked."""
    return True


class Buffered(msgspec.Struct, frozen=True):
    """The handler gets the whole body, and answers now or later.

    `admits` is asked before any of the body is kept; False means that it has answered already.
    """

    method: str
    path: str
    handle: Callable[[Exchange, bytes], None]
    max_body_bytes: int = 0
    admits: Callable[[Exchange], bool] = everyone


class Streamed(msgspec.Struct, frozen=True):
    """Called with the head. None means that the exchange has been answered already."""

    method: str
    path: str
    receive: Callable[[Exchange], Receiver | None]
    max_body_bytes: int


HttpRoute = Buffered | Streamed

_PLACEHOLDER = re.compile(r"\{([a-z_]+)(\.\.\.)?\}")


class Routes:
    """The route table of one listener. A GET route answers HEAD too, unless HEAD has its own."""

    def __init__(self, routes: Iterable[HttpRoute]) -> None:
        self._literal: dict[tuple[str, str], HttpRoute] = {}
        self._patterns: dict[str, list[tuple[re.Pattern[str], HttpRoute]]] = {}
        seen: set[tuple[str, str]] = set()
        for route in routes:
            if (route.method, route.path) in seen:
                raise MisuseError(f"two routes for {route.method} {route.path}")
            seen.add((route.method, route.path))
            if "{" in route.path:
                patterns = self._patterns.setdefault(route.method, [])
                patterns.append((_compiled(route.path), route))
            else:
                self._literal[route.method, route.path] = route

    def find(self, method: str, path: str) -> tuple[HttpRoute, dict[str, str]] | None:
        """The route and what its placeholders captured. Literal paths come first."""
        route = self._literal.get((method, path))
        if route is not None:
            return route, {}
        for pattern, candidate in self._patterns.get(method, ()):
            if (match := pattern.fullmatch(path)) is not None:
                return candidate, match.groupdict()
        return self.find("GET", path) if method == "HEAD" else None

    def missing(self, path: str) -> HttpError:
        """What to say when no route was found: 405 if another method would do, else 404."""
        known = {method for method, _ in self._literal} | set(self._patterns)
        allow = ", ".join(m for m in sorted(known) if self.find(m, path) is not None)
        if not allow:
            return HttpError(404, "there is nothing at this path")
        return HttpError(405, f"this path takes {allow}", headers=(("Allow", allow),))


def _compiled(path: str) -> re.Pattern[str]:
    segments = path.split("/")
    parts = []
    for number, segment in enumerate(segments):
        if (placeholder := _PLACEHOLDER.fullmatch(segment)) is None:
            if "{" in segment:
                raise MisuseError(f"{path}: a placeholder is a whole segment, `{{name}}`")
            parts.append(re.escape(segment))
        elif placeholder[2] is None:
            parts.append(f"(?P<{placeholder[1]}>[^/]+)")
        elif number == len(segments) - 1:
            parts.append(f"(?P<{placeholder[1]}>.+)")
        else:
            raise MisuseError(f"{path}: only the last segment takes the rest of the path")
    return re.compile("/".join(parts))
