"""The assignment map at a selector (paper, appendix "Failure Recovery").

    "Client requests are routed by selectors using assignment maps (model training task to
    corresponding aggregator identity) refreshed from coordinator on every report. Upon [...]
    selector having stale assignment map clients retry through a different selector."

The map may be stale or missing; it is never an authority: tickets and fences are.
"""

from __future__ import annotations

from papaya.messages.base import NodeId, TaskId
from papaya.messages.control import Route
from papaya.messages.tickets import AnyTicket


class AssignmentMap:
    """Task → aggregator, as last heard."""

    def __init__(self) -> None:
        self._routes: dict[TaskId, Route] = {}
        self._over: frozenset[TaskId] = frozenset()

    def replace(self, routes: tuple[Route, ...], over: tuple[TaskId, ...]) -> None:
        self._routes = {route.task: route for route in routes}
        self._over = frozenset(over)

    def is_over(self, task: TaskId) -> bool:
        """Its clients need not look for a holder any more."""
        return task in self._over

    def route(self, ticket: AnyTicket) -> NodeId | None:
        """Where a request goes; None without a known holder, or when the ticket is newer."""
        route = self._routes.get(ticket.task)
        if route is None or ticket.seq > route.seq:
            return None
        return route.aggregator
