"""A tiny enclave for tests of builds: two sources, one wheel that is no wheel, and their lock."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

WHEEL = "nosuchthing-1.0-py3-none-any.whl"
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


def make_wheels(root: Path) -> Path:
    root.mkdir()
    (root / WHEEL).write_bytes(WHEEL_BYTES)
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
