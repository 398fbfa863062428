"""How large a reproduction is. `quick`: all of it in about ten minutes; `full`: the paper's size.

Everything here is an input. Learning rates and targets of `quick` are larger because its runs are
shorter; concurrencies and goals are the paper's in both.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct


class Scale(Struct, frozen=True, kw_only=True):
    """The paper's `concurrency` and `goal`, unless a figure varies them.

    most_clients       the paper's largest comparison of update frequencies
    large_goal         its K without the advantage of small K; clients of a plain SyncFL round
    tuning_seeds       other seeds than those reported, on which rates are chosen
    rounds, versions   how far SyncFL, and AsyncFL at the largest concurrency, are recorded
    common_rate        the one server rate of the first protocol
    sync_grid, async_grid   server rates that are tried, neighbours at most a factor 1.5 apart
    target             perplexity for all clients whose time is measured, with the common rate
    tuned_target       the same for tuned rates: lower, or it would be met within a few rounds
    table_updates      counted updates after which Table 1 is taken
    window_hours       of runs in which nothing is learnt, after the start
    fixed_hour         at which the losses of the training curves are compared
    curve_seeds        how many seeds have training curves: those are of an LSTM, and slow
    """

    name: str
    concurrency: int = 1300
    most_clients: int = 2300
    goal: int = 100
    large_goal: int = 1000
    seeds: int
    tuning_seeds: int
    concurrencies: tuple[int, ...]
    goals: tuple[int, ...]
    rounds: int
    versions: int
    table_updates: int
    window_hours: float
    fixed_hour: float
    curve_seeds: int
    common_rate: float
    target: float
    tuned_target: float
    sync_grid: tuple[float, ...]
    async_grid: tuple[float, ...]

    def table_versions(self, goal: int) -> int:
        """How many versions hold the updates of Table 1."""
        return math.ceil(self.table_updates / goal)


def _grid(low: float, count: int, step: float = 1.5) -> tuple[float, ...]:
    return tuple(low * step**index for index in range(count))


QUICK: Final = Scale(
    name="quick",
    seeds=2,
    tuning_seeds=1,
    concurrencies=(130, 650, 1300, 2600),
    goals=(100, 1000, 1300),
    rounds=40,
    versions=300,
    table_updates=40_000,
    window_hours=0.25,
    fixed_hour=0.5,
    curve_seeds=1,
    common_rate=0.008,
    target=47.0,
    tuned_target=30.0,
    sync_grid=_grid(0.0133, 9),
    async_grid=_grid(0.002, 10),
)

FULL: Final = Scale(
    name="full",
    seeds=5,
    tuning_seeds=1,
    concurrencies=(130, 260, 520, 1300, 2600),
    goals=(100, 200, 400, 700, 1000, 1300),
    rounds=600,
    versions=3_000,
    table_updates=1_000_000,
    window_hours=2.0,
    fixed_hour=10.0,
    curve_seeds=5,
    common_rate=0.001,  # Adam's default
    target=40.0,
    tuned_target=25.0,
    sync_grid=_grid(0.005, 11),
    async_grid=_grid(0.0007, 12),
)

SCALES: Final = {scale.name: scale for scale in (QUICK, FULL)}
OVER_SELECTION: Final = 0.3
