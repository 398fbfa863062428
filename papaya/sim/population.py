"""The device population: up to ten billion phones, none of which is stored.

Paper, "Evaluation": "a population of nearly 100 million Android phones", in which "the slowest
clients often have more training examples": here execution time is data volume times noise.
`DEFAULT` and `STRESS` are fitted to the paper's figures; they are not measurements of phones.

Everything about a device is a pure function of (seed, device index, counter): output number
`counter` of a splitmix64 generator whose state is hashed from the seed, the quantity and the
device. So it can be drawn in any order, in any block, in any process, the same bit for bit on
every machine (`draws.py`), and nothing grows with `size`.

It refuses to keep state per device (participation history belongs to the device), to know a
clock, and to use any generator that has to be advanced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from papaya.errors import ConfigError
from papaya.sim.device_traces import TraceFile, availabilities, capacities, entry_of
from papaya.sim.draws import (
    Floats,
    HashWords,
    Indices,
    Ints,
    counters,
    exp,
    normals,
    splitmix64,
    splitmix64_words,
    uniforms,
)

Bools: TypeAlias = npt.NDArray[np.bool_]
_Device = TypeVar("_Device", int, HashWords)

SLOT_S: Final = 3600.0
SLOTS_PER_DAY: Final = 24
_ROUNDING_S: Final = 1e-3
BLOCK: Final = 4096  # 32 KiB per column: the working set of a draw stays in the L2 cache

# One generator per quantity. The numbers are part of every seed's meaning: never reuse one.
_VOLUME, _SLOWNESS, _LATENCY, _DROPS, _DROP_POINT, _SLOT_PHASE, _SLOT, _ARRIVAL, _TRACED = range(
    1, 10
)


class _Limit(NamedTuple):
    """The legal values of a field: from `low` to `high`, except one of these bounds."""

    low: float
    high: float
    excluded: float | None = None
    whole: bool = False

    def admits(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return self.low <= value <= self.high and value != self.excluded  # so NaN is out

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        exception = "" if self.excluded is None else f", but not {self.excluded}"
        return f"{kind} from {self.low} to {self.high}{exception}"


_SEED: Final = _Limit(0, 2**64 - 1, whole=True)
_VOLUME_LIMIT: Final = _Limit(1, 10**9, whole=True)
_SIGMA: Final = _Limit(0, 10)  # e^(10 * 6.4) is still far from overflow
_LIMITS: Final = {
    "size": _Limit(1, 10**10, whole=True),
    "examples_median": _Limit(1, 10**9),
    "examples_sigma": _SIGMA,
    "examples_cap": _Limit(1, 10**9, whole=True),
    "execution_per_example_s": _Limit(0, 10**6, excluded=0),
    "execution_sigma": _SIGMA,
    "correlation": _Limit(-1, 1),
    "latency_mean_s": _Limit(0, 10**6),
    "latency_sigma": _SIGMA,
    "dropout": _Limit(0, 1, excluded=1),
    "availability": _Limit(0, 1, excluded=0),
    "availability_swing": _Limit(0, 1, excluded=1),
    "transfer_kbit": _Limit(0, 10**9),
}
_NOT_NUMBERS: Final = ("volumes", "capacity_trace", "availability_trace")


class PopulationConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the devices are like, with z and z' standard normal, drawn once per device.

    examples    = examples_median * exp(examples_sigma * z), between 1 and examples_cap
    execution_s = execution_per_example_s * examples * exp(execution_sigma * z')
    latency_s   : log-normal with the mean latency_mean_s, drawn for every participation

    `correlation` is that of z and z': at 0 slow devices have more data only because data takes
    time, above 0 the devices with much data are also slower per example. `availability` is the
    share of time in which a device is eligible (idle, charging, unmetered); it swings over the
    day as 1 + availability_swing * cos(2 pi now / 24 h): time 0 is the middle of the night.

    `volumes`, if given, are the examples of the clients of a data source. Device i has those of
    client i modulo their number, z is its client's place among them, and nothing is drawn for it.

    Traces, if given, are measured devices (device_traces.py); each device has a random entry.
    With `capacity_trace`, `execution_per_example_s` is the time of the median entry, the entry
    replaces exp(execution_sigma * z'), and downloading and uploading `transfer_kbit`, unless that
    is 0, takes the place of latency_s. With `availability_trace`, a device comes only while its
    entry is available, and is gone when that ends; `availability` is its mean.
    """

    size: int = 100_000_000
    examples_median: float = 20.0
    examples_sigma: float = 1.2
    examples_cap: int = 1500
    execution_per_example_s: float = 0.55
    execution_sigma: float = 0.5
    correlation: float = 0.0
    latency_mean_s: float = 50.0
    latency_sigma: float = 0.5
    dropout: float = 0.10
    availability: float = 0.5
    availability_swing: float = 0.0
    volumes: tuple[int, ...] = ()
    transfer_kbit: float = 0.0
    capacity_trace: TraceFile | None = None
    availability_trace: TraceFile | None = None

    def __post_init__(self) -> None:
        for field in structs.fields(self):
            if field.name in _NOT_NUMBERS:
                continue
            value, limit = getattr(self, field.name), _LIMITS[field.name]
            if not limit.admits(value):
                remedy = f"set {field.name} to {limit}, for example {field.default}"
                raise ConfigError.of(field.name, value, f"must be {limit}", remedy)
        for volume in self.volumes:
            if not _VOLUME_LIMIT.admits(volume):
                remedy = "leave out clients without examples"
                raise ConfigError.of("one of volumes", volume, f"must be {_VOLUME_LIMIT}", remedy)
        if self.examples_median > self.examples_cap:
            problem = f"is above examples_cap = {self.examples_cap}"
            remedy = f"raise examples_cap to at least {math.ceil(self.examples_median)}"
            raise ConfigError.of("examples_median", self.examples_median, problem, remedy)
        mean, swing = self.availability, self.availability_swing
        if mean * (1 + swing) > 1:
            problem = f"with availability = {mean} more than all devices would be eligible at night"
            remedy = f"set availability_swing to at most {1 / mean - 1:.4g}, or lower availability"
            raise ConfigError.of("availability_swing", swing, problem, remedy)


DEFAULT: Final = PopulationConfig()
STRESS: Final = PopulationConfig(examples_sigma=1.1, execution_per_example_s=0.26, latency_mean_s=0)


def with_traces(
    config: PopulationConfig,
    capacity: TraceFile | None = None,
    availability: TraceFile | None = None,
) -> PopulationConfig:
    """The population with measured devices, as fast and as available as these are."""
    if capacity is not None:
        median_s = float(f"{np.median(capacities(capacity).example_s):.6g}")
        config = structs.replace(config, capacity_trace=capacity, execution_per_example_s=median_s)
    if availability is not None:
        mean = float(f"{availabilities(availability).mean:.6g}")
        config = structs.replace(
            config, availability_trace=availability, availability=mean, availability_swing=0.0
        )
    return config


class Visit(NamedTuple):
    """One device coming by, and how its participation would go."""

    device: int
    participation: int
    examples: int
    execution_s: float
    latency_s: float
    drops_at: float | None  # fraction of the session after which it is gone; None: it stays


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Visits as columns (`drops_at` NaN: it stays); iterating gives each with plain values."""

    device: Ints
    participation: Ints
    examples: Ints
    execution_s: Floats
    latency_s: Floats
    drops_at: Floats

    def __iter__(self) -> Iterator[Visit]:
        columns = (self.device, self.participation, self.examples, self.execution_s, self.latency_s)
        drops_at = [None if math.isnan(point) else point for point in self.drops_at.tolist()]
        rows = zip(*(column.tolist() for column in columns), drops_at, strict=True)
        return map(Visit._make, rows)


class Population:
    """Attributes of any device of the fleet, by index.

    Methods take arrays of device indices, and of participation counters of the same shape.
    `visit` and `is_available` on one index give the same bits.
    """

    def __init__(self, config: PopulationConfig, seed: int) -> None:
        if not _SEED.admits(seed):
            raise ConfigError.of("seed", seed, f"must be {_SEED}", f"set seed to {_SEED}")
        self.config = config
        self.seed = seed
        self._given = _Given(config.volumes) if config.volumes else None
        file = config.capacity_trace
        self._capacities = None if file is None else capacities(file)
        file = config.availability_trace
        self._availabilities = None if file is None else availabilities(file)
        root = splitmix64(seed, 0)
        self._state = [splitmix64(root, quantity) for quantity in range(_TRACED + 1)]
        # Of 2^32 coins, how many find a device eligible in each slot of the day. Whole numbers:
        # the last bit of a cosine depends on the machine.
        day = [math.cos(2 * math.pi * slot / SLOTS_PER_DAY) for slot in range(SLOTS_PER_DAY)]
        share = [config.availability * (1 + config.availability_swing * height) for height in day]
        self._eligible_below = [round(mean * 2**32) for mean in share]
        self._eligible_below_array = np.array(self._eligible_below, dtype=np.uint64)

    def examples(self, indices: Indices) -> Ints:
        return self._device(indices)[0]

    def execution_s(self, indices: Indices) -> Floats:
        return self._device(indices)[1]

    def latency_s(self, indices: Indices, participations: Indices) -> Floats:
        if self._capacities is not None and self.config.transfer_kbit:
            return self.config.transfer_kbit / self._traced(indices, self._capacities.kbit_s)
        # exp(sigma z) has the mean exp(sigma^2 / 2); what is configured is the mean.
        sigma = self.config.latency_sigma
        z = normals(self._words(_LATENCY, indices, participations))
        return self.config.latency_mean_s * exp(sigma * z - sigma * sigma / 2)

    def drops(self, indices: Indices, participations: Indices) -> Bools:
        return uniforms(self._words(_DROPS, indices, participations)) < self.config.dropout

    def drop_point(self, indices: Indices, participations: Indices) -> Floats:
        """Where in its session a device that drops is gone: uniform in the open (0, 1)."""
        return uniforms(self._words(_DROP_POINT, indices, participations))

    @overload
    def is_available(self, indices: int, now: float) -> bool: ...
    @overload
    def is_available(self, indices: Indices, now: float | Floats) -> Bools: ...
    def is_available(self, indices: int | Indices, now: float | Floats) -> bool | Bools:
        """Is the device eligible at `now`? Constant within a slot of SLOT_S seconds.

        Each device has its own phase, or the whole fleet would change its mind on the hour.
        """
        if isinstance(indices, int):
            return self._is_available(indices, float(now))
        if self._availabilities is not None:
            times = np.broadcast_to(now, indices.shape).tolist()
            pairs = zip(indices.tolist(), times, strict=True)
            return np.array([self._is_available(*pair) for pair in pairs], np.bool_)
        return self._slots(indices, now)[0]

    def slots_of(self, indices: Indices, now: float) -> tuple[Bools, Floats]:
        """`is_available`, and the time until which the answer stays: shortly before a slot ends."""
        if self._availabilities is not None:
            return self.is_available(indices, now), np.full(indices.shape, now)
        return self._slots(indices, now)

    def _slots(self, indices: Indices, now: float | Floats) -> tuple[Bools, Floats]:
        phase = (self._words(_SLOT_PHASE, indices) >> np.uint64(40)) * 2.0**-24
        slots = np.floor(now / SLOT_S + phase).astype(np.int64)
        coins = splitmix64_words(self._words(_SLOT, indices), slots.view(np.uint64)) >> np.uint64(
            32
        )
        is_available = coins < self._eligible_below_array[slots % SLOTS_PER_DAY]
        return is_available, (slots + 1 - phase) * SLOT_S - _ROUNDING_S

    def _is_available(self, device: int, now: float) -> bool:
        self._refuse_stranger(device)
        if self._availabilities is not None:
            return self.remaining_s(device, now) > 0
        phase = (splitmix64(self._state[_SLOT_PHASE], device) >> 40) * 2.0**-24
        slot = math.floor(now / SLOT_S + phase)
        coin = splitmix64(splitmix64(self._state[_SLOT], device), slot) >> 32
        return coin < self._eligible_below[slot % SLOTS_PER_DAY]

    def remaining_s(self, device: int, now: float) -> float:
        """For how long an available device stays so, if a trace says it; otherwise for ever."""
        if self._availabilities is None:
            return math.inf
        entry = splitmix64(self._state[_TRACED], device) % len(self._availabilities)
        return self._availabilities.remaining_s(entry, now)

    def visit(self, device: int, participation: int) -> Visit:
        """One participation of one device: 0.4 ms, in which `Arrivals` draws two thousand."""
        return next(iter(self._block(np.array([device]), np.array([participation]))))

    def visitors(self, arrivals: Indices) -> Block:
        """The devices that come by as number `arrivals`, uniform over the fleet, independent."""
        words = splitmix64_words(np.uint64(self._state[_ARRIVAL]), counters(arrivals))
        # The remainder favours low indices by size / 2^64 at most: less than one in a billion.
        return self._block(words % np.uint64(self.config.size), arrivals)

    def _block(self, devices: Indices, participations: Indices) -> Block:
        examples, execution_s = self._device(devices)
        drops = self.drops(devices, participations)
        return Block(
            device=devices.astype(np.int64),
            participation=participations.astype(np.int64),
            examples=examples,
            execution_s=execution_s,
            latency_s=self.latency_s(devices, participations),
            drops_at=np.where(drops, self.drop_point(devices, participations), np.nan),
        )

    def _device(self, indices: Indices) -> tuple[Ints, Floats]:
        """(examples, execution_s)"""
        config, rho = self.config, self.config.correlation
        volume, examples = self._volume(indices)
        if self._capacities is not None:
            example_s = self._traced(indices, self._capacities.example_s)
            relative = example_s / np.median(self._capacities.example_s)
            return examples.astype(np.int64), config.execution_per_example_s * examples * relative
        own = normals(self._words(_SLOWNESS, indices))
        slowness = rho * volume + math.sqrt(1 - rho * rho) * own
        noise = exp(config.execution_sigma * slowness)
        return examples.astype(np.int64), config.execution_per_example_s * examples * noise

    def _traced(self, indices: Indices, values: Floats) -> Floats:
        """The values of the devices' entries in a trace."""
        return values[entry_of(self._words(_TRACED, indices), len(values))]

    def _volume(self, indices: Indices) -> tuple[Floats, Floats]:
        """(z, examples)"""
        if self._given is not None:
            return self._given.of(counters(indices))
        z = normals(self._words(_VOLUME, indices))
        return z, _volumes(self.config, z)

    def _words(self, quantity: int, indices: Indices, times: Indices | None = None) -> HashWords:
        devices = counters(indices)
        if devices.size:
            self._refuse_stranger(int(devices.max()))
        words = splitmix64_words(np.uint64(self._state[quantity]), devices)
        return words if times is None else splitmix64_words(words, counters(times))

    def _refuse_stranger(self, device: int) -> None:
        if not 0 <= device < self.config.size:
            raise IndexError(f"device {device} is not one of {self.config.size}, counted from 0")


def volume_quantiles(config: PopulationConfig, points: int) -> Ints:
    """The examples of devices at the middles of so many equal shares of the fleet, ascending."""
    if config.volumes:
        places = (np.arange(points) + 0.5) * (len(config.volumes) / points)
        return np.sort(np.array(config.volumes, np.int64))[places.astype(np.int64)]
    middles = (np.arange(points) + 0.5) * (2.0**64 / points)
    return _volumes(config, normals(middles.astype(np.uint64))).astype(np.int64)


def _volumes(config: PopulationConfig, z: Floats) -> Floats:
    wished = config.examples_median * exp(config.examples_sigma * z)
    return np.clip(np.rint(wished), 1, config.examples_cap)


def client_of(device: _Device, clients: int) -> _Device:
    """Whose data a device holds: a source has fewer clients than a population has devices."""
    return device % clients


class _Given:
    """Volumes that a data source gives, and the normal scores of their ranks; equals share one."""

    def __init__(self, volumes: tuple[int, ...]) -> None:
        self._examples = np.array(volumes, np.float64)
        ordered = np.sort(self._examples)
        ranks = [np.searchsorted(ordered, self._examples, side) for side in ("left", "right")]
        middles = (ranks[0] + ranks[1]) * (2.0**63 / len(volumes))
        self._z = normals(middles.astype(np.uint64))

    def of(self, devices: HashWords) -> tuple[Floats, Floats]:
        clients = client_of(devices, len(self._examples))
        return self._z[clients], self._examples[clients]


class Arrivals:
    """Who comes by next: an endless iterator of `Visit`; `position` is the next arrival counter.

    A device may come again: refusing it is the business of its own participation history. Being
    eligible at the time is `Population.is_available`, alike for all devices, hence no bias.
    """

    def __init__(self, population: Population, position: int = 0) -> None:
        self.population = population
        self.position = position
        self._ready: list[Visit] = []  # visits from `position` on, the next one last
        # Of the visits of the current block, in the order of `_ready`: whether their devices are
        # available, and until when that is known.
        self._available: list[bool] = []
        self._known_until_s: list[float] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Visit:
        if not self._ready:
            self._ready = list(self._block_at(self.position, BLOCK))[::-1]
            self._known_until_s = []
        self.position += 1
        return self._ready.pop()

    def is_available(self, visit: Visit, now: float) -> bool:
        """`Population.is_available` of the last visit, looked up for a block at a time."""
        if not self._known_until_s:
            devices = np.array([each.device for each in (*self._ready, visit)])
            available, until_s = self.population.slots_of(devices, now)
            self._available, self._known_until_s = available.tolist(), until_s.tolist()
        place = len(self._ready)
        if now < self._known_until_s[place]:
            return self._available[place]
        return self.population.is_available(visit.device, now)

    def draw(self, n: int) -> Block:
        """The next n visits in one block."""
        block = self._block_at(self.position, n)
        self.position += n
        self._ready = []  # now behind `position`
        return block

    def _block_at(self, position: int, n: int) -> Block:
        return self.population.visitors(np.arange(position, position + n))
