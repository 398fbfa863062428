"""Progress in a notebook: one output that is replaced, a few times per second at most."""

from __future__ import annotations

from typing import Any

from papaya.progress import NotebookCell, Progress


class Display:
    """As IPython's: shows something, and gives a handle that replaces it."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def __call__(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Display:
        assert (raw, display_id, self.shown) == (True, True, [])
        self.shown.append(data)
        return self

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(data)


def test_a_cell_is_replaced_and_not_drawn_too_often() -> None:
    display = Display()
    cell = NotebookCell(display)
    for done in range(1000):
        cell.update("fleet", done / 1000, f"{done} <updates>")
    assert 1 <= len(display.shown) < 500
    cell.update("fleet", 1.0, "1000 <updates>")
    cell.update("learning", 1.0, "all")
    last = display.shown[-1]
    assert last["text/plain"] == "fleet: 100 %, 1000 <updates>\nlearning: 100 %, all"
    assert "1000 &lt;updates&gt;" in last["text/html"]


def test_outside_of_a_notebook_there_are_lines(capsys: Any) -> None:
    with Progress() as progress:
        for done in range(101):
            progress.update("fleet", done / 100, "words")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fleet: 0 %, words"
    assert lines[-1] == "fleet: 100 %, words"
    assert len(lines) == 11
