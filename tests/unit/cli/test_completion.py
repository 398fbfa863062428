"""Completion scripts, asked as a shell asks them when somebody presses TAB."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import pytest

from papaya.cli.completion import bash, completed, fish, zsh
from papaya.cli.main import COMMANDS, parser_for

LINES = [
    ("papaya com", {"completion"}),
    ("papaya task sub", {"submit"}),
    ("papaya completion ", {"bash", "zsh", "fish"}),
    ("papaya account add anna --role o", {"owner", "operator"}),
    ("papaya task list --eval", {"--evaluations"}),
    ("papaya task list --format ", {"text", "json"}),
]
with_lines = pytest.mark.parametrize(("line", "expected"), LINES)


@cache
def script(shell: str) -> str:
    found = list(completed(parser_for(COMMANDS)))
    return {"bash": bash, "zsh": zsh, "fish": fish}[shell](found)


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"needs {shell}")


def run(*command: str, text: str = "") -> set[str]:
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=300, check=True
    )
    return {line.split("\t")[0].strip() for line in done.stdout.splitlines() if line.strip()}


@with_lines
def test_bash(line: str, expected: set[str]) -> None:
    ask = (
        f"{script('bash')}\nCOMP_WORDS=({line}{' ' if line[-1] != ' ' else ''}"
        f"{'' if line[-1] != ' ' else chr(39) * 2})\n"
        'COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n_papaya\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    assert run("bash", "--norc", "-c", ask) == expected


@needs("zsh")
@with_lines
def test_zsh(line: str, expected: set[str]) -> None:
    """The function is called with what zsh would give it; `compadd` prints."""
    words = line.split(" ")
    listed = " ".join(f"'{word}'" for word in words)
    ask = (
        "compdef() { : }\n"
        f'{script("zsh")}\ncompadd() {{ shift; print -l -- "$@" }}\n'
        f"words=({listed})\nCURRENT={len(words)}\n_papaya\n"
    )
    offered = run("zsh", "-f", "-c", ask)
    assert {each for each in offered if each.startswith(words[-1])} == expected


@needs("fish")
@with_lines
def test_fish(line: str, expected: set[str]) -> None:
    ask = f"{script('fish')}\ncomplete -C '{line}'\n"
    assert run("fish", "--no-config", text=ask) == expected


def test_every_command_and_every_option_is_in_every_script() -> None:
    found = list(completed(parser_for(COMMANDS)))
    assert {command.words for command in found if " " not in command.words} == {"", *COMMANDS}
    for shell in ("bash", "zsh", "fish"):
        for command in found:
            for option in command.options:
                assert option.name.lstrip("-") in script(shell)
