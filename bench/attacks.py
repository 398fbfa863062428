"""Claim: honest devices are served while others attack the server, and no device gets two places.

Each case starts `papaya serve`, and most start attackers in a process of their own
(`_attackers.py`), bounded in number and time. The first three attacks need no token.

    pipelining   1 and 4 connections pipeline requests that are answered 404: the median latency of
                 a device is at most 10 times that without, the rate of joins at least a fifth
    silent       1,003 connections of one address send nothing to a TLS listener of a server with
                 `ulimit -n 1024`: 67 of 67 requests for /health are answered, and 5 of 5 updates
                 from another address make a version
    burst        8,000 connections at once, when `max_connections` are open: all are answered 503
                 with Retry-After. From one address above its own limit: reported, no target
    slow         32 devices of one task upload at 1 KB/s: each update of another task is delivered
                 within a minute, and takes at most twice as long as without (median), from the
                 first chunk to `Completed`. A time without the attack that is below the commit
                 interval counts as that interval: it is mostly writing to disk, which varies,
                 and an update whose buffer is not full waits for up to the interval anyway
    greedy       a device with a signed token joins 40 times, and uploads 25 updates to a task with
                 an aggregation goal of 10: it gets one session, and one place in the first buffer

With `--checkout FOLDER`, the servers of another version (a checkout in that folder) are measured in
the same run; the cases are the same, and so are the devices. Settings that have this version's
default are not written, so that the other version uses its own. A run is an error if its attackers
ended early, or did not attack while it was measured. Run as `python bench/attacks.py`, or
with the names of cases; takes about two minutes and prints one JSON line per result.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import slow_uploads
from _devices import CHECK_IN, Device, Encoded
from _servers import PAPAYA, Servers, make_certificate, report, require, running, wait_until
from msgspec import structs

from papaya.config import AsyncFL, ServerConfig, TaskConfig
from papaya.credentials.token_files import read_or_make
from papaya.messages.base import Message
from papaya.messages.participation import (
    Alive,
    Complete,
    Completed,
    Heartbeat,
    Join,
    Joined,
)
from papaya.messages.selection import Accepted
from papaya.server.auth import SignedTokens

SERVER = ServerConfig(heartbeat_s=4.0, min_retry_s=0.1)
MODEL_LENGTH = 1024
UPDATE = Encoded.of(bytes(4 * MODEL_LENGTH), SERVER.chunk_bytes)
TASK = TaskConfig(
    task="bench",
    concurrency=100_000,
    model_length=MODEL_LENGTH,
    regime=AsyncFL(1),
    participation_gap_s=0.0,
)
UPLOADS = count()


class Version(NamedTuple):
    """Which servers are measured, and how `papaya` is started."""

    name: str
    program: tuple[str, ...]


# -- attackers --------------------------------------------------------------------------------


def started(kind: str, address: tuple[str, int], number: int) -> subprocess.Popen[str]:
    program = Path(__file__).with_name("_attackers.py")
    command = [sys.executable, str(program), kind, *map(str, address), str(number)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def attacking(kind: str, address: tuple[str, int], number: int) -> Iterator[Callable[[], str]]:
    """Yields a function that asks the attackers for a line about their progress."""
    with started(kind, address, number) as process:
        asks, answers = process.stdin, process.stdout
        assert asks is not None
        assert answers is not None

        def progress() -> str:
            with suppress(BrokenPipeError):
                asks.write("\n")
                asks.flush()
            line = answers.readline()
            require(bool(line), f"{kind}: the attackers ended before the measurement")
            return line

        try:
            require(answers.readline() == "ready\n", f"{kind}: the attack did not begin")
            yield progress
            require(process.poll() is None, f"{kind}: the attackers ended before the measurement")
        finally:
            with suppress(BrokenPipeError):
                asks.close()
    require(process.returncode == 0, f"{kind}: the attackers ended with {process.returncode}")


def burst(kind: str, address: tuple[str, int], number: int) -> dict[str, float]:
    with started(kind, address, number) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
    require(process.returncode == 0, f"{kind}: the attackers ended with {process.returncode}")
    found: dict[str, float] = json.loads(line)
    opened = found["number"]
    require(
        opened == number,
        f"{kind}: {opened} of {number} connections at once; the hard limit on open files is too"
        " low (hint: ulimit -Hn 20000)",
    )
    return found


# -- pipelining -------------------------------------------------------------------------------

PIPELINING, JOINING = (1, 4), 16
LATENCY_S, JOINS_S = 4.0, 6.0
LATENCY, JOINS = 10.0, 0.2


def pipelining(version: Version) -> None:
    with running(SERVER, apart=False, program=version.program) as servers:
        servers.submit(TASK, np.zeros(MODEL_LENGTH, np.float32))
        joins_per_s(servers)  # warm up
        with joined_device(servers) as ask:
            alone_ms, alone_per_s = latency_ms(ask), joins_per_s(servers)
        require(alone_per_s > 0, "no device joined without an attack")
        for number in PIPELINING:
            with (
                joined_device(servers) as ask,
                attacking("pipeline", servers.devices, number) as progress,
            ):
                began_at, before = time.monotonic(), int(progress())
                found_ms, between = latency_ms(ask), int(progress())
                found_per_s, after = joins_per_s(servers), int(progress())
                took_s = time.monotonic() - began_at
            require(between > before, "the attackers got no answer while latency was measured")
            require(after > between, "the attackers got no answer while joins were measured")
            answers_per_s = (after - before) / took_s
            ratio, share = found_ms / alone_ms, found_per_s / alone_per_s
            more = {"version": version.name, "attackers_answers_per_s": round(answers_per_s)}
            times = {"ms": round(found_ms, 2), "alone_ms": round(alone_ms, 2)}
            case = f"median latency with {number} pipelining connections ÷ without"
            report("attacks", case, ratio, LATENCY, ratio <= LATENCY, **more, **times)
            rates = {"per_s": round(found_per_s, 1), "alone_per_s": round(alone_per_s, 1)}
            case = f"joins/s with {number} pipelining connections ÷ without"
            report("attacks", case, share, JOINS, share >= JOINS, **more, **rates)


@contextmanager
def joined_device(servers: Servers) -> Iterator[Callable[[], Message]]:
    """Sends a heartbeat when it is called. It joined before the attack begins."""
    with closing(Device(servers.devices, servers.token())) as device:
        joined = device.ask(Join(device.check_in().ticket))
        assert isinstance(joined, Joined), joined
        yield partial(device.ask, Heartbeat(joined.ticket))


def latency_ms(ask: Callable[[], Message]) -> float:
    """Of the heartbeats of one device, median."""
    times: list[float] = []
    ends_at = time.monotonic() + LATENCY_S
    while (began_at := time.monotonic()) < ends_at:
        with suppress(TimeoutError):
            require((answer := ask()) == Alive(), f"a heartbeat was answered {answer}")
        times.append(1e3 * (time.monotonic() - began_at))
    return median(times)


def joins_per_s(servers: Servers) -> float:
    ends_at = time.monotonic() + JOINS_S

    def visit(_: int) -> int:
        joined = 0
        with suppress(OSError), closing(Device(servers.devices, servers.token())) as device:
            while time.monotonic() < ends_at:
                accepted = device.ask(CHECK_IN)
                if isinstance(accepted, Accepted):
                    is_joined = isinstance(device.ask(Join(accepted.ticket)), Joined)
                    joined += is_joined and time.monotonic() < ends_at
        return joined

    with ThreadPoolExecutor(JOINING) as threads:
        return sum(threads.map(visit, range(JOINING))) / JOINS_S


# -- silent connections -----------------------------------------------------------------------

OPEN_FILES, SILENT = 1024, 1003
QUESTIONS, QUESTION_S, PAUSE_S = 67, 1.0, 0.1
UPDATES = 5
COMMIT_S = 1.0  # an update may be acknowledged before its version is made


def silent(version: Version) -> None:
    few_files = ("sh", "-c", f'ulimit -n {OPEN_FILES} && exec "$@"', "sh", *version.program)
    with tempfile.TemporaryDirectory(prefix="papaya-bench-tls-") as folder:
        settings = make_certificate(Path(folder))
        with running(SERVER, apart=False, program=few_files, **settings) as servers:
            servers.submit(TASK, np.zeros(MODEL_LENGTH, np.float32))
            with attacking("silent", servers.devices, SILENT):
                answered = sum(is_healthy(servers) for _ in range(QUESTIONS))
                deliver(servers)
            is_made(servers, UPDATES, COMMIT_S)
            made = newest(servers)
        share = answered / QUESTIONS
        more = {"version": version.name, "silent": SILENT, "open_files": OPEN_FILES}
        case = "share of requests for /health that are answered, silent TLS connections"
        report("attacks", case, share, 1.0, share == 1.0, of=QUESTIONS, **more)
        case = "share of updates that make a version, silent TLS connections"
        report("attacks", case, made / UPDATES, 1.0, made == UPDATES, of=UPDATES, **more)


def is_healthy(servers: Servers) -> bool:
    time.sleep(PAUSE_S)  # the questions are spread over the attack
    host, _, port = servers.addresses["server"]["admin"].rpartition(":")
    assert servers.context is not None
    question = http.client.HTTPSConnection(
        host, int(port), timeout=QUESTION_S, context=servers.context
    )
    try:
        question.request("GET", "/health")
        return question.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        question.close()


def deliver(servers: Servers) -> None:
    """Updates of one device after the other, until one cannot be delivered."""
    with suppress(OSError, SystemExit):
        for _ in range(UPDATES):
            with closing(Device(servers.devices, servers.token(), servers.context)) as device:
                device.trip(lambda staleness: UPDATE, f"u{next(UPLOADS)}")


def newest(servers: Servers) -> int:
    """The newest version of the task; each is a blob."""
    rows = json.loads(servers.ask("GET", "/admin/tasks/bench/versions"))
    return max(int(row["version"]) for row in rows)


def is_made(servers: Servers, version: int, within_s: float) -> bool:
    """Whether the task gets this version within this time."""
    ends_at = time.monotonic() + within_s
    while not (made := newest(servers) >= version) and time.monotonic() < ends_at:
        time.sleep(COMMIT_S / 10)
    return made


# -- bursts -----------------------------------------------------------------------------------

AT_ONCE, MOST_OPEN = 8_000, 64


def bursts(version: Version) -> None:
    few: dict[str, Any] = {"max_connections": MOST_OPEN}
    usual: dict[str, Any] = {}
    for kind, where, settings in (
        ("crowd", "above max_connections", few),
        ("neighbours", "of one address above its limit", usual),
    ):
        with running(SERVER, apart=False, program=version.program, **settings) as servers:
            found = burst(kind, servers.devices, AT_ONCE)
        told, closed = (found.get(name, 0) / found["number"] for name in ("told", "closed"))
        require(found["held"] > 0, "no connection was served before the burst")
        target = 1.0 if kind == "crowd" else None
        case = f"share of connections at once, {where}, that get 503 with Retry-After"
        more = {"version": version.name, "closed_without_answer": round(closed, 4)}
        report("attacks", case, told, target, target is None or told >= target, **more, **found)


# -- slow uploads of another task -------------------------------------------------------------

SLOW, SETTLE_S = 32, 10.0
DELIVERIES, DELIVER_S, GIVE_UP_S = 15, 20.0, 60.0
TIMES_AS_LONG = 2.0
OTHER = structs.replace(slow_uploads.TASK, task="other", regime=AsyncFL(1))


def slow(version: Version) -> None:
    length = slow_uploads.MODEL_LENGTH
    update = Encoded.of(np.ones(length, np.float32).tobytes(), slow_uploads.SERVER.chunk_bytes)
    with running(slow_uploads.SERVER, apart=False, program=version.program) as servers:
        servers.submit(slow_uploads.TASK, np.zeros(length, np.float32))
        with slow_uploads.slow_devices(servers, SLOW):
            servers.add_task(OTHER, np.zeros(length, np.float32))
            wait_until(lambda: servers.metric("papaya_task_serving") == 2, "both tasks are served")
            time.sleep(SETTLE_S)
            found = deliveries(servers, update)
        alone = deliveries(servers, update)
    require(alone.delivered == alone.tried, "an update was not delivered without slow devices")
    times_ms = {"ms": round(found.median_ms, 1), "alone_ms": round(alone.median_ms, 1)}
    more = {"version": version.name, **times_ms}
    case = f"share of updates delivered with {SLOW} slow devices of another task"
    share = found.delivered / found.tried
    report("attacks", case, share, 1.0, share == 1.0, of=found.tried, **more)
    least_ms = 1e3 * OTHER.commit_interval_s
    ratio = found.median_ms / max(alone.median_ms, least_ms)
    case = f"time of an update with {SLOW} slow devices of another task ÷ without"
    report("attacks", case, ratio, TIMES_AS_LONG, ratio <= TIMES_AS_LONG, **more)


class Deliveries(NamedTuple):
    """Updates of the other task. One that is given up counts with the time until then."""

    tried: int
    delivered: int
    median_ms: float


def deliveries(servers: Servers, update: Encoded) -> Deliveries:
    times: list[float] = []
    delivered = 0
    while len(times) < DELIVERIES and sum(times) < 1e3 * DELIVER_S:
        with closing(Device(servers.devices, servers.token())) as device:
            granted = slow_uploads.begun(device, excluded=(slow_uploads.TASK.task,))
        began_at, is_delivered = time.monotonic(), False
        while not is_delivered and time.monotonic() < began_at + GIVE_UP_S:
            # A server without room closes in the middle of a chunk, and the device goes on.
            with (
                suppress(OSError, SystemExit),
                closing(Device(servers.devices, servers.token())) as device,
            ):
                slow_uploads.finish(device, granted, update)
                is_delivered = True
        times.append(1e3 * (time.monotonic() - began_at))
        delivered += is_delivered
    return Deliveries(len(times), delivered, median(times))


# -- one greedy device ------------------------------------------------------------------------

SESSIONS, GOAL, TRIES = 40, 10, 25
LATE_S, PATIENCE_S = 10.0, 60.0


def greedy(version: Version) -> None:
    signed: dict[str, Any] = {"device_tokens": "signed"}
    for case, measure in (("sessions", sessions_of_one), ("places in a buffer", places_of_one)):
        with running(SERVER, apart=False, program=version.program, **signed) as servers:
            goal = structs.replace(TASK, concurrency=SESSIONS, regime=AsyncFL(GOAL))
            servers.submit(goal, np.zeros(MODEL_LENGTH, np.float32))
            found = measure(servers)
        case = f"{case} that one device gets"
        report("attacks", case, found, 1.0, found == 1, version=version.name)


def signed_in(servers: Servers, name: str) -> Device:
    key = read_or_make(servers.data, "device.key")
    return Device(servers.devices, SignedTokens(key).make(name, 1.0).reveal())


def sessions_of_one(servers: Servers) -> int:
    with closing(signed_in(servers, "greedy")) as device:
        joined = [device.ask(Join(device.check_in().ticket)) for _ in range(SESSIONS)]
        tickets = [answer.ticket for answer in joined if isinstance(answer, Joined)]
        return sum(device.ask(Heartbeat(ticket)) == Alive() for ticket in tickets)


def places_of_one(servers: Servers) -> int:
    """Of the first buffer. Other devices fill the places that are left, until it makes a version.

    If the version is late, this counts too few places. To tell two places from one, it waits for a
    long time before the upload that has to complete the buffer of a device with one place.
    """
    waits_s = [COMMIT_S] * (GOAL - 2) + [LATE_S, PATIENCE_S]
    with closing(signed_in(servers, "greedy")) as device:
        for _ in range(TRIES):
            upload(device)
    for others, wait_s in enumerate(waits_s):
        if is_made(servers, 1, wait_s):
            return GOAL - others
        with closing(signed_in(servers, f"honest-{others}")) as device:
            require(upload(device) is None, "an update was discarded")
    return 0


def upload(device: Device) -> str | None:
    """Why the update was discarded."""
    granted, name = slow_uploads.begun(device), f"u{next(UPLOADS)}"
    device.upload(granted, UPDATE, name, [0])
    completed = device.ask(Complete(granted.ticket, name))
    assert isinstance(completed, Completed), completed
    return completed.discarded


CASES: dict[str, Callable[[Version], None]] = {
    "pipelining": pipelining,
    "silent": silent,
    "burst": bursts,
    "slow": slow,
    "greedy": greedy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Attack servers, and measure what others notice.")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--checkout", type=Path, help="measure the servers of this checkout too")
    options = parser.parse_args()
    measured = [Version("this", (PAPAYA,))]
    if options.checkout is not None:
        folder = options.checkout.resolve()
        if not (folder / "papaya" / "__init__.py").is_file():
            parser.error(f"no checkout of Papaya: {folder} (it has no papaya/__init__.py)")
        program = ("env", f"PYTHONPATH={folder}", sys.executable, "-P", "-m", "papaya")
        measured.append(Version(str(folder), program))
    for name in options.cases or CASES:
        for version in measured:
            CASES[name](version)


if __name__ == "__main__":
    main()
