"""The command line as a whole: what goes where, how errors look, exit codes, interruption."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from papaya import __version__
from papaya.cli.main import COMMANDS, main, parser_for
from papaya.sim.report import RunReport

ROOT = Path(__file__).parents[3]
PAPAYA = [sys.executable, "-m", "papaya"]
SMALL = ["simulate", "--concurrency", "20", "--goal", "5", "--population", "1e5", "--hours", "0.1"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PAPAYA, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )


def test_the_version_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr() == (f"papaya {__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: papaya {command} ")


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ("numpy", "asyncio", "cryptography", "numba", "torch", "matplotlib")),
        (["status", "--help"], ("asyncio", "cryptography", "numba", "torch", "matplotlib")),
        (["serve", "--help"], ("numba", "torch", "matplotlib")),
        (["client", "--help"], ("numba", "torch", "matplotlib")),
    ],
)
def test_a_command_imports_no_more_than_it_needs(
    arguments: list[str], absent: tuple[str, ...]
) -> None:
    """A person waits for it: seconds are lost where an import is."""
    program = (
        "import sys\nfrom papaya.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert {*absent} & {*done.stderr.split()} == set()
    assert "usage: papaya" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem", "hint"),
    [
        ([], "COMMAND", "papaya --help"),
        (["fly"], "'fly'", "papaya --help"),
        (["simulate", "--concurency", "3"], "--concurency", "papaya simulate --help"),
        (["--colour", "simulate"], "unrecognized arguments: --colour", "papaya --help"),
        (["simulate", "--concurrency", "0"], "0 is below 1", "papaya simulate --help"),
        (["simulate", "--concurrency", "2.5"], "'2.5' is not a whole", "papaya simulate --help"),
        (["simulate", "--seed", "many"], "'many' is not a whole", "papaya simulate --help"),
        (["simulate", "--seed", "inf"], "'inf' is not a whole", "papaya simulate --help"),
        (["simulate", "--hours", "0"], "0 is not a positive", "papaya simulate --help"),
        (["simulate", "--supply", "0"], "0 is not a positive", "papaya simulate --help"),
        (["simulate", "--supply", "nan"], "nan is not a", "papaya simulate --help"),
        (["simulate", "--gap", "-1"], "participation_gap_s = -1", "3600"),
        (["simulate", "--regime", "sync", "--goal", "3"], "--goal", "--over-selection"),
        (["simulate", "--over-selection", "0.3"], "SyncFL", "--regime sync"),
        (["simulate", "--regime", "sync", "--over-selection", "-1"], "over_selection", "0.3"),
        (["simulate", "--population", "1e12"], "size", "10000000000"),
        (["simulate", "--supply", "1e4"], "supply = 10000", "1.5"),
        (["simulate", "--selectors", "1001"], "selectors = 1001", "selectors"),
        (["swarm", "--seed", "1", "--seeds", "5"], "--seeds", "leave --seeds out"),
        (["swarm", "--seed", "1", "--start", "0"], "--start", "leave --start out"),
        (["simulate", "--hours", "x"], "'x' is not a number", "papaya simulate --help"),
        (["demo", "--minutes", "x"], "'x' is not a number", "papaya demo --help"),
        (["swarm", "--jobs", "0"], "0 is below 1", "papaya swarm --help"),
        (["swarm", "--seed", "1", "--plant", "no-bug"], "no-bug", "fence"),
        (["simulat"], "invalid choice: 'simulat'", "did you mean simulate? papaya --help"),
        (["task", "shwo", "x"], "invalid choice: 'shwo'", "did you mean show? papaya task --help"),
    ],
)
def test_a_mistake_is_explained_without_a_traceback(
    arguments: list[str],
    problem: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    error, blank, advice = err.splitlines()[-3:]
    assert error.startswith("error: ")
    assert problem in error
    assert blank == ""
    assert advice.startswith("hint: ")
    assert hint in advice
    assert list(tmp_path.iterdir()) == []


def test_a_real_process_keeps_data_and_the_rest_apart(tmp_path: Path) -> None:
    done = run(*SMALL, "--output", str(tmp_path), "--format", "json")
    assert done.returncode == 0
    report = msgspec.json.decode(done.stdout, type=RunReport)
    assert report == msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=RunReport)
    assert "AsyncFL: 100 %" in done.stderr
    assert str(tmp_path / "plot.png") in done.stderr


def test_a_real_process_fails_with_help() -> None:
    done = run("simulate", "--over-selection", "0.3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: --over-selection is for SyncFL only\n\nhint: add --regime sync, or leave it out\n"
    )


def test_interruption_is_no_error(tmp_path: Path) -> None:
    command = [*PAPAYA, "simulate", "--concurrency", "50", "--hours", "100"]
    with subprocess.Popen(
        [*command, "--output", str(tmp_path / "new")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stderr is not None
        assert "AsyncFL: 0 %" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    assert out == ""
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert list((tmp_path / "new").iterdir()) == []


def test_a_reader_who_has_enough_is_no_error(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*PAPAYA, *SMALL, "--output", str(tmp_path), "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141
    assert "Traceback" not in err
    assert "Exception" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize("output_format", ["text", "json"])
def test_a_full_disk_behind_stdout_is_the_operators_to_mend(
    output_format: str, tmp_path: Path
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PAPAYA, *SMALL, "--output", str(tmp_path), "--format", output_format],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == 2
    assert "\nerror: cannot write to stdout: " in done.stderr
    assert "\n\nhint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert (tmp_path / "report.json").exists()


@pytest.mark.parametrize("command", [["simulate"]])
def test_a_missing_extra_says_how_to_install_it(command: list[str], tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None; "
        "from papaya.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command, "--output", str(tmp_path / "new")],
        capture_output=True,
        check=False,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: plots need matplotlib, which is not installed\n\n"
        "hint: pip install rich matplotlib\n"
    )  # fmt: skip
    assert not (tmp_path / "new").exists()


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _options(each)
        elif action.option_strings:
            yield parser.prog, action


def test_every_option_that_takes_a_value_says_its_default() -> None:
    found = list(_options(parser_for(COMMANDS)))
    assert len(found) > 300
    silent = [
        (command, action.option_strings[-1])
        for command, action in found
        if action.nargs != 0 and not action.required and "default" not in (action.help or "")
    ]
    assert silent == []
