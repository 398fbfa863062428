"""Claim: two cores give at least 0.85 of what two independent copies run together give.

A task file with a small perceptron learns along two recordings that are there already, so only
learning is timed. In one run, each with two cores:

    copies      two processes that know nothing of each other, each with one of the runs
    sweep       one sweep of both runs, with two jobs
    ray         the same on a Ray cluster of two node processes with a core each (with --ray)
    training    one of the runs, its clients trained in two processes

Clients train with eager steps. `copies` and `training` are repeated with compiled ones: the shorter
a step, the more it matters what the first process does for each client. A sweep's processes do not
depend on each other, so it is not repeated. Compiled steps need a C++ compiler.

Reported is the throughput in client updates per second, divided by that of the copies, which run
first and last. Before it is timed, each way does a short run in the same processes, so that they
have imported torch, which takes most of the time. A wrong result (another model) exits with 1; a
slow one is only reported. Other load changes the ratios, so the load average is reported.

Run as `python bench/two_cores.py [--ray]`; prints one JSON line per way and kind of steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from papaya.sim.jobs import in_turn, mapping
from papaya.study.data.opening import save_source
from papaya.study.data.source import Memory
from papaya.study.lab import Lab, Make, Recording
from papaya.study.run import Run, fleet_of, learn_run
from papaya.study.simulation import run_of
from papaya.study.workloads.base import Workload
from papaya.study.workloads.registry import Prepared, Steps, WorkloadSpec, prepare, steps_of

TARGET = 0.85
UPDATES = 3000
# A run with compiled steps has this many times as many updates: a short run says little.
TIMES_COMPILED = 4
TASK = """
import json
import torch
from torch import nn
from papaya.learning.task import AsyncFL, ClientSGD, Examples, OptimizerConfig, Task

def batch(examples):
    rows = [json.loads(example) for example in examples]
    return torch.tensor([r["x"] for r in rows]), torch.tensor([r["y"] for r in rows])

def loss(module, x, y):
    return nn.functional.cross_entropy(module(x), y)

task = Task(
    name="digits", model=lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    loss=loss, batch=batch, examples=Examples("digits"), client=ClientSGD(rate=0.1, epochs=2),
    regime=AsyncFL(aggregation_goal=50), concurrency=200, optimizer=OptimizerConfig(kind="fedavg"),
)
"""


class Timed(NamedTuple):
    """`losses` are those of the runs, in their order."""

    seconds: float
    losses: list[float]

    @property
    def runs_per_s(self) -> float:
        return len(self.losses) / self.seconds


def write_inputs(folder: Path) -> None:
    rng = np.random.default_rng(1)
    clients = []
    for _ in range(200):
        y = rng.integers(0, 10, int(20 * np.exp(0.8 * rng.standard_normal())) + 5)
        x = (np.eye(10, 64)[y] + rng.normal(size=(len(y), 64))).round(2)
        rows = zip(x.tolist(), y.tolist(), strict=True)
        clients.append([json.dumps({"x": a, "y": b}).encode() for a, b in rows])
    (folder / "task.py").write_text(TASK)
    save_source(Memory("digits", clients), folder / "clients")


def runs_in(prepared: Prepared, updates: int) -> list[Run]:
    return [
        run_of(prepared, None, {}, seed=seed, updates=updates, hours=100.0, evaluations=1)
        for seed in (1, 2)
    ]


def learnt(folder: Path, run: Run, workload: Workload | None = None) -> float:
    """Learn along the recording in this process; the final loss."""
    recording = Recording(folder, run.recording_plan)
    if workload is None:
        prepared = _opened(folder, steps_of(run.data))
        workload = prepared.make(run.recording_plan.seed, 1, None)
    return learn_run(run, recording.trace, fleet_of(recording.report), workload).end.all


@cache
def _opened(folder: Path, steps: Steps) -> Prepared:
    task, clients = str(folder / "task.py"), f"saved:{folder / 'clients'}"
    return prepare(WorkloadSpec(task, clients, steps=steps))


def timed(work: Callable[[list[Run]], list[float]], short: list[Run], long: list[Run]) -> Timed:
    work(short)
    started = time.monotonic()
    losses = work(long)
    return Timed(time.monotonic() - started, losses)


def copies(folder: Path, short: list[Run], long: list[Run]) -> Timed:
    with ExitStack() as stack:
        # One pool each, so that both have imported everything after the short runs.
        pools = [
            stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"))) for _ in range(2)
        ]

        def learn_all(runs: list[Run]) -> list[float]:
            futures = [p.submit(learnt, folder, run) for p, run in zip(pools, runs, strict=True)]
            return [future.result() for future in futures]

        return timed(learn_all, short, long)


def sweep(folder: Path, short: list[Run], long: list[Run], ray: str | None) -> Timed:
    with mapping(2, ray) as mapped:
        make: Make = _opened(folder, "eager").shipped()
        lab = Lab(folder, mapped, make)
        return timed(lambda runs: [r.end.all for r in lab.learn(runs)], short, long)


def training(folder: Path, short: Run, long: Run) -> Timed:
    prepared = _opened(folder, steps_of(short.data))
    with prepared.opened(short.recording_plan.seed, 2) as workload:
        return timed(lambda runs: [learnt(folder, run, workload) for run in runs], [short], [long])


@contextmanager
def ray_nodes() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    nodes: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    yield nodes.address
    nodes.shutdown()


def compare(folder: Path, steps: Steps, updates: int, ray: bool) -> bool:
    """Compare all ways with the copies, with these steps. Whether all results are right."""
    prepared = _opened(folder, steps)
    short, long = runs_in(prepared, 100), runs_in(prepared, updates)
    plans = [run.recording_plan for run in (*short, *long)]
    Lab(folder, in_turn, prepared.shipped()).record(plans)
    first = copies(folder, short, long)
    ways = {}
    if steps == "eager":
        ways["sweep"] = sweep(folder, short, long, None)
    ways["training"] = training(folder, short[0], long[0])
    if ray:
        for path in (folder / "runs").iterdir():
            path.unlink()
        with ray_nodes() as address:
            ways["ray"] = sweep(folder, short, long, address)
    # Once more, so that a machine that gets busier or quieter favours neither.
    again = copies(folder, short, long)
    alone = Timed((first.seconds + again.seconds) / 2, first.losses)
    for way, found in ways.items():
        expected = alone.losses[: len(found.losses)]
        if found.losses != expected:
            print(f"wrong result of {way}: {found.losses}, not {expected}", file=sys.stderr)
            return False
        ratio = round(found.runs_per_s / alone.runs_per_s, 3)
        print(json.dumps({
            "case": way, "steps": steps, "unit": "throughput / throughput of two copies",
            "updates_per_s": round(updates * found.runs_per_s, 1),
            "value": ratio, "target": TARGET, "passed": ratio >= TARGET,
            "load": round(os.getloadavg()[0], 1),
        }), flush=True)  # fmt: skip
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", action="store_true")
    about = (
        f"of a run with eager steps (default: {UPDATES}); {TIMES_COMPILED} times that if compiled"
    )
    parser.add_argument("--updates", type=int, default=UPDATES, help=about)
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        is_right = compare(folder, "eager", options.updates, options.ray)
        # Compiled gradients run on the machine that compiled them, so Ray is left out.
        more = TIMES_COMPILED * options.updates
        is_right = compare(folder, "compiled", more, False) and is_right
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
