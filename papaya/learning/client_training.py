"""What every engine does around its steps: which examples, in which batches, and the update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from papaya.errors import Diverged, OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import Vector, is_finite
from papaya.learning.weighting import clipped, model_update

_LOWER = "lower client.rate, or scale the loss"


def used_examples(examples: Sequence[bytes], client: ClientSGD) -> Sequence[bytes]:
    """The first `max_examples`: which those are is decided by the example query."""
    if not examples:
        raise OperatorError("there are no examples", hint="fill the example store")
    return examples[: client.max_examples]


def training_batches(
    examples: Sequence[bytes], client: ClientSGD, seed: int
) -> Iterator[list[bytes]]:
    """The batches of all epochs, in an order drawn from the seed."""
    rng = np.random.default_rng(seed)
    for _ in range(client.epochs):
        yield from batches(examples, rng.permutation(len(examples)), client.batch_size)


def batches(
    examples: Sequence[bytes], order: npt.NDArray[np.int64], size: int
) -> Iterator[list[bytes]]:
    """The examples in this order, `size` at a time; the last batch may be smaller."""
    for start in range(0, len(order), size):
        yield [examples[i] for i in order[start : start + size].tolist()]


def diverged(what: str) -> Diverged:
    return Diverged(f"training diverged: the {what} is not finite", hint=_LOWER)


def update_bytes(trained: Vector, initial: Vector, clip: float | None) -> bytes:
    """The update as it is uploaded: finite, clipped to the task's clip."""
    delta = model_update(trained, initial)
    if not is_finite(delta):
        raise diverged("model")
    return (delta if clip is None else clipped(delta, clip)).tobytes()
