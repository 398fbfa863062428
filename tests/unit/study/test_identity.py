"""Names of kept files: what decides a run changes them, and nothing else does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

import papaya
from papaya.config import SyncFL
from papaya.errors import OperatorError
from papaya.sim.jobs import in_turn
from papaya.study import identity, lab
from papaya.study.identity import EXPERIMENTS, ROOTS, closure, code_digest, digest
from papaya.study.lab import Lab
from papaya.study.run import RecordingPlan
from papaya.study.trace import Recorder
from papaya.study.workloads.language import EmbeddingWorkload
from tests.unit.study.learners import a_cluster

PLAN = RecordingPlan(cluster=a_cluster(), seed=1)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The lab imports the engine, which imports the clock inside a function."""
    sources = {
        "__init__.py": "",
        "study/__init__.py": "",
        "study/lab.py": "import numpy\nfrom papaya.sim.engine import Engine\n",
        "study/plots.py": "from papaya.study import lab\n",
        "study/workloads/lstm.py": "",
        "sim/__init__.py": "",
        "sim/engine.py": "def run():\n    from papaya import clock\n",
        "clock.py": "",
        "cli/main.py": "import papaya.study.lab\n",
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path


def digest_of(package: Path, roots: tuple[str, ...] = ROOTS) -> str:
    """As another process finds it: in one process the code stays what was imported."""
    code_digest.cache_clear()
    return code_digest(package, roots)


@pytest.mark.parametrize(
    "change",
    [
        lambda package: (package / "__init__.py").write_text('__version__ = "2"\n'),
        lambda package: (package / "sim/__init__.py").write_text("NAME = 1\n"),
        lambda package: (package / "study/workloads/lstm.py").write_text("NAME = 1\n"),
        lambda package: (package / "study/workloads/new.py").touch(),
        lambda package: (package / "clock.py").write_text("NAME = 1\n"),
        lambda package: (package / "sim/engine.py").unlink(),
    ],
)
def test_other_code_is_another_name(package: Path, change: Callable[[Path], object]) -> None:
    before = digest_of(package)
    assert digest_of(package) == before
    change(package)
    assert digest_of(package) != before


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("study/lab.py", "from .near import x"),
        ("study/lab.py", "from . import near"),
        ("study/lab.py", "from ..study import near"),
        ("study/lab.py", "from ..study.near import x"),
        ("sim/__init__.py", "from ..study.near import x"),
        ("sim/engine.py", "def f():\n    from ..study.near import x"),
    ],
)
def test_relative_imports_are_followed(package: Path, importer: str, statement: str) -> None:
    path = package / importer
    path.write_text(f"{path.read_text()}\n{statement}\n")
    (package / "study/near.py").write_text("x = 1\n")
    assert package / "study/near.py" in closure(package)
    before = digest_of(package)
    (package / "study/near.py").write_text("x = 2\n")
    assert digest_of(package) != before


def test_the_result_of_an_experiment_is_known_by_the_experiments_code(package: Path) -> None:
    """A stored run is kept when a conclusion changes; the conclusion is drawn again."""
    runs, results = digest_of(package), digest_of(package, EXPERIMENTS)
    (package / "study/experiments").mkdir()
    (package / "study/experiments/speedup.py").write_text("from papaya.study import plots\n")
    changed = digest_of(package, EXPERIMENTS)
    (package / "study/plots.py").write_text("NAME = 1\n")
    assert len({results, changed, digest_of(package, EXPERIMENTS)}) == 3
    assert digest_of(package) == runs


def test_what_no_run_executes_keeps_the_name(package: Path) -> None:
    before = digest_of(package)
    (package / "cli/main.py").write_text("NAME = 1\n")
    (package / "study/plots.py").write_text("NAME = 1\n")
    (package / "sim/new.py").touch()
    (package / "sim/notes.md").touch()
    (package / "sim/__pycache__").mkdir()
    (package / "sim/__pycache__/engine.cpython-311.pyc").touch()
    assert digest_of(package) == before


def test_the_closure_has_the_machines_and_the_trainers_and_no_command() -> None:
    package = Path(papaya.__file__).parent
    found = {path.relative_to(package).as_posix() for path in closure(package)}
    assert {
        "coordinator/coordinator.py",
        "aggregator/shards.py",
        "sim/cluster.py",
        "study/replay.py",
        "study/workloads/compiled_lstm.py",
        "study/workloads/lstm_trainers.py",
        "learning/torch/engine.py",
    } <= found
    assert not [name for name in found if name.startswith(("cli/", "server/", "study/experiments"))]


def test_recordings_are_known_by_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PLAN.digest == digest(PLAN)
    assert structs.replace(PLAN, drain_s=1.0).digest != PLAN.digest
    before = PLAN.digest
    monkeypatch.setattr(identity, "code_digest", lambda roots: "other")
    assert PLAN.digest != before


def test_the_code_is_found_and_read_once() -> None:
    """An empty digest would call all code alike."""
    code_digest.cache_clear()
    assert code_digest() != code_digest(Path("nowhere"))
    code_digest()
    assert code_digest.cache_info().misses == 2


def test_a_process_of_other_code_refuses_to_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that starts after an edit: its files would have other names than those asked for."""
    plan = structs.replace(PLAN, updates=5)
    outdated = iter(["as it was"])
    monkeypatch.setattr(lab, "code_digest", lambda: next(outdated, "as it is now"))
    with pytest.raises(OperatorError, match="Papaya's source code changed during the run"):
        Lab(tmp_path, in_turn, lambda run, folder: EmbeddingWorkload()).record([plan])
    assert not list((tmp_path / "traces").iterdir())


def test_nothing_of_a_recording_stays_in_memory(tmp_path: Path) -> None:
    """A reproduction records dozens of runs in one process, each with a million devices."""

    def recorders() -> list[object]:
        return [each for each in gc.get_objects() if type(each) is Recorder]

    gc.disable()
    try:
        others = recorders()  # of tests that ran before
        recorder = Lab(tmp_path, in_turn, lambda run, folder: EmbeddingWorkload())
        recorder.record([structs.replace(PLAN, updates=5)])
        assert {id(each) for each in recorders()} <= {id(each) for each in others}
    finally:
        gc.enable()


def test_equals_that_are_written_otherwise_are_all_recorded(tmp_path: Path) -> None:
    whole, broken = (
        RecordingPlan(cluster=a_cluster(SyncFL(share)), seed=1, updates=5) for share in (0, 0.0)
    )
    assert whole == broken
    recordings = Lab(tmp_path, in_turn, lambda run, folder: EmbeddingWorkload()).record(
        [whole, broken]
    )
    assert [recording.trace.versions > 0 for recording in recordings] == [True, True]
