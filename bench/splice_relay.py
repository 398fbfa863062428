"""Claim: the splice relay saves 15 % of the servers' CPU per 20 MiB update when roles run apart.

Two sets of servers (coordinator, selector, aggregator) run at the same time: one as users run it,
one with `papaya/http/splice.py` turned off (`_without_splice.py`). The same twenty devices upload
to both in turns, as in `data_plane.py`, because the machine may be shared: whatever disturbs one
disturbs the other. CPU is user and system of all processes of a set. Every update is asserted to
be counted.

The rule, fixed before the run that decides: one run of 20 pairs of turns. Each pair gives the share
of CPU that splicing saves. The relay is kept if the median of the 20 shares is at least 15 %, and
the lower end of the 95 % bootstrap interval of that median (10,000 resamples of the pairs, seed 1)
is at least 12 %. Otherwise it is deleted. There is no second run.

Run as `python bench/splice_relay.py`; prints one JSON line.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
from _devices import Device, Encoded
from _servers import Servers, report, require, running, wait_until
from data_plane import DEVICES, GOAL, MODEL_LENGTH, SERVER, TASK

PAIRS, EACH = 20, 2  # an even number of pairs, and the updates of one device in each turn
SAVED, SAVED_AT_LEAST = 0.15, 0.12
RESAMPLES, SEED = 10_000, 1


def main() -> None:
    without = (sys.executable, str(Path(__file__).with_name("_without_splice.py")))
    pattern = np.arange(MODEL_LENGTH, dtype=np.float32) % 5 + 1
    update = Encoded.of(pattern.tobytes(), SERVER.chunk_bytes)
    with (
        running(SERVER, apart=True) as spliced,
        running(SERVER, apart=True, program=without) as copied,
        ThreadPoolExecutor(DEVICES) as threads,
    ):
        for servers in (spliced, copied):
            servers.submit(TASK, np.zeros(MODEL_LENGTH, np.float32))
            used_s(servers, update, threads, 0)
        splice_s, copy_s, saved = 0.0, 0.0, []
        for pair in range(1, PAIRS + 1):
            # The order changes, so that neither always comes first.
            order = (spliced, copied) if pair % 2 else (copied, spliced)
            used = {servers: used_s(servers, update, threads, pair) for servers in order}
            splice_s += used[spliced]
            copy_s += used[copied]
            saved.append(round(1 - used[spliced] / used[copied], 3))
    updates = PAIRS * DEVICES * EACH
    ms = {"splice_ms": splice_s / updates * 1e3, "copy_ms": copy_s / updates * 1e3}
    shown = {name: round(value, 1) for name, value in ms.items()}
    median, low = float(np.median(saved)), lower_end(saved)
    say = "share of the servers' CPU per 20 MiB update that splicing saves, roles apart, median"
    passed = median >= SAVED and low >= SAVED_AT_LEAST
    shown |= {"lower_end": round(low, 3), "lower_end_target": SAVED_AT_LEAST}
    report("splice_relay", say, median, SAVED, passed, **shown, pairs=sorted(saved))


def lower_end(saved: list[float]) -> float:
    """Of the 95 % bootstrap interval of the median."""
    drawn = np.random.default_rng(SEED).choice(saved, (RESAMPLES, len(saved)))
    return float(np.quantile(np.median(drawn, axis=1), 0.025))


def used_s(servers: Servers, update: Encoded, threads: ThreadPoolExecutor, turn: int) -> float:
    """CPU seconds of all processes while every device uploads `EACH` updates."""
    token, ids = servers.token(), count()

    def trips(_: int) -> None:
        with closing(Device(servers.devices, token)) as device:
            for _ in range(EACH):
                device.trip(lambda _: update, f"u{turn}-{next(ids)}")

    before = sum(servers.cpu_s().values())
    list(threads.map(trips, range(DEVICES)))
    version = (turn + 1) * DEVICES * EACH // GOAL
    wait_until(lambda: servers.metric("papaya_task_version") == version, f"version {version}")
    require(next(ids) == DEVICES * EACH, "not every update was sent")
    return sum(servers.cpu_s().values()) - before


if __name__ == "__main__":
    main()
