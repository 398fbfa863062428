"""The last release as an installed wheel, built from the history of the repository.

The last release is the newest commit whose `papaya/__init__.py` has a version without `.dev`. It
brings no dependencies: it runs with those of the working tree.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_VERSION = re.compile(r'__version__ = "(?P<version>[^"]+)"')
_FILE = "papaya/__init__.py"
_BUILD_S = 1200.0


class LastRelease:
    """Its version, and the folder of packages in which it is installed."""

    def __init__(self, folder: Path) -> None:
        source, wheels, self.packages = (folder / name for name in ("source", "wheels", "packages"))
        self.version = unpack_last_release(source)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels))
        _run(*pip, *build, str(source))
        (wheel,) = wheels.glob("papaya_fl-*.whl")
        install = ("install", "--no-deps", "--no-index", "--no-compile", "--target")
        _run(*pip, *install, str(self.packages), str(wheel))


def unpack_last_release(folder: Path) -> str:
    """Its source, which a process can use as a folder of packages. Returns its version."""
    commit, version = _find()
    folder.mkdir(parents=True)
    archive = _run("git", "archive", commit, "papaya", "pyproject.toml", "README.md", "LICENSE")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return version


def _find() -> tuple[str, str]:
    """Commit and version. Skips the test if the history is not there."""
    if not (ROOT / ".git").exists():
        pytest.skip("no history: this is not a clone of the repository")
    for commit in _run("git", "log", "--format=%H", "-G__version__", "--", _FILE).decode().split():
        found = _VERSION.search(_run("git", "show", f"{commit}:{_FILE}").decode())
        if found is not None and ".dev" not in found["version"]:
            return commit, found["version"]
    pytest.skip("no release in the history: this is a shallow clone")


def _run(*command: str) -> bytes:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=_BUILD_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr.decode(errors='replace')}"
    return done.stdout
