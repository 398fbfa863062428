"""Fixed questions about a run with faults, answered from what servers told, and from nothing else.

    Which processes were restarted?      Who holds each task now, and since which move?
    Who leads now, since which epoch?    How many buffers were dropped?
    When was the database away?

What servers told is the timeline of the dashboard, or their logs. The same rules read both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec


class Told(NamedTuple):
    """One event: when, by whom, and its fields."""

    at: float
    node: str
    event: str
    fields: dict[str, Any]


def from_dashboard(events: Iterable[Any]) -> list[Told]:
    """The answer of `/admin/events`, which the timeline shows."""
    return [Told(e["at"], e["node"], e["event"], e["fields"]) for e in events]


def from_logs(logs: Iterable[Sequence[str]]) -> list[Told]:
    """The JSON lines of several processes, in the order of time."""
    lines = [msgspec.json.decode(line) for log in logs for line in log if line.startswith("{")]
    found = [
        Told(
            datetime.fromisoformat(line["time"]).timestamp(),
            line.get("node", ""),
            line["event"],
            line,
        )
        for line in lines
        if "event" in line
    ]
    return sorted(found, key=lambda told: told.at)


def restarted(story: Iterable[Told]) -> set[str]:
    return {t.node for t in story if t.event == "node_started" and t.fields["boot"] > 1}


def holders(story: Iterable[Told]) -> dict[str, tuple[int, str]]:
    """By task: the number of its last move, and who took it then."""
    found: dict[str, tuple[int, str]] = {}
    for told in story:
        if told.event == "task_taken":
            task, taken = told.fields["task"], (told.fields["seq"], told.node)
            found[task] = max(found.get(task, taken), taken)
    return found


def leader(story: Iterable[Told]) -> tuple[int, str]:
    """The last epoch, and who leads in it."""
    return max((t.fields["epoch"], t.node) for t in story if t.event == "leadership_gained")


def dropped_buffers(story: Iterable[Told]) -> int:
    return sum(told.event == "buffer_dropped" for told in story)


def database_away(story: Iterable[Told]) -> list[float]:
    """When a process began to miss the state store."""
    return [t.at for t in story if t.event == "storage_failed" and t.fields["part"] == "state"]
