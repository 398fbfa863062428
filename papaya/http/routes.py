"""Routes: literal segments, `{name}` for one segment, a last `{name...}` for the rest of a path.

A route decides how a body is received. Buffered: the handler gets the whole body as bytes.
Streamed: a receiver provides the buffers, so the kernel writes the body to its final place and
nothing is copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from papaya.http.errors import HttpError, MisuseError
from papaya.http.exchange import Exchange, log


class Receiver(Protocol):
    """Takes one body. Its last call is either `finished` or `broken`, once."""

    def buffer(self, remaining: int) -> memoryview:
        """Where the next bytes go: a buffer of at least one byte.

        It may be called again before `received`. A buffer longer than `remaining` is cut. It must
        not be resized before `received` has returned.
        """
        ...

    def received(self, count: int) -> None:
        """The first `count` bytes of the last buffer are filled."""
        ...

    def finished(self) -> None:
        """The whole body has arrived."""
        ...

    def broken(self) -> None:
        """The rest will not come: the peer closed, was too slow, or was answered early."""
        ...


def end_receiver(receiver: Receiver, is_whole: bool) -> None:
    """Makes the last call of a receiver. An error is logged: there is no peer left to answer."""
    try:
        if is_whole:
            receiver.finished()
        else:
            receiver.broken()
    except Exception:
        log.exception("a receiver failed in its last call")


def admit_all(exchange: Exchange) -> bool:
    """Accepts every request."""
    return True


class Buffered(msgspec.Struct, frozen=True):
    """The handler gets the whole body, and answers now or later.

    `admits` is called before any of the body is kept. If it returns False it has answered already.
    """

    method: str
    path: str
    handle: Callable[[Exchange, bytes], None]
    max_body_bytes: int = 0
    admits: Callable[[Exchange], bool] = admit_all


class Streamed(msgspec.Struct, frozen=True):
    """`receive` is called with the head. If it returns None it has answered already."""

    method: str
    path: str
    receive: Callable[[Exchange], Receiver | None]
    max_body_bytes: int


HttpRoute = Buffered | Streamed

UNKNOWN_ROUTE = "unknown"  # the route of a request that has none, in metrics

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
        """The route and the values of its placeholders. Literal paths come first."""
        route = self._literal.get((method, path))
        if route is not None:
            return route, {}
        for pattern, candidate in self._patterns.get(method, ()):
            if (match := pattern.fullmatch(path)) is not None:
                return candidate, match.groupdict()
        return self.find("GET", path) if method == "HEAD" else None

    def missing(self, path: str) -> HttpError:
        """The error for a path without a route: 405 if another method has one, else 404."""
        known = {method for method, _ in self._literal} | set(self._patterns)
        allow = ", ".join(m for m in sorted(known) if self.find(m, path) is not None)
        if not allow:
            return HttpError(404, "no such path")
        return HttpError(405, f"this path supports {allow}", headers=(("Allow", allow),))


def _compiled(path: str) -> re.Pattern[str]:
    segments = path.split("/")
    parts = []
    for number, segment in enumerate(segments):
        if (placeholder := _PLACEHOLDER.fullmatch(segment)) is None:
            if "{" in segment:
                raise MisuseError(f"{path}: a placeholder must be a whole segment, `{{name}}`")
            parts.append(re.escape(segment))
        elif placeholder[2] is None:
            parts.append(f"(?P<{placeholder[1]}>[^/]+)")
        elif number == len(segments) - 1:
            parts.append(f"(?P<{placeholder[1]}>.+)")
        else:
            raise MisuseError(f"{path}: only the last segment can match the rest of the path")
    return re.compile("/".join(parts))
