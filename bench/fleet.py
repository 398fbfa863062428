"""Claim: one machine keeps 1,300 concurrent clients busy, and a free slot finds its next client.

The one-process server, its store on disk, and 1,600 devices in one event loop of another process:
training takes 10 s on average (exponential), the model is 20 kB, one in ten vanishes silently in
the middle. Utilization is the aggregator's own count of active clients, from /metrics, by the
concurrency of 1,300: at least 95 % on average once the fleet is settled; clients that have vanished
count until the server notices, as they do in the paper. A slot is free when a device reads that its
update counts, and taken when the next reads that it has joined. The median is compared with what
the protocol waits for on the way: three reports (aggregator, Coordinator and selector each send at
most one per `min_report_interval_s`) and four requests, at the median time of a request to the
server in the same run; it may take twice that. What the mean must be by Little's law is given
beside it. Counts on both sides are asserted to agree. Run
as `python bench/fleet.py`; takes about 90 s and prints one JSON line per case.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import closing

import numpy as np
import uvloop
from _devices import Device, Encoded
from _fleet_devices import Fleet, Plan
from _servers import Servers, report, require, running

from papaya.config import AsyncFL, ServerConfig, TaskConfig
from papaya.messages.participation import Heartbeat, Refused

CONCURRENCY, GOAL, DEVICES, MODEL_LENGTH = 1300, 100, 1600, 5_000
MEAN_TRAINING_S, DROPOUT, SEED = 10.0, 0.1, 1
ARRIVE_S, SETTLE_S, MEASURE_S, SAMPLE_S = 5.0, 30.0, 30.0, 0.25
UTILIZATION, JOIN_RATIO = 0.95, 2.0
REPORTS, REQUESTS = 3, 4  # between a completion and the next join
SERVER = ServerConfig(heartbeat_s=5.0)
TASK = TaskConfig(
    task="bench",
    concurrency=CONCURRENCY,
    model_length=MODEL_LENGTH,
    regime=AsyncFL(GOAL),
    participation_gap_s=0.0,
)


async def measure(servers: Servers) -> None:
    update = np.ones(MODEL_LENGTH, np.float32).tobytes()
    plan = Plan(
        CONCURRENCY,
        servers.devices,
        servers.token(),
        Encoded.of(update, SERVER.chunk_bytes),
        MEAN_TRAINING_S,
        DROPOUT,
        SERVER.dead_after_s,
    )
    fleet = Fleet(plan, SEED)
    lives = [asyncio.create_task(fleet.live(n, ARRIVE_S)) for n in range(DEVICES)]
    watching = asyncio.create_task(watch(servers))
    done, _ = await asyncio.wait([watching, *lives], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()  # a device that failed has failed the benchmark
    since, until, samples, requests_s, used_s = watching.result()
    for task in lives:
        task.cancel()
    await asyncio.gather(*lives, return_exceptions=True)
    tell(fleet, since, until, samples, statistics.median(requests_s), used_s)


async def watch(
    servers: Servers,
) -> tuple[float, float, list[tuple[float, float]], list[float], float]:
    """Active clients at the aggregator, and seconds per request, over the time that counts."""
    await asyncio.sleep(SERVER.recovery_s + ARRIVE_S + SETTLE_S)
    before_s, since = sum(servers.cpu_s().values()), time.monotonic()
    samples: list[tuple[float, float]] = []
    requests_s: list[float] = []
    while time.monotonic() < since + MEASURE_S:
        active = await asyncio.to_thread(servers.metric, "papaya_task_active_clients")
        samples.append((time.monotonic(), active))
        requests_s.append(await asyncio.to_thread(request_s, servers))
        await asyncio.sleep(SAMPLE_S)
    until = time.monotonic()
    return since, until, samples, requests_s, sum(servers.cpu_s().values()) - before_s


def request_s(servers: Servers) -> float:
    """How long the device listener takes to answer a request that it refuses."""
    with closing(Device(servers.devices, servers.token())) as device:
        began_at = time.monotonic()
        device.send(Heartbeat(b"no ticket"))
        require(isinstance(device.answer(), Refused), "a heartbeat without a ticket was accepted")
        return time.monotonic() - began_at


def tell(
    fleet: Fleet,
    since: float,
    until: float,
    samples: list[tuple[float, float]],
    request_s: float,
    used_s: float,
) -> None:
    log = fleet.log
    at, active = samples[-1]
    known = log.active(at)
    # Those whose join or completion is on its way between the two are counted by one of them.
    require(
        abs(known - active) <= CONCURRENCY // 20, f"{known} clients, and {active} at the server"
    )
    require(not log.aborted, f"sessions were aborted: {log.aborted[:5]}")
    taken = statistics.fmean(active for _, active in samples)
    joins_per_s = log.joined_between(since, until) / (until - since)
    utilization = taken / CONCURRENCY
    case = f"utilization, C = {CONCURRENCY}, {DROPOUT:.0%} dropout"
    more = {
        "lowest": round(min(active for _, active in samples) / CONCURRENCY, 4),
        "joins_per_s": round(joins_per_s, 1),
        "server_cpu": round(used_s / (until - since), 3),
    }
    report("fleet", case, utilization, UTILIZATION, utilization >= UTILIZATION, **more)
    waits_ms = [1e3 * wait for wait in log.waits_s(since, until - 1.0)]
    require(len(waits_ms) > CONCURRENCY, f"only {len(waits_ms)} completions")
    median = statistics.median(waits_ms)
    deciles = statistics.quantiles(waits_ms, n=10)
    bare_ms = 1e3 * (REPORTS * SERVER.min_report_interval_s + REQUESTS * request_s)
    more = {
        "median_ms": round(median, 1),
        "bare_ms": round(bare_ms, 1),
        "mean_ms": round(statistics.fmean(waits_ms), 1),
        "p90_ms": round(deciles[8], 1),
        "mean_by_littles_law_ms": round(1e3 * (CONCURRENCY - taken) / joins_per_s, 1),
        "completions": len(waits_ms),
    }
    report(
        "fleet",
        "median time from completion to the next join ÷ three reports and four requests",
        median / bare_ms,
        JOIN_RATIO,
        median <= JOIN_RATIO * bare_ms,
        **more,
    )


def main() -> None:
    # All devices are on this machine and have the same address.
    with running(SERVER, apart=False, max_connections_per_address=DEVICES) as servers:
        servers.submit(TASK, np.zeros(MODEL_LENGTH, np.float32))
        uvloop.run(measure(servers))


if __name__ == "__main__":
    main()
