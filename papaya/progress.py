"""Progress of long work: in a terminal, in a Jupyter notebook, or as lines of a log.

On a terminal it is a live display (only then is `rich` loaded), in a notebook an output that is
replaced; elsewhere it is a line now and then, which keeps logs readable.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TextIO

from papaya.errors import OperatorError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_PLAIN_STEP: Final = 0.1
_REDRAW_S: Final = 0.2
_ELAPSED_AFTER_S: Final = 2.0
_ELAPSED_EVERY_S: Final = 10.0
_TO_END_OF_LINE: Final = "\x1b[K"  # erases what is there


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class Progress(AbstractContextManager["Progress"]):
    """Shows several named pieces of work, each from 0 to 1, with a short description."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live = _rich_progress(self._stream) if self._stream.isatty() else None
        self._cell = _notebook_cell() if stream is None else None
        self._bars: dict[str, TaskID] = {}
        self._printed: dict[str, float] = {}

    def __enter__(self) -> Progress:
        (self._live or nullcontext()).__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exception)

    def update(self, name: str, done: float, words: str) -> None:
        if self._cell is not None:
            self._cell.update(name, done, words)
            return
        if self._live is None:
            self._print(name, done, words)
            return
        if name not in self._bars:
            self._bars[name] = self._live.add_task(name, total=1.0, words="")
        self._live.update(self._bars[name], completed=done, words=words)

    def say(self, text: str) -> None:
        """Print a line that stays above the display."""
        if self._live is None:
            print(text, file=self._stream, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print(self, name: str, done: float, words: str) -> None:
        if name not in self._printed or done >= min(1.0, self._printed[name] + _PLAIN_STEP):
            self._printed[name] = done
            print(f"{name}: {100 * done:.0f} %, {words}", file=self._stream, flush=True)


@contextmanager
def told_regularly(tell: Callable[[float], None], after_s: float, every_s: float) -> Iterator[None]:
    """Call `tell` with the seconds so far, in a thread, while the work goes on."""
    over, started = Event(), monotonic()

    def run() -> None:
        wait_s = after_s
        while not over.wait(wait_s):
            tell(monotonic() - started)
            wait_s = every_s

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def elapsed(
    what: str, stream: TextIO | None = None, after_s: float = _ELAPSED_AFTER_S
) -> Iterator[None]:
    """Show for how long work without other progress has gone on: first after two seconds."""
    shown = sys.stderr if stream is None else stream
    cell = _notebook_cell() if stream is None else None
    is_live = cell is None and shown.isatty()
    words = ""

    def tell(seconds: float) -> None:
        nonlocal words
        words = f"{seconds:.0f} s so far"
        if cell is not None:
            cell.update(what, 0.0, words)
        elif is_live:
            print(f"\r{what}: {words}{_TO_END_OF_LINE}", end="", file=shown, flush=True)
        else:
            print(f"{what}: {words}", file=shown, flush=True)

    is_replaced = is_live or cell is not None
    try:
        with told_regularly(tell, after_s, _REDRAW_S if is_replaced else _ELAPSED_EVERY_S):
            yield
        if words and cell is not None:
            cell.update(what, 1.0, words)
    finally:
        if words and is_live:
            print(f"\r{_TO_END_OF_LINE}", end="", file=shown, flush=True)


def _rich_progress(stream: TextIO) -> RichProgress:
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
        )
    except ImportError as error:
        raise OperatorError(
            "the progress display needs rich, which is not installed",
            hint="pip install rich matplotlib",
        ) from error
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[words]}"),
        console=Console(file=stream),
    )


class NotebookCell:
    """Bars in the output of a cell, drawn a few times per second. `display` is IPython's."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None
        self._bars: dict[str, tuple[float, str]] = {}
        self._drawn_s = -_REDRAW_S

    def update(self, name: str, done: float, words: str) -> None:
        self._bars[name] = (done, words)
        if done < 1 and monotonic() - self._drawn_s < _REDRAW_S:
            return
        self._drawn_s = monotonic()
        shown = {"text/html": self._html(), "text/plain": self._text()}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def _html(self) -> str:
        rows = (
            f"<tr><td>{html.escape(name)}</td><td><progress value='{done:.4f}'></progress></td>"
            f"<td>{100 * done:.0f} %</td><td>{html.escape(words)}</td></tr>"
            for name, (done, words) in self._bars.items()
        )
        return f"<table>{''.join(rows)}</table>"

    def _text(self) -> str:
        bars = self._bars.items()
        return "\n".join(f"{name}: {100 * done:.0f} %, {words}" for name, (done, words) in bars)


def _notebook_cell() -> NotebookCell | None:
    """None outside of a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return NotebookCell(display)
