"""What commands share: tables that line up, progress on a terminal and in a log."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.cli.output import (
    FormatOptions,
    Progress,
    add_format,
    bind,
    make_folder,
    not_negative,
    plural,
    positive,
    table,
    whole,
    writing,
)
from papaya.errors import OperatorError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class SomeOptions(FormatOptions):
    place: Path | None = None
    count: int = 50_000
    words: Sequence[str] = ()
    is_loud: bool = False


def some_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("place", nargs="?", type=Path, help="where")
    parser.add_argument("--count", type=int, help="number of things")
    parser.add_argument("--words", action="append", help="words (default: the usual ones)")
    parser.add_argument("--loud", dest="is_loud", action="store_true", help="be loud")
    add_format(parser)
    return parser


def test_options_have_the_defaults_of_their_class_and_help_shows_them() -> None:
    found: list[SomeOptions] = []
    parser = some_parser()

    def run(options: SomeOptions) -> int:
        found.append(options)
        return len(found)

    bind(parser, SomeOptions, run)
    for arguments in ([], ["x", "--words", "a", "--words", "b", "--loud", "--format", "json"]):
        options = parser.parse_args(arguments)
        assert options.run(options) == len(found)
    assert found[0] == SomeOptions()
    assert found[1] == SomeOptions(place=Path("x"), words=["a", "b"], is_loud=True, format="json")
    help_text = parser.format_help()
    assert help_text.count("default") == 3
    for shown in ("(default: 50_000)", "(default: the usual ones)", "(default: text)"):
        assert shown in help_text


def test_options_that_differ_from_their_class_are_refused() -> None:
    parser = some_parser()
    parser.add_argument("--colour")
    with pytest.raises(TypeError, match=r"SomeOptions differ in \['colour'\]"):
        bind(parser, SomeOptions, lambda options: 0)


def test_numbers_line_up_to_the_right() -> None:
    assert table(("", "trips"), [("AsyncFL", "12,345"), ("x", "7")]) == (
        "          trips\n"
        "-------  ------\n"
        "AsyncFL  12,345\n"
        "x             7"
    )  # fmt: skip


def test_a_log_gets_a_line_now_and_then_and_the_last_one() -> None:
    log = io.StringIO()
    with Progress(log) as progress:
        for step in range(1, 1001):
            progress.update("run", step / 1000, f"step {step}")
        progress.say("done")
    lines = log.getvalue().splitlines()
    assert lines[0] == "run: 0 %, step 1"
    assert lines[-2:] == ["run: 100 %, step 1000", "done"]
    assert len(lines) == 12


def test_a_terminal_gets_a_live_display() -> None:
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress.update("AsyncFL", 0.5, "1,300 active [not markup]")
        progress.say("seed 3: [a] broke")
        progress.update("AsyncFL", 1.0, "1,299 active")
    shown = terminal.getvalue()
    assert "AsyncFL" in shown
    assert "100%" in shown
    assert "1,299 active" in shown
    assert "seed 3: [a] broke" in shown


def test_a_terminal_without_rich_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(OperatorError) as missing:
        Progress(Terminal())
    assert missing.value.hint == "pip install rich matplotlib"
    Progress(io.StringIO())  # a log needs no rich


def test_a_folder_is_tried_before_a_run_and_left_as_it_was(tmp_path: Path) -> None:
    assert list(make_folder(tmp_path / "new" / "run").iterdir()) == []


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder nobody can write to")
def test_a_folder_that_takes_no_file_is_refused() -> None:
    with pytest.raises(OperatorError, match="cannot write /proc") as refused:
        make_folder(Path("/proc"))
    assert "--output" in refused.value.hint


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"cannot write .*: Is a directory"), writing(tmp_path):
        tmp_path.write_bytes(b"")


def test_one_is_not_many() -> None:
    assert [plural(n, "seed") for n in (0, 1, 2000)] == ["0 seeds", "1 seed", "2,000 seeds"]


@given(number=st.integers(0, 10**30))
def test_whole_numbers_are_exact(number: int) -> None:
    assert whole(0)(str(number)) == number


def test_whole_numbers_may_be_written_short() -> None:
    assert (whole(0)("1e8"), whole(0)("10_000")) == (100_000_000, 10_000)


@pytest.mark.parametrize("text", ["0", "0.0", "0.00", "0e0", "0.25"])
def test_zero_may_be_written_in_any_way(text: str) -> None:
    assert not_negative(text) == float(text)


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "-0.1"])
def test_numbers_are_finite_and_not_negative(text: str) -> None:
    for kind in (not_negative, positive):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)
    with pytest.raises(argparse.ArgumentTypeError, match="not a positive number"):
        positive("0.00")


@pytest.mark.parametrize("text", ["", "1.5", "1e-3", "nan", "inf", "-1", "--1", "²", "x"])
def test_anything_else_is_no_whole_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        whole(0)(text)
