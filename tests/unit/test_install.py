"""The Makefile's installation: one line of progress, and pip's errors as they are."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tools.install import Status, create, install, is_long, large_package_in, step_in

ROOT = Path(__file__).parents[2]
_LIMIT_S = 300.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pip(program: str) -> tuple[str, ...]:
    """A program in pip's place."""
    return (sys.executable, "-c", dedent(program))


WORKING = pip("""
    print("Requirement already satisfied: numpy in ./lib (2.2.0)")
    print("Collecting torch")
    print("  Downloading https://host/torch-2.13.0-cp311.whl.metadata (26 kB)")
    print("  Downloading torch-2.13.0-cp311.whl (188.9 MB)")
    print("Installing collected packages: mpmath, sympy, torch")
    print("Successfully installed mpmath-1.3.0 sympy-1.13 torch-2.13.0")
""")
FAILING = pip("""
    import sys
    print("Collecting torch==99")
    print("ERROR: No matching distribution found for torch==99", file=sys.stderr)
    sys.exit(1)
""")


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("Collecting ruamel.yaml>=0.18 (from papaya-fl==0.3)", "looking up ruamel.yaml"),
        (
            "  Downloading https://host/a/torch-2.13.0.whl.metadata (26 kB)",
            "downloading torch-2.13.0.whl (26 kB)",
        ),
        ("Installing collected packages: a, b-c, d", "installing d and 2 other packages"),
        ("Installing collected packages: a, Big_One", "installing Big_One and 1 other package"),
        (
            "Installing collected packages: big.one, huge, a",
            "installing big.one, huge and 1 other package",
        ),
        ("Installing collected packages: executorch", "installing executorch"),
        ("Requirement already satisfied: numpy", None),
    ],
)
def test_lines_of_pip_become_steps(line: str, step: str | None) -> None:
    assert step_in(line, {"big-one", "huge"}) == step


def test_only_long_steps_have_a_line_in_a_log() -> None:
    assert is_long("downloading torch-2.13.0.whl (188.9 MB)")
    assert is_long("downloading torch-2.13.0.whl (1.1 GB)")
    assert is_long("installing torch and 2 other packages")
    assert is_long("creating .venv")
    assert not is_long("downloading torch-2.13.0.whl (26 kB)")
    assert not is_long("downloading sympy-1.13.whl (6.2 MB)")
    assert not is_long("looking up torch")


def test_large_packages_are_found_in_the_lines_of_pip() -> None:
    assert large_package_in("  Downloading https://host/Big_One-1-py3.whl (20.0 MB)") == "big-one"
    assert large_package_in("  Using cached torch-2.13.0-cp311.whl (1.2 GB)") == "torch"
    assert large_package_in("  Downloading sympy-1.13.whl (6.2 MB)") is None
    assert large_package_in("Collecting torch") is None


def test_a_log_has_a_line_every_15_seconds() -> None:
    log, seconds = io.StringIO(), 0.0
    status = Status(log, "starting pip", lambda: seconds)
    for second in range(48):
        seconds = float(second)
        if second == 17:
            status.set("installing torch")
        status.draw()
    assert log.getvalue().splitlines() == [
        "  starting pip: 15 s so far",
        "  installing torch",
        "  installing torch: 15 s so far",
        "  installing torch: 30 s so far",
    ]


def test_creating_an_environment_is_told_and_its_errors_are_shown(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = io.StringIO()
    assert create(str(tmp_path / "file" / ".venv"), log) != 0
    assert log.getvalue().startswith(f"  creating {tmp_path / 'file' / '.venv'}\n")
    assert "Not a directory" in log.getvalue()


def test_a_log_names_the_long_steps() -> None:
    log = io.StringIO()
    assert install(["torch"], log, WORKING) == 0
    assert log.getvalue() == (
        "  downloading torch-2.13.0-cp311.whl (188.9 MB)\n  installing torch and 2 other packages\n"
    )


def test_a_terminal_shows_every_step_and_ends_with_an_empty_line() -> None:
    terminal = Terminal()
    assert install(["torch"], terminal, WORKING) == 0
    shown = terminal.getvalue()
    assert "looking up torch" in shown
    assert "installing torch and 2 other packages" in shown
    assert shown.endswith("\r\x1b[K")
    assert "\n" not in shown


def test_output_that_is_not_text_is_shown_as_far_as_it_is() -> None:
    log = io.StringIO()
    garbled = pip(r"import sys; sys.stdout.buffer.write(b'a \xff b\n'); sys.exit(3)")
    assert install(["torch"], log, garbled) == 3
    assert log.getvalue() == "the last lines of pip's output:\na \ufffd b\n"


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_errors_of_pip_are_shown_with_its_last_lines(stream: type[io.StringIO]) -> None:
    shown = stream()
    assert install(["torch==99"], shown, FAILING) == 1
    assert "ERROR: No matching distribution found for torch==99\n" in shown.getvalue()
    assert shown.getvalue().endswith("the last lines of pip's output:\nCollecting torch==99\n")


def test_ctrl_c_ends_it_with_130_and_without_a_traceback() -> None:
    """pip waits for an index that does not answer. A terminal sends SIGINT to both processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
    try:
        with socket.create_server(("127.0.0.1", 0)) as index:
            index.settimeout(_LIMIT_S)
            url = f"http://127.0.0.1:{index.getsockname()[1]}/"
            command = [sys.executable, "tools/install.py", "--isolated", "--index-url", url, "none"]
            with (
                subprocess.Popen(
                    command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
                ) as process,
                index.accept()[0],
            ):
                os.killpg(process.pid, signal.SIGINT)
                told = process.communicate(timeout=_LIMIT_S)[1]
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.returncode == 130
    assert "Traceback" not in told
