"""Names of kept files: what decides a run changes them, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from papaya.sim import identity
from papaya.sim.identity import NEVER_RUN, code_digest, digest
from papaya.sim.learnt import Course
from tests.unit.sim.learners import a_cluster
from tools.architecture import MAY_IMPORT

COURSE = Course(cluster=a_cluster(), seed=1)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("__init__.py", "sim/engine.py", "sim/workloads/lstm.py", "cli/main.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"NAME = {name!r}\n")
    return tmp_path


def digest_of(package: Path) -> str:
    """As another process finds it: in one process the code stays what was imported."""
    code_digest.cache_clear()
    return code_digest(package)


@pytest.mark.parametrize(
    "change",
    [
        lambda package: (package / "__init__.py").write_text('__version__ = "2"\n'),
        lambda package: (package / "sim/workloads/lstm.py").write_text("NAME = 1\n"),
        lambda package: (package / "sim/new.py").touch(),
        lambda package: (package / "sim/engine.py").unlink(),
        lambda package: (package / "sim/engine.py").rename(package / "sim/motor.py"),
    ],
)
def test_other_code_is_another_name(package: Path, change: Callable[[Path], object]) -> None:
    before = digest_of(package)
    assert digest_of(package) == before
    change(package)
    assert digest_of(package) != before


def test_what_no_run_executes_keeps_the_name(package: Path) -> None:
    before = digest_of(package)
    (package / "cli/main.py").write_text("NAME = 1\n")
    (package / "sim/notes.md").touch()
    (package / "sim/__pycache__").mkdir()
    (package / "sim/__pycache__/engine.cpython-311.pyc").touch()
    assert digest_of(package) == before


def test_what_is_left_out_is_what_the_simulator_may_not_import() -> None:
    packages = set(MAY_IMPORT) - {"__init__", "__main__"}
    assert packages - {"sim", *MAY_IMPORT["sim"]} == set(NEVER_RUN)


def test_recordings_are_known_by_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert COURSE.digest == digest(COURSE)
    assert structs.replace(COURSE, drain_s=1.0).digest != COURSE.digest
    before = COURSE.digest
    monkeypatch.setattr(identity, "code_digest", lambda: "other")
    assert COURSE.digest != before


def test_the_code_is_found_and_read_once() -> None:
    """An empty digest would call all code alike."""
    code_digest.cache_clear()
    assert code_digest() != code_digest(Path("nowhere"))
    code_digest()
    assert code_digest.cache_info().misses == 2
