"""A tiny enclave for tests of builds: two sources, one wheel that is no wheel, and their lock.

`FakePip` answers for pip without a network.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

_TAGS = "1.0-py3-none-any"
WHEEL = f"nosuchthing-{_TAGS}.whl"
WHEEL_BYTES = b"not really a wheel"
SOURCES = ("papaya/__init__.py", "papaya/tsa/__main__.py")

_LOCK = f"""
python = "3.11"
platforms = ["manylinux_2_28_x86_64"]
sources = ["papaya/__init__.py", "papaya/tsa/__main__.py"]
[[wheels]]
name = "nosuchthing"
version = "1.0"
file = "{WHEEL}"
sha256 = "{hashlib.sha256(WHEEL_BYTES).hexdigest()}"
"""


def make_sources(root: Path, text: str = "pass\n") -> Path:
    (root / "papaya/tsa").mkdir(parents=True, exist_ok=True)
    (root / "papaya/tsa/enclave.toml").write_text(_LOCK)
    for path in SOURCES:
        (root / path).write_text(text)
    return root


def add_wheel(root: Path, name: str) -> None:
    """Before the other wheels of the lock, one that no index has."""
    lock = root / "papaya/tsa/enclave.toml"
    wheel = (
        f'name = "{name}"\nversion = "1.0"\nfile = "{name}-{_TAGS}.whl"\nsha256 = "{"0" * 64}"\n'
    )
    lock.write_text(lock.read_text().replace("[[wheels]]", f"[[wheels]]\n{wheel}[[wheels]]", 1))


def make_wheels(root: Path, name: str = WHEEL) -> Path:
    root.mkdir()
    (root / name).write_bytes(WHEEL_BYTES)
    return root


def commit(root: Path) -> str:
    """Everything in a git repository of its own; returns the revision."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (
        ["init", "--quiet"],
        ["add", "--all"],
        [*identity, "-c", "commit.gpgsign=false", "commit", "--quiet", "--message", "a release"],
    ):
        _git(root, *command)
    return _git(root, "rev-parse", "HEAD")


def _git(root: Path, *command: str) -> str:
    # Under a git hook, GIT_DIR would name the repository of the hook.
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("GIT_")}
    words = ["git", "-C", str(root), *command]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return done.stdout.strip()


_FAKE_PIP = """#!/bin/sh
folder=$(dirname "$0")
for word; do
  case $previous in
    --requirement) requirements=$word ;;
    --dest) dest=$word ;;
  esac
  previous=$word
done
while read -r requirement rest; do
  echo "$requirement" >> "$folder/calls"
  answer=$folder/$requirement.$(grep -c "^$requirement" "$folder/calls")
  [ -d "$answer" ] && cp "$answer"/* "$dest" && continue
  [ -f "$answer" ] || echo "ERROR: No matching distribution found for $requirement" > "$answer"
  cat "$answer" >&2
  exit 1
done < "$requirements"
"""

_MISMATCH = f"""\
WARNING: Retrying (Retry(total=4)) after connection broken
ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the \
package versions, please update the hashes. Otherwise, examine the package contents carefully; \
someone may have tampered with them.
    nosuchthing==1.0 from https://example.org/nosuchthing-1.0-py3-none-any.whl (from -r \
/tmp/papaya-wheels-0/requirements.txt (line 1)):
        Expected sha256 {hashlib.sha256(WHEEL_BYTES).hexdigest()}
             Got        %s

"""


class FakePip:
    """Like pip, it stops at the first requirement that it cannot get. It records its runs.

    `answers`: for the wheel `nosuchthing`, run by run, the SHA-256 of a file that is not the one
    in the lock, the name of a file with the right one, or else what pip prints when it fails.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
        folder.mkdir()
        self._calls = folder / "calls"
        python = folder / "python"
        python.write_text(_FAKE_PIP)
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        for run, answer in enumerate(answers, 1):
            path = folder / f"nosuchthing==1.0.{run}"
            if answer.endswith(".whl"):
                make_wheels(path, answer)
            else:
                path.write_text(_MISMATCH % answer if len(answer) == 64 else answer)

    @property
    def calls(self) -> list[str]:
        """The requirement of each run."""
        return self._calls.read_text().splitlines()
