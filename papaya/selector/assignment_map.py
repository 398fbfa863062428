"""The assignment map: where a selector sends the requests of clients."""

from __future__ import annotations

from papaya.messages.base import NodeId, TaskId
from papaya.messages.control import Route
from papaya.messages.tickets import AnyTicket


class AssignmentMap:
    """Which aggregator holds which task (paper, appendix "Failure Recovery").

    "Client requests are routed by selectors using assignment maps (model training task to
    corresponding aggregator identity) refreshed from coordinator on every report. Upon [...]
    selector having stale assignment map clients retry through a different selector."

    The map may be stale or incomplete. It only routes: tickets and fence rows decide.
    """

    def __init__(self) -> None:
        # The routes of tasks that are not over.
        self._routes: dict[TaskId, Route] = {}
        self._over: frozenset[TaskId] = frozenset()

    def replace(self, routes: tuple[Route, ...], over: tuple[TaskId, ...]) -> None:
        self._over = frozenset(over)
        self._routes = {route.task: route for route in routes if route.task not in self._over}

    def is_over(self, task: TaskId) -> bool:
        """The task has ended, so its clients should stop asking for its holder."""
        return task in self._over

    def route(self, ticket: AnyTicket) -> NodeId | None:
        """Where a request goes; None if the task is over, if no holder is known, or if the ticket
        is newer than the map.
        """
        route = self._routes.get(ticket.task)
        if route is None or ticket.seq > route.seq:
            return None
        return route.aggregator
