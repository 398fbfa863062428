"""Rules that combine the updates of a buffer into one step.

    sum       updates are added as they arrive; a rule may shorten each by its own norm
    members   every update is kept until the step, which is computed block by block

`mean` is a `sum`. The rules for buffers with wrong or hostile updates need all `members`: Yin et
al., "Byzantine-Robust Distributed Learning" (trimmed mean, median), and Sun et al., "Can You Really
Backdoor Federated Learning?" (norm bounding; here relative to the buffer's median, a fixed bound is
the task's `clip`).

    x_i = damping(s_i) * update_i                         what a rule gets, with its weight n_i
    median        of x_1 .. x_K, for each coordinate
    trimmed_mean  mean without the floor(trim * K) smallest and largest, for each coordinate
    norm_bound    sum of n_i * min(1, factor * m / |x_i|) * x_i / sum of n_i; m: median of |x_i|

Results do not depend on the order of the members, except for rounding in `norm_bound`. Memory is
bounded by the block, not by K x model. An extension (`extensions.py`) subclasses `SumRule` or
`MembersRule`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from papaya.config import Aggregation, TaskConfig
from papaya.errors import ConfigError, PapayaError
from papaya.learning import extensions
from papaya.learning.parameters import FLOAT32, FLOAT64, Vector
from papaya.learning.weighting import Admitted, Contribution, norm

MemberRows: TypeAlias = npt.NDArray[np.float32]
ReadMember: TypeAlias = Callable[[int, slice], Vector]
"""Some coordinates of a member."""

BLOCK_BYTES: Final = 16 << 20


class SumRule:
    """A weighted mean. A subclass may shorten each update by its norm."""

    def __init__(self, config: Aggregation) -> None:
        self.config = config
        self.parameters = dict(config.parameters)

    def scale(self, length: float) -> float:
        """From 0 to 1: by what to multiply an update with this norm."""
        return 1.0


class MembersRule(ABC):
    """A function of all updates of a buffer. `combine` must be deterministic and finite."""

    def __init__(self, config: Aggregation) -> None:
        self.config = config
        self.parameters = dict(config.parameters)

    @abstractmethod
    def combine(self, members: BufferMembers) -> Vector:
        """The step, in float32."""


class BufferMembers:
    """The damped updates of a buffer and their weights. Rules read them block by block."""

    def __init__(
        self,
        weights: Sequence[float],
        length: int,
        read: ReadMember,
        block_bytes: int = BLOCK_BYTES,
        reading: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`reading` is entered while a block is read."""
        self.weights = np.array(weights, FLOAT64)
        self.length = length
        self._read = read
        self._reading = reading
        self._width = max(1, block_bytes // (4 * max(1, len(weights))))

    @classmethod
    def of_matrix(cls, weights: Sequence[float], updates: MemberRows) -> BufferMembers:
        return cls(weights, updates.shape[1], lambda member, part: updates[member, part])

    def __len__(self) -> int:
        return len(self.weights)

    def blocks(self) -> Iterator[tuple[slice, MemberRows]]:
        """Coordinates, and their values: one row for each member. The next block overwrites it."""
        matrix = np.empty((len(self), min(self._width, self.length)), FLOAT32)
        for start in range(0, self.length, self._width):
            part = slice(start, min(start + self._width, self.length))
            block = matrix[:, : part.stop - start]
            with self._reading():
                for member in range(len(self)):
                    block[member] = self._read(member, part)
            yield part, block

    def norms(self) -> npt.NDArray[np.float64]:
        """The L2 norm of each update."""
        squares = np.zeros(len(self), FLOAT64)
        for _, block in self.blocks():
            squares += np.einsum("ij,ij->i", block, block, dtype=FLOAT64)
        return np.sqrt(squares)

    def each_coordinate(self, combine: Callable[[MemberRows], npt.NDArray[Any]]) -> Vector:
        """`combine` gets the values of a block, sorted for each coordinate: one row for each."""
        found = np.empty(self.length, FLOAT32)
        for part, block in self.blocks():
            ordered = np.ascontiguousarray(block.T)
            ordered.sort(axis=1)
            found[part] = combine(ordered)
        return found


class _Median(MembersRule):
    def combine(self, members: BufferMembers) -> Vector:
        low, high = (len(members) - 1) // 2, len(members) // 2
        return members.each_coordinate(
            lambda ordered: (ordered[:, low].astype(FLOAT64) + ordered[:, high]) / 2
        )


class _TrimmedMean(MembersRule):
    def combine(self, members: BufferMembers) -> Vector:
        trimmed = self.config.trimmed(len(members))
        kept = slice(trimmed, len(members) - trimmed)
        return members.each_coordinate(lambda ordered: ordered[:, kept].mean(axis=1, dtype=FLOAT64))


class _NormBound(MembersRule):
    def combine(self, members: BufferMembers) -> Vector:
        lengths = members.norms()
        bound = self.config.factor * float(np.median(lengths))
        longest = np.maximum(lengths, bound)  # also where both are zero
        scales = np.divide(bound, longest, out=np.ones_like(longest), where=longest > 0)
        factors = members.weights * scales / members.weights.sum()
        found = np.empty(members.length, FLOAT32)
        for part, block in members.blocks():
            found[part] = np.einsum("i,ij->j", factors, block, dtype=FLOAT64)
        return found


_MEMBERS: Final[dict[str, type[MembersRule]]] = {
    "median": _Median,
    "trimmed_mean": _TrimmedMean,
    "norm_bound": _NormBound,
}


def aggregation_rule(config: Aggregation) -> SumRule | MembersRule:
    """The rule of a task's configuration. Raises ConfigError if this process has none."""
    if config.is_mean:
        return SumRule(config)
    if (built_in := _MEMBERS.get(config.kind)) is not None:
        return built_in(config)
    found = extensions.find("aggregation_rules", config.kind)
    try:
        rule = found(config)
        assert isinstance(rule, SumRule | MembersRule), f"{found!r} is no SumRule or MembersRule"
    except Exception as error:
        raise ConfigError(
            f"the aggregation rule {config.kind} cannot be made: {error!r}",
            hint=f"check aggregation.parameters = {dict(config.parameters)}",
        ) from error
    return rule


def takes_members(config: TaskConfig) -> bool:
    """Does the rule of the task need the single updates?"""
    if config.aggregation.is_built_in:
        return not config.aggregation.is_mean
    return isinstance(aggregation_rule(config.aggregation), MembersRule)


def shortened(update: Admitted, config: Aggregation) -> Admitted:
    """An update as the rule adds it to a sum."""
    if config.is_built_in:
        return update
    rule = aggregation_rule(config)
    if not isinstance(rule, SumRule):
        return update
    length = math.sqrt(sum(norm(piece) ** 2 for piece in update.pieces)) * update.scale
    scale = _run(config, lambda: float(rule.scale(length)))
    if not 0 <= scale <= 1:
        raise ConfigError(
            f"the aggregation rule {config.kind} returned the scale {scale}",
            hint="it must return a number from 0 to 1",
        )
    return update._replace(scale=update.scale * scale)


def damped(contribution: Contribution) -> Vector:
    """What a rule gets of one member: the update, clipped and damped."""
    pieces, scale = contribution.update.pieces, contribution.update.scale
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return np.multiply(whole, contribution.damping * scale, dtype=FLOAT32)


def combined(config: Aggregation, members: BufferMembers) -> Vector:
    """The step by a rule that takes members. Raises ConfigError if an extension fails."""
    rule = aggregation_rule(config)
    assert isinstance(rule, MembersRule)
    found = rule.combine(members) if config.is_built_in else _run(config, rule.combine, members)
    is_array = isinstance(found, np.ndarray)
    if not is_array or found.shape != (members.length,) or found.dtype != FLOAT32:
        what = f"{found.shape} {found.dtype}" if is_array else type(found).__name__
        raise ConfigError(
            f"the aggregation rule {config.kind} returned {what}",
            hint=f"it must return {members.length} float32 numbers",
        )
    return found


def _run(config: Aggregation, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (PapayaError, OSError):
        raise  # a blob could not be read
    except Exception as error:
        raise ConfigError(
            f"the aggregation rule {config.kind} failed: {error!r}",
            hint="the operator has to repair the extension of the servers",
        ) from error
