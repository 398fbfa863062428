"""Claim: to record and learn takes at most 1.2 times the time that recording alone takes.

AsyncFL at C = 1300 and K = 100 with default settings on a fleet of 10⁸ devices; the model is a
perceptron of 2,410 parameters in a task file, whose clients train with compiled steps. Three cases,
each in a process of its own that starts fresh, one after the other:

    record    the machines and their trace, and nothing else
    learn     the same trace, recorded in another process while the model is trained along it
    after     the model trained along a finished trace, for comparison

The value is the wall time of `learn` divided by that of `record`; it needs two cores. Without them,
`after` shows what learning adds. Uploads of the machines are four numbers long: whom the servers
select and count, and when, does not depend on their length. Compilation and the start of processes
are counted, so short runs look worse than long ones.

Memory: `learn` may take as much as `record`, the library that trains (measured here as the memory
of a process that has loaded torch and the compiled model), and 120 bytes for each update: 56 of its
columns, twice while they grow. Each is the peak of one process.

With `--before FOLDER`, the checkout of another version in that folder records the same updates,
before and after this one does. Its trace must be the same, bit for bit. Reported are the CPU time
of recording against that version, and the wall time of `learn` against recording alone there.

Run as `python bench/learning_run.py`, which records 20,000 updates, or with `--updates`, and
`--full` for a million; prints one JSON line per case with value, target and whether it passed. A
wrong result exits with 1; a slow one is only reported.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from papaya.config import AsyncFL, OptimizerConfig, TaskConfig
from papaya.learning.executorch.shim import cache_folder
from papaya.learning.task import load_task
from papaya.learning.torch.compiled_gradient import compile_gradient
from papaya.sim.draws import Ints
from papaya.sim.population import PopulationConfig
from papaya.study.followed_trace import follow
from papaya.study.replay import Rates, learn
from papaya.study.run import RecordingPlan, record_plan, recordable
from papaya.study.trace import Trace
from papaya.study.workloads.base import Clients
from papaya.study.workloads.torch_task import TorchWorkload

SEED = 1
POPULATION = PopulationConfig(size=10**8)
CONCURRENCY, GOAL = 1300, 100
DEFAULT, FULL = 20_000, 1_000_000
TARGET = 1.2
TARGET_BEFORE = 0.5
CHECKOUT = Path(__file__).parent.parent.resolve()
TRACE_COLUMNS = ("created_s", "trips", "first", "start", "staleness", "assigned_s", "execution_s")
CLIENT_COLUMNS = ("device", "participation", "examples")
BYTES_PER_UPDATE = 120
JUDGES, EVALUATIONS = 50, 20
_CLASSES, _FEATURES = 10, 64
OPTIMIZER = OptimizerConfig(kind="fedadam", rate=0.01, beta1=0.0, epsilon=1e-5)
TASK = f"""
import torch
from papaya.learning.example_fields import Binary
from papaya.learning.task import ClientSGD, Examples, Task

task = Task(
    name="perceptron",
    model=lambda: torch.nn.Sequential(
        torch.nn.Linear({_FEATURES}, 32), torch.nn.ReLU(), torch.nn.Linear(32, {_CLASSES})
    ),
    loss=lambda module, x, y: torch.nn.functional.cross_entropy(module(x), y),
    batch=(Binary("float32", ({_FEATURES},)), Binary("int64", (), start={4 * _FEATURES})),
    examples=Examples("bench"),
    client=ClientSGD(rate=0.1),
    concurrency={CONCURRENCY},
)
"""


def require(holds: bool, problem: str) -> None:
    if not holds:
        print(f"wrong result: {problem}", file=sys.stderr)
        sys.exit(1)


def plan(updates: int) -> RecordingPlan:
    task = TaskConfig(task="bench", concurrency=CONCURRENCY, model_length=4, regime=AsyncFL(GOAL))
    return RecordingPlan(cluster=recordable(task, POPULATION), seed=SEED, updates=updates)


class Data:
    """Noise around the middle of a class; a device takes its examples from one pool."""

    def __init__(self) -> None:
        draw = np.random.default_rng(SEED)
        middles = draw.standard_normal((_CLASSES, _FEATURES)).astype(np.float32)
        targets = draw.integers(0, _CLASSES, 20_000)
        noise = draw.standard_normal((20_000, _FEATURES), dtype=np.float32)
        rows = zip(0.5 * middles[targets] + noise, targets, strict=True)
        self._pool = [inputs.tobytes() + target.tobytes() for inputs, target in rows]

    def of(self, device: int, count: int) -> list[bytes]:
        start = device * 7919 % (len(self._pool) - 1500)
        return self._pool[start : start + count]


def workload(folder: Path) -> TorchWorkload:
    path = folder / "task.py"
    path.write_text(TASK)
    loaded = load_task(path)
    data = Data()
    library = compile_gradient(loaded.task, data.of(0, 4), cache_folder() / "gradients")
    device: Ints = np.arange(JUDGES)
    judges = Clients(device, np.zeros_like(device), np.full(JUDGES, 20, np.int64))
    return TorchWorkload(loaded, data.of, judges, way=library)


def do_record(folder: Path, updates: int) -> dict[str, Any]:
    trace, _ = record_plan(plan(updates))
    trace.save(folder / "trace.npz")
    require(int(trace.first[-1]) == GOAL * trace.versions, "versions of another size")
    return {"updates": len(trace.clients), "versions": trace.versions}


def do_learn(folder: Path, updates: int) -> dict[str, Any]:
    with follow(plan(updates)) as followed:
        found = learnt(followed, folder, updates)
        followed.whole()
    return found


def do_after(folder: Path, updates: int) -> dict[str, Any]:
    return learnt(Trace.load(folder / "trace.npz"), folder, updates)


def do_library(folder: Path, updates: int) -> dict[str, Any]:
    """Torch, the compiled model and one client: what learning needs whatever the run's length."""
    trained = workload(folder)
    one: Ints = np.zeros(1, np.int64)
    clients = Clients(one, one, one + 40)
    trained.train([trained.initial(SEED)], one, clients, trained.loaded.task.client)
    return {"updates": 0}


def learnt(trace: Any, folder: Path, updates: int) -> dict[str, Any]:
    trained = workload(folder)
    rates = Rates(client=trained.loaded.task.client, optimizer=OPTIMIZER)
    curve = learn(trace, trained, rates, evaluations=EVALUATIONS, until=-(-updates // GOAL))
    first, last = curve.points[0], curve.points[-1]
    require(curve.diverged is None, str(curve.diverged))
    require(last.updates >= updates, f"learnt of {last.updates} updates")
    require(last.quality.all < 0.8 * first.quality.all, f"the last loss is {last.quality.all:.3f}")
    return {"updates": last.updates, "last_loss": last.quality.all}


STEPS = {"record": do_record, "learn": do_learn, "after": do_after, "library": do_library}


def child(step: str, folder: Path, updates: int) -> None:
    found = STEPS[step](folder, updates)
    own = resource.getrusage(resource.RUSAGE_SELF)
    both = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["cpu_s"] = round(own.ru_utime + own.ru_stime + both.ru_utime + both.ru_stime, 1)
    found["peak_mb"] = round(own.ru_maxrss * 1024 / 1e6)
    print(json.dumps(found))


def in_process(step: str, folder: Path, updates: int, checkout: Path = CHECKOUT) -> dict[str, Any]:
    """Start to end, importing included."""
    start_s = time.perf_counter()
    command = [sys.executable, str(checkout / "bench" / "learning_run.py"), "--step", step]
    command += ["--folder", str(folder), "--updates", str(updates)]
    env = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=env)
    require(done.returncode == 0, f"{step} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    found["wall_s"] = round(time.perf_counter() - start_s, 1)
    report(step if checkout == CHECKOUT else f"{step} before", found["wall_s"], None, **found)
    return found


def columns(trace: Trace) -> dict[str, Any]:
    found = {name: getattr(trace, name) for name in TRACE_COLUMNS}
    return found | {name: getattr(trace.clients, name) for name in CLIENT_COLUMNS}


def compare(earlier: list[dict[str, Any]], found: dict[str, dict[str, Any]], folder: Path) -> None:
    """With the recordings of another version, which are in `folder / "before"`."""
    ours, theirs = (columns(Trace.load(path / "trace.npz")) for path in (folder, folder / "before"))
    for name, column in ours.items():
        require(np.array_equal(column, theirs[name]), f"the traces differ in {name}")
    cpu_s = sum(each["cpu_s"] for each in earlier) / len(earlier)
    wall_s = sum(each["wall_s"] for each in earlier) / len(earlier)
    ratio = found["record"]["cpu_s"] / cpu_s
    report("recording ÷ recording before, CPU time", round(ratio, 2), TARGET_BEFORE)
    ratio = found["learn"]["wall_s"] / wall_s
    report("learning while recording ÷ recording before, wall time", round(ratio, 2), TARGET)


def report(case: str, value: float, target: float | None, **more: Any) -> None:
    line: dict[str, Any] = {"bench": "learning_run", "case": case, "value": value}
    if target is not None:
        line |= {"target": target, "passed": value <= target}
    print(json.dumps(line | more, ensure_ascii=False), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--full", action="store_true", help="a million updates")
    parser.add_argument("--updates", type=int, help="another number of updates")
    parser.add_argument("--before", type=Path, help="the checkout of another version")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    updates = asked.updates or (FULL if asked.full else DEFAULT)
    if asked.step is not None:
        child(asked.step, asked.folder, updates)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workload(folder)  # compiled before anything is timed
        earlier: list[dict[str, Any]] = []

        def record_before() -> None:
            if asked.before is not None:
                there = folder / "before"
                there.mkdir(exist_ok=True)
                earlier.append(in_process("record", there, updates, asked.before.resolve()))

        record_before()
        found = {"record": in_process("record", folder, updates)}
        record_before()
        found |= {step: in_process(step, folder, updates) for step in STEPS if step not in found}
        if earlier:
            compare(earlier, found, folder)
    require(
        found["learn"]["last_loss"] == found["after"]["last_loss"],
        "learning while recording and afterwards gave different models",
    )
    ratio = found["learn"]["wall_s"] / found["record"]["wall_s"]
    report("learning while recording ÷ recording, wall time", round(ratio, 2), TARGET)
    allowed = found["record"]["peak_mb"] + found["library"]["peak_mb"]
    allowed += updates * BYTES_PER_UPDATE / 1e6
    peak = found["learn"]["peak_mb"] / allowed
    report("memory of learning ÷ recording, library and columns", round(peak, 2), 1.0)


if __name__ == "__main__":
    main()
