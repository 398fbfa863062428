"""Progress in a notebook: one output that is replaced, a few times per second at most."""

from __future__ import annotations

import io
import re
import sys
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from papaya.progress import NotebookCell, Progress, elapsed


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


class Watched(io.StringIO):
    """A stream that lets a test wait for what is shown."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.shown = Event()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        if "so far" in text:
            self.shown.set()
        return super().write(text)


def test_long_work_shows_its_time_in_a_log_and_in_one_place_of_a_terminal() -> None:
    log, terminal = Watched(is_terminal=False), Watched(is_terminal=True)
    for stream in (log, terminal):
        with elapsed("compiling", stream, after_s=0.001):
            assert stream.shown.wait(120)
    assert re.fullmatch(r"compiling: \d+ s so far", log.getvalue().splitlines()[0])
    assert re.match("\rcompiling: [0-9]+ s so far\x1b\\[K", terminal.getvalue())
    assert terminal.getvalue().endswith("\r\x1b[K"), "the line is removed"
    assert "\n" not in terminal.getvalue()


def test_short_work_shows_nothing(capsys: Any) -> None:
    with elapsed("compiling", after_s=600.0):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_the_time_in_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shown(Display):
        here = Event()

        def __call__(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Display:
            super().__call__(data, raw=raw, display_id=display_id)
            self.here.set()
            return self

    display = Shown()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    with elapsed("compiling", after_s=0.001):
        assert display.here.wait(120)
    assert re.fullmatch(r"compiling: 0 %, \d+ s so far", display.shown[0]["text/plain"])
    assert display.shown[-1]["text/plain"].startswith("compiling: 100 %, ")
    display.shown.clear()
    display.here.clear()

    def fail_slowly() -> None:
        with elapsed("compiling", after_s=0.001):
            assert display.here.wait(120)
            raise ValueError("no compiler")

    with pytest.raises(ValueError, match="no compiler"):
        fail_slowly()
    assert display.shown[-1]["text/plain"].startswith("compiling: 0 %, "), "it did not end well"
