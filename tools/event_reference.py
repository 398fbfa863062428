"""Writes the list of events in docs/logs.md from papaya/messages/events.py.

python -m tools.event_reference            write the list
python -m tools.event_reference --check    exit 1 if the list is not up to date
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from papaya.messages import events
from papaya.messages.events import ServerEvent

PAGE = Path(__file__).resolve().parent.parent / "docs" / "logs.md"
BEGIN, END = "<!-- events: begin -->", "<!-- events: end -->"


def all_events() -> list[type[ServerEvent]]:
    """In the order of the module."""
    found = [value for value in vars(events).values() if inspect.isclass(value)]
    return [kind for kind in found if issubclass(kind, ServerEvent) and kind is not ServerEvent]


def table() -> str:
    rows = ["| event | level | fields | meaning |", "|---|---|---|---|"]
    for kind in all_events():
        fields = ", ".join(f"`{field}`" for field in kind.__struct_fields__)
        meaning = " ".join(inspect.getdoc(kind).split())  # type: ignore[union-attr]
        rows.append(f"| `{kind.name()}` | {kind.level} | {fields} | {meaning} |")
    return "\n".join(rows)


def rendered(page: str) -> str:
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in arguments:
        return int(rendered(page) != page)
    PAGE.write_text(rendered(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
