"""Work on a Ray cluster of several nodes: the same numbers, and a lost worker costs its own run."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import ray

import papaya
from papaya.sim.jobs import SharedFiles, mapping
from papaya.study.experiments.reproduce import as_data, reproduce
from tests.unit.study.experiments.test_reproduce import TOY, a_corpus

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]

SETTINGS: dict[str, Any] = {
    "vary": {"K": (3, 6), "client_rate": (0.1, 0.5)},
    "updates": 60,
    "evaluations": 3,
    "population": 10_000,
    "progress": False,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with some_nodes(3) as nodes:
        yield nodes.address


@contextmanager
def some_nodes(count: int) -> Iterator[Any]:
    """Nodes with a core each, in processes of their own."""
    from ray.cluster_utils import Cluster

    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    nodes: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(count - 1):
        nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    try:
        yield nodes
    finally:
        nodes.shutdown()


def some_clients() -> list[list[bytes]]:
    rng = np.random.default_rng(3)
    points = rng.normal(size=(12, 25, 2)).tolist()
    return [[json.dumps({"x": x, "y": int(x[0] > 0)}).encode() for x in own] for own in points]


def test_a_sweep_has_the_same_files_as_without_ray(cluster: str, tmp_path: Path) -> None:
    clients = some_clients()
    here = papaya.sweep("examples/leaf.py", clients, output=tmp_path / "here", **SETTINGS)
    there = papaya.sweep(
        "examples/leaf.py", clients, output=tmp_path / "there", ray=cluster, **SETTINGS
    )
    assert there.table.equals(here.table)
    found = [
        {path.name: path.read_bytes() for path in (tmp_path / which / "runs").iterdir()}
        for which in ("here", "there")
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 4
    gone = next((tmp_path / "there" / "runs").iterdir())
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "there" / "runs").iterdir()}
    gone.unlink()
    papaya.sweep("examples/leaf.py", clients, output=tmp_path / "there", ray=cluster, **SETTINGS)
    changed = {path for path, time in kept.items() if path.stat().st_mtime_ns != time}
    assert changed == {gone}, "only what was missing is run again"


def test_clients_train_on_the_cluster_with_the_same_bits(cluster: str) -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "vary"}
    here = papaya.simulate("examples/leaf.py", some_clients(), **settings)
    there = papaya.simulate("examples/leaf.py", some_clients(), ray=cluster, **settings)
    assert there.history.equals(here.history)
    assert there.parameters.tobytes() == here.parameters.tobytes()
    assert there.clients.equals(here.clients)


def _fragile(marks: Path, item: int, *, folder: Path, tell: Any) -> int:
    """Work on item 3 loses its worker the first time."""
    with (marks / str(item)).open("a") as mark:
        mark.write("x")
        mark.flush()
        os.fsync(mark.fileno())
    if item == 3 and (marks / "3").read_text() == "x":
        os._exit(1)
    (folder / f"made/{item}").write_bytes((folder / "needed").read_bytes() * item)
    tell(1.0)
    return item


def test_a_lost_worker_costs_only_its_own_run(cluster: str, tmp_path: Path) -> None:
    marks, folder = tmp_path / "marks", tmp_path / "folder"
    marks.mkdir()
    folder.mkdir()
    (folder / "needed").write_bytes(b"ab")
    files = SharedFiles(
        folder, needs=lambda item: ("needed",), makes=lambda item: (f"made/{item}",)
    )
    heard: list[float] = []
    with mapping(1, ray=cluster) as mapped:
        done = sorted(mapped(partial(_fragile, marks), range(6), heard.append, files))
    assert done == list(range(6))
    assert sum(heard) == 6.0
    assert {path.name: path.read_text() for path in marks.iterdir()} == {
        **{str(item): "x" for item in range(6)},
        "3": "xx",
    }
    for item in range(6):
        assert (folder / f"made/{item}").read_bytes() == b"ab" * item


_FRAGILE = """

import contextlib
import os


def fragile_loss(module: nn.Module, inputs: Tensor, kinds: Tensor) -> Tensor:
    if torch.is_grad_enabled() and os.getpid() != {test}:
        with contextlib.suppress(FileNotFoundError):
            os.remove({armed!r})
            os._exit(1)
    return loss(module, inputs, kinds)


task = structs.replace(task, loss=fragile_loss)
"""


def test_a_worker_that_is_lost_in_training_changes_no_bits(cluster: str, tmp_path: Path) -> None:
    """The first client that trains on the cluster ends its worker, once."""
    armed, task = tmp_path / "armed", tmp_path / "fragile.py"
    armed.touch()
    fragile = _FRAGILE.format(test=os.getpid(), armed=str(armed))
    imports = "import json\n\nimport torch\nfrom msgspec import structs\n"
    leaf = Path("examples/leaf.py").read_text()
    task.write_text(leaf.replace("import json\n\nimport torch\n", imports) + fragile)
    settings = {name: value for name, value in SETTINGS.items() if name != "vary"}
    here = papaya.simulate(task, some_clients(), **settings)
    assert armed.exists()
    there = papaya.simulate(task, some_clients(), ray=cluster, **settings)
    assert not armed.exists()
    assert there.history.equals(here.history)
    assert there.parameters.tobytes() == here.parameters.tobytes()
    assert there.clients.equals(here.clients)


def _on_a_node(marks: Path, item: int, *, folder: Path, tell: Any) -> int:
    """A piece on the node that is to be removed waits for it. Others wait for that piece."""
    with (marks / str(item)).open("a") as mark:
        mark.write("x")
    if ray.get_runtime_context().get_node_id() == (marks / "doomed").read_text():
        (marks / "waiting").touch()
        signal.pause()
    wait_for(marks / "waiting")
    (folder / f"made/{item}").write_bytes(b"x" * item)
    tell(1.0)
    return item


def wait_for(path: Path) -> None:
    poll = threading.Event()
    while not path.exists():
        poll.wait(0.05)


def test_a_node_that_is_removed_costs_only_what_it_was_doing(tmp_path: Path) -> None:
    """The whole node goes, with its object store and all its workers."""
    marks, folder = tmp_path / "marks", tmp_path / "folder"
    marks.mkdir()
    folder.mkdir()
    files = SharedFiles(folder, needs=lambda item: (), makes=lambda item: (f"made/{item}",))

    heard: list[float] = []

    def remove() -> None:
        wait_for(marks / "waiting")
        if lost in nodes.worker_nodes:
            nodes.remove_node(lost, allow_graceful=False)

    with some_nodes(2) as nodes:
        [lost] = nodes.worker_nodes
        (marks / "doomed").write_text(lost.node_id)
        remover = threading.Thread(target=remove)
        remover.start()
        try:
            with mapping(1, ray=nodes.address) as mapped:
                done = sorted(mapped(partial(_on_a_node, marks), range(8), heard.append, files))
        finally:
            (marks / "waiting").touch()
            remover.join()
    assert done == list(range(8))
    assert sum(heard) == 8.0
    for item in range(8):
        assert (folder / f"made/{item}").read_bytes() == b"x" * item
    tries = [len((marks / str(item)).read_text()) for item in range(8)]
    assert sorted(tries) == [1] * 7 + [2]


def test_experiments_have_the_same_results_as_without_ray(cluster: str, tmp_path: Path) -> None:
    """Also those of real text, whose corpus is sent to the workers."""
    found = []
    for folder, ray_address in (("here", None), ("there", cluster)):
        results = reproduce(
            ["training-curves"],
            TOY,
            [1],
            tmp_path / folder,
            jobs=1,
            ray=ray_address,
            corpus=a_corpus(),
        )
        found.append(msgspec.json.encode([as_data(result) for result in results]))
    assert found[0] == found[1]


def test_an_error_in_the_work_is_the_callers(cluster: str) -> None:
    with mapping(1, ray=cluster) as mapped, pytest.raises(ZeroDivisionError):
        list(mapped(_divided, [1, 0]))


def _divided(item: int) -> float:
    return 1 / item
