"""The device population: up to ten billion phones, none of which is stored.

Paper, "Evaluation": "a population of nearly 100 million Android phones", in which "the slowest
clients often have more training examples": here execution time is data volume times noise.
`DEFAULT` and `STRESS` are fitted to the paper's figures; they are not measurements of phones.

Everything about a device is a pure function of (seed, device index, counter): output number
`counter` of a splitmix64 generator whose state is hashed from the seed, the quantity and the
device. So it can be drawn in any order, in any block, in any process, and nothing grows with
`size`.

The draws are the same bit for bit on every machine: normals and exponentials are built from
integer arithmetic and from +, -, *, /, sqrt, rint, frexp and ldexp on float64, which IEEE 754
rounds in one way only. `np.exp`, `np.log` and `np.cos` are not used on draws: their last bit
depends on the CPU. Normals carry 32 bits (|z| < 6.4), uniforms 52.

It refuses to keep state per device (participation history belongs to the device), to know a
clock, and to use any generator that has to be advanced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from papaya.errors import ConfigError

Words: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Indices: TypeAlias = npt.NDArray[np.integer[Any]]

SLOT_S: Final = 3600.0
SLOTS_PER_DAY: Final = 24
BLOCK: Final = 4096  # 32 KiB per column: the working set of a draw stays in the L2 cache

# One generator per quantity. The numbers are part of every seed's meaning: never reuse one.
_VOLUME, _SLOWNESS, _LATENCY, _DROPS, _DROP_POINT, _SLOT_PHASE, _SLOT, _ARRIVAL = range(1, 9)


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
}


class PopulationConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the devices are like, with z and z' standard normal, drawn once per device.

    examples    = examples_median * exp(examples_sigma * z), between 1 and examples_cap
    execution_s = execution_per_example_s * examples * exp(execution_sigma * z')
    latency_s   : log-normal with the mean latency_mean_s, drawn for every participation

    `correlation` is that of z and z': at 0 slow devices have more data only because data takes
    time, above 0 the devices with much data are also slower per example. `availability` is the
    share of time in which a device is eligible (idle, charging, unmetered); it swings over the
    day as 1 + availability_swing * cos(2 pi now / 24 h): time 0 is the middle of the night.
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

    def __post_init__(self) -> None:
        for field in structs.fields(self):
            value, limit = getattr(self, field.name), _LIMITS[field.name]
            if not limit.admits(value):
                remedy = f"set {field.name} to {limit}, for example {field.default}"
                raise ConfigError.of(field.name, value, f"must be {limit}", remedy)
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
        root = splitmix64(seed, 0)
        self._state = [splitmix64(root, quantity) for quantity in range(_ARRIVAL + 1)]
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
        # exp(sigma z) has the mean exp(sigma^2 / 2); what is configured is the mean.
        sigma = self.config.latency_sigma
        z = _normals(self._words(_LATENCY, indices, participations))
        return self.config.latency_mean_s * _exp(sigma * z - sigma * sigma / 2)

    def drops(self, indices: Indices, participations: Indices) -> Bools:
        return _uniforms(self._words(_DROPS, indices, participations)) < self.config.dropout

    def drop_point(self, indices: Indices, participations: Indices) -> Floats:
        """Where in its session a device that drops is gone: uniform in the open (0, 1)."""
        return _uniforms(self._words(_DROP_POINT, indices, participations))

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
        phase = (self._words(_SLOT_PHASE, indices) >> np.uint64(40)) * 2.0**-24
        slots = np.floor(now / SLOT_S + phase).astype(np.int64)
        coins = _splitmix64(self._words(_SLOT, indices), slots.view(np.uint64)) >> np.uint64(32)
        return coins < self._eligible_below_array[slots % SLOTS_PER_DAY]

    def _is_available(self, device: int, now: float) -> bool:
        self._refuse_stranger(device)
        phase = (splitmix64(self._state[_SLOT_PHASE], device) >> 40) * 2.0**-24
        slot = math.floor(now / SLOT_S + phase)
        coin = splitmix64(splitmix64(self._state[_SLOT], device), slot) >> 32
        return coin < self._eligible_below[slot % SLOTS_PER_DAY]

    def visit(self, device: int, participation: int) -> Visit:
        """One participation of one device: 0.4 ms, in which `Arrivals` draws two thousand."""
        return next(iter(self._block(np.array([device]), np.array([participation]))))

    def visitors(self, arrivals: Indices) -> Block:
        """The devices that come by as number `arrivals`, uniform over the fleet, independent."""
        words = _splitmix64(np.uint64(self._state[_ARRIVAL]), _counters(arrivals))
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
        volume = _normals(self._words(_VOLUME, indices))
        wished = config.examples_median * _exp(config.examples_sigma * volume)
        examples = np.clip(np.rint(wished), 1, config.examples_cap)
        own = _normals(self._words(_SLOWNESS, indices))
        slowness = rho * volume + math.sqrt(1 - rho * rho) * own
        noise = _exp(config.execution_sigma * slowness)
        return examples.astype(np.int64), config.execution_per_example_s * examples * noise

    def _words(self, quantity: int, indices: Indices, counters: Indices | None = None) -> Words:
        devices = _counters(indices)
        if devices.size:
            self._refuse_stranger(int(devices.max()))
        words = _splitmix64(np.uint64(self._state[quantity]), devices)
        return words if counters is None else _splitmix64(words, _counters(counters))

    def _refuse_stranger(self, device: int) -> None:
        if not 0 <= device < self.config.size:
            raise IndexError(f"device {device} is not one of {self.config.size}, counted from 0")


class Arrivals:
    """Who comes by next: an endless iterator of `Visit`; `position` is the next arrival counter.

    A device may come again: refusing it is the business of its own participation history. Being
    eligible at the time is `Population.is_available`, alike for all devices, hence no bias.
    """

    def __init__(self, population: Population, position: int = 0) -> None:
        self.population = population
        self.position = position
        self._ready: list[Visit] = []  # visits from `position` on, the next one last

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Visit:
        if not self._ready:
            self._ready = list(self._block_at(self.position, BLOCK))[::-1]
        self.position += 1
        return self._ready.pop()

    def draw(self, n: int) -> Block:
        """The next n visits in one block."""
        block = self._block_at(self.position, n)
        self.position += n
        self._ready = []  # now behind `position`
        return block

    def _block_at(self, position: int, n: int) -> Block:
        return self.population.visitors(np.arange(position, position + n))


_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = 2**64 - 1


def splitmix64(state: int, counter: int) -> int:
    """Output number `counter` of the splitmix64 generator (Steele et al. 2014) at `state`."""
    word = (state + (counter + 1) * _GOLDEN) & _MASK
    word = (word ^ (word >> 30)) * _MIX_1 & _MASK
    word = (word ^ (word >> 27)) * _MIX_2 & _MASK
    return word ^ (word >> 31)


def _splitmix64(state: Words | np.uint64, counters: Words) -> Words:
    """The same for arrays, whose arithmetic is modulo 2^64 already."""
    words = (counters + np.uint64(1)) * np.uint64(_GOLDEN) + state
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_2)
    return words ^ (words >> np.uint64(31))


def _counters(values: Indices) -> Words:
    """Indices or counters as words. -1 must not become device 2^64 - 1."""
    if values.dtype.kind not in "iu" or values.ndim == 0:
        raise TypeError(f"expected an array of integers, not {values!r}")
    if values.size and values.min() < 0:
        raise IndexError(f"{values.min()}: device indices and counters start at 0")
    return values.astype(np.uint64)


def _uniforms(words: Words) -> Floats:
    """The middles of 2^52 equal cells of (0, 1): never 0, never 1."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


# AS 241 (Wichura 1988): quotients of polynomials, highest power first, good to 1e-16. Its third
# region starts where p < 1.4e-11, out of reach of p >= 2^-33.
_CENTRE: Final = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
    (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
     5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0),
)  # fmt: skip
_TAIL: Final = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
     1.27045825245236838258, 3.64784832476320460504, 5.76949722146069140550,
     4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
     1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940,
     2.05319162663775882187, 1.0),
)  # fmt: skip
_LN2: Final = 0.6931471805599453
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-1, 1.90821492927058770002e-10
_EXP: Final = tuple(1 / math.factorial(k) for k in range(14, -1, -1))
_ATANH: Final = tuple(1 / (2 * k + 1) for k in range(11, -1, -1))


def _normals(words: Words) -> Floats:
    """Standard normals by the inverse of the distribution function at 2^32 points."""
    q = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32 - 0.5
    z = q * _quotient(_CENTRE, 0.180625 - q * q)
    far = np.abs(q) > 0.425
    beyond = q[far]
    root = np.sqrt(-_log(0.5 - np.abs(beyond)))
    z[far] = np.copysign(_quotient(_TAIL, root - 1.6), beyond)
    return z


def _exp(x: Floats) -> Floats:
    """e^x = 2^k e^r with |r| <= ln(2)/2."""
    k = np.rint(x / _LN2)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    return np.ldexp(_polynomial(_EXP, r), k.astype(np.int32))


def _log(x: Floats) -> Floats:
    """ln(m 2^k) = 2 atanh((m - 1)/(m + 1)) + k ln(2) for m in [1/2, 1)."""
    mantissa, k = np.frexp(x)
    mantissa *= math.sqrt(2)  # centred on 1, where the series is short
    t: Floats = (mantissa - 1) / (mantissa + 1)
    return 2 * t * _polynomial(_ATANH, t * t) + (k - 0.5) * _LN2


def _quotient(pair: tuple[tuple[float, ...], tuple[float, ...]], x: Floats) -> Floats:
    return _polynomial(pair[0], x) / _polynomial(pair[1], x)


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total
