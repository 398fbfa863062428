"""Claim: after a leader is killed, clients join again within four heartbeats.

The processes, tasks and devices of `restarts.py`. Case `leader`: twenty times the leader is killed
with SIGKILL; the time counts until clients have joined every task again. Case `leader and holder`:
the holder of a task is killed in the same moment, and the time until clients join this task again
counts. Processes that were killed are started again afterwards. The targets are 4 heartbeats in the
median and 4.5 at most; with a holder, three more. Run as `python bench/leaders.py`; takes about ten
minutes and prints one JSON line per case.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Sequence
from random import Random
from statistics import median

import uvloop
from _restart_devices import Log, visiting
from _servers import report, require
from restarts import (
    DEVICE,
    DEVICES,
    HEARTBEAT_S,
    MEAN_TRAINING_S,
    PATIENCE_S,
    SEED,
    SERVER,
    TASKS,
    Installation,
    Process,
)

from papaya.messages.storage import LEADER_KEY, FenceRow, LeaderRow, Row, fence_key
from papaya.store.state import SqliteState

MEDIAN_BEATS, MAX_BEATS, HOLDER_BEATS = 4.0, 4.5, 3.0
# By case: how often, and whether the holder of a task is killed too.
CASES = {"leader": (20, False), "leader and holder": (6, True)}
ALL_TASKS = [task.task for task in TASKS]
# The killed processes are back, and the tasks are full again.
SETTLE_S = 4 * HEARTBEAT_S


def row(installation: Installation, key: str) -> Row:
    state = SqliteState(installation.folder / "data" / "state.db")
    try:
        return state.read((key,))[key]
    finally:
        state.close()


def process_of(installation: Installation, node: str) -> Process:
    """A node id ends with the address of its servers listener."""
    [found] = [p for p in installation.processes if node.endswith(p.addresses["servers"])]
    return found


def resumed_at(joined_at: Sequence[float], since: float) -> float | None:
    """When the pause in joins ended that a failure at `since` caused; None if it has not yet.

    Clients that were accepted before the failure still join right after it.
    """
    times = [at for at in joined_at if at > since]
    for before, after in zip([since, *times], times, strict=False):
        if after - before > HEARTBEAT_S:
            return after
    return None


async def pause_beats(log: Log, tasks: Sequence[str], since: float) -> float:
    """Heartbeats until clients have joined all of these tasks again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = [resumed_at(log.joined_at[task], since) for task in tasks]
            if None not in found:
                return (max(at for at in found if at is not None) - since) / HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S / 20)


async def kill(
    installation: Installation, log: Log, number: int, wait_s: float, *, with_holder: bool
) -> float:
    await asyncio.sleep(wait_s)
    leader = row(installation, LEADER_KEY)
    assert isinstance(leader, LeaderRow)
    victims, tasks = [process_of(installation, leader.holder)], ALL_TASKS
    if with_holder:
        tasks = [ALL_TASKS[number % len(ALL_TASKS)]]
        fence = row(installation, fence_key(tasks[0]))
        assert isinstance(fence, FenceRow)
        victims.append(process_of(installation, fence.aggregator))
    killed_at = time.monotonic()
    for victim in victims:
        await asyncio.to_thread(victim.end, signal.SIGKILL)
    beats = await pause_beats(log, tasks, killed_at)
    for victim in victims:
        await asyncio.to_thread(victim.start)
    return beats


async def measure(
    installation: Installation, kills: int, *, with_holder: bool, log: Log
) -> list[float]:
    folder, token = installation.folder / "devices", installation.servers.token()
    urls = [f"http://{selector.addresses['devices']}" for selector in installation.selectors]
    settings = (DEVICES, DEVICE, MEAN_TRAINING_S, log, SEED)
    async with visiting(folder, urls, token, *settings) as devices:
        async with asyncio.timeout(PATIENCE_S):
            while log.endings["counted"] < sum(task.concurrency for task in TASKS):
                await asyncio.sleep(HEARTBEAT_S / 10)
        rng = Random(SEED)
        beats = [
            await kill(
                installation,
                log,
                number,
                SETTLE_S + rng.uniform(0, HEARTBEAT_S),  # at any time between two renewals
                with_holder=with_holder,
            )
            for number in range(kills)
        ]
        await asyncio.sleep(SERVER.dead_after_s)
        await devices.go_home(PATIENCE_S)
    return beats


def main() -> None:
    parser = argparse.ArgumentParser(description="Time how long a killed leader stops joins.")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--kills", type=int, help="instead of the case's own number")
    options = parser.parse_args()
    for name in options.cases or CASES:
        kills, with_holder = CASES[name]
        with Installation() as installation:
            log = Log()
            run = measure(installation, options.kills or kills, with_holder=with_holder, log=log)
            beats = uvloop.run(run)
        require(log.endings["counted"] > 100, f"too little happened: {log.endings}")
        typical, longest = median(beats), max(beats)
        more = HOLDER_BEATS if with_holder else 0.0
        passed = typical <= MEDIAN_BEATS + more and longest <= MAX_BEATS + more
        details = {
            "longest": round(longest, 2),
            "target_longest": MAX_BEATS + more,
            "all": [round(each, 2) for each in beats],
            "endings": dict(log.endings),
        }
        case = f"{name} killed: heartbeats until clients join again, median"
        report("leaders", case, typical, MEDIAN_BEATS + more, passed, **details)


if __name__ == "__main__":
    main()
