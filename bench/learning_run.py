"""Claim: to record an update and learn along it takes the CPU of 200 bare events, in 2 GB.

AsyncFL at C = 1300 and K = 100 on a fleet of 10⁸ devices, with the paper's durability (`step`),
about one heartbeat per participation, as in bench/control_plane.py, and four reports a second of
the aggregator. With the defaults, a heartbeat every 10 s, a report for nearly every update and a
commit for every few, recording takes about half as long again.
Two processes, one after the other, so one core is to spare:

    record   the machines, every message of the protocol, and their trace. Uploads are four numbers
             long: whom the servers select and count, and when, does not depend on their length
    learn    the arithmetic of the model `embedding`: each client trains along the trace, and
             updates of its full length are weighted and summed, version by version

So no byte of a real update passes through the machines: how fast they carry those is measured
by bench/data_plane.py. Memory is each process's peak.

A bare event (`_calibration.py`) is timed before, between and after the two. The target is eight
minutes for a million updates, an earlier target, at 2.4 µs for a bare event, as in
bench/control_plane.py.

Run as `python bench/learning_run.py`, which does a tenth of it in a tenth of the time, or with
`--full`; prints one JSON line per case with value, target and whether it passed. A wrong result
exits with 1; a slow one is only reported.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _calibration import bare_event_s

from papaya.config import AsyncFL, OptimizerConfig, ServerConfig, TaskConfig
from papaya.learning.definition import ClientSGD
from papaya.sim.cluster import ClusterConfig
from papaya.sim.population import PopulationConfig
from papaya.study.replay import Rates, learn
from papaya.study.trace import Trace, record
from papaya.study.workloads.language import EmbeddingWorkload

SEED = 1
FLEET = 10**8
CONCURRENCY, GOAL = 1300, 100
HEARTBEAT_S, REPORT_S = 45.0, 0.25
RECORDED_LENGTH = 4  # numbers in an update, as the machines see it
SAMPLE_S = 20.0  # what a million updates would be sampled at
FULL, TENTH = 1_000_000, 100_000
BARE_EVENTS, MEMORY_MB = 200.0, 2_000.0
RATES = Rates(
    client=ClientSGD(rate=1.0),
    optimizer=OptimizerConfig(kind="fedadam", rate=0.01, beta1=0.0, epsilon=1e-5),
)
POPULATION = PopulationConfig(size=FLEET)


def require(holds: bool, problem: str) -> None:
    if not holds:
        print(f"wrong result: {problem}", file=sys.stderr)
        sys.exit(1)


def do_record(path: Path, updates: int) -> dict[str, Any]:
    """The machines, and what they counted."""
    task = TaskConfig(
        task="bench",
        concurrency=CONCURRENCY,
        model_length=RECORDED_LENGTH,
        regime=AsyncFL(GOAL),
        durability="step",
    )
    server = ServerConfig(heartbeat_s=HEARTBEAT_S, min_report_interval_s=REPORT_S)
    config = ClusterConfig(tasks=(task,), population=POPULATION, server=server)
    trace, report = record(config, SEED, updates=updates, sample_s=SAMPLE_S)
    trace.save(path)
    utilization = report.tasks[0].utilization
    require(utilization >= 0.95, f"{utilization:.3f} of the places were taken")
    require(int(trace.first[-1]) == GOAL * trace.versions, "versions of another size")
    return {
        "update_length": task.model_length,
        "heartbeat_s": config.server.heartbeat_s,
        "min_report_interval_s": config.server.min_report_interval_s,
        "durability": task.durability,
        "updates": len(trace.clients),
        "versions": trace.versions,
        "devices": len(np.unique(trace.clients.device)),
        "utilization": round(utilization, 4),
        "simulated_hours": round(float(trace.created_s[-1]) / 3600, 2),
    }


def do_learn(path: Path, updates: int) -> dict[str, Any]:
    """The model along what was counted."""
    trace = Trace.load(path)
    workload = EmbeddingWorkload(POPULATION)
    curve = learn(trace, workload, RATES)
    first, last = curve.points[0], curve.points[-1]
    require(curve.diverged is None, str(curve.diverged))
    require(last.updates == len(trace.clients) >= updates, f"learnt of {last.updates} updates")
    require(
        last.quality.all < 0.8 * first.quality.all,
        f"loss {first.quality.all:.3f} became {last.quality.all:.3f}",
    )
    return {
        "update_length": workload.length,
        "updates": last.updates,
        "first_loss": round(first.quality.all, 4),
        "last_loss": round(last.quality.all, 4),
        "evaluations": len(curve.points),
    }


STEPS = {"record": do_record, "learn": do_learn}


def child(step: str, path: Path, updates: int) -> None:
    start_s = time.perf_counter()
    found = STEPS[step](path, updates)
    used = resource.getrusage(resource.RUSAGE_SELF)
    found |= {
        "wall_s": round(time.perf_counter() - start_s, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb": round(used.ru_maxrss * 1024 / 1e6),
    }
    print(json.dumps(found))


def in_process(step: str, path: Path, updates: int) -> dict[str, Any]:
    """Start to end, importing and compiling included."""
    start_s = time.perf_counter()
    command = [
        sys.executable,
        __file__,
        "--step",
        step,
        "--path",
        str(path),
        "--updates",
        str(updates),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    require(done.returncode == 0, f"{step} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    found["wall_s"] = round(time.perf_counter() - start_s, 1)
    report(step, found["wall_s"], None, **found)
    return found


def report(case: str, value: float, target: float | None, **more: Any) -> None:
    line: dict[str, Any] = {"bench": "learning_run", "case": case, "value": value}
    if target is not None:
        line |= {"target": target, "passed": value <= target}
    print(json.dumps(line | more), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--full", action="store_true", help="a million updates")
    parser.add_argument("--updates", type=int, help="another number of updates")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    updates = asked.updates or (FULL if asked.full else TENTH)
    if asked.step is not None:
        child(asked.step, asked.path, updates)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        bare_s, steps = [bare_event_s()], {}
        for step in STEPS:
            steps[step] = in_process(step, path, updates)
            bare_s.append(bare_event_s())
    wall_s = round(sum(found["wall_s"] for found in steps.values()), 1)
    cpu_s = round(sum(found["cpu_s"] for found in steps.values()), 1)
    lengths = {f"{step}_update_length": found["update_length"] for step, found in steps.items()}
    event_s = statistics.median(bare_s)
    ratio = round(cpu_s / updates / event_s, 1)
    more = {"updates": updates, "wall_s": wall_s, "cpu_s": cpu_s, **lengths}
    say = "whole run, CPU per update ÷ a bare event"
    report(say, ratio, BARE_EVENTS, bare_event_us=round(event_s * 1e6, 2), **more)
    report("peak memory of a process, MB", max(f["peak_mb"] for f in steps.values()), MEMORY_MB)


if __name__ == "__main__":
    main()
