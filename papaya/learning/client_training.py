"""What every engine does around its steps: which examples, in which batches, and the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from papaya.errors import Diverged, OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import Vector, is_finite
from papaya.learning.weighting import clipped, model_update

StepDone: TypeAlias = Callable[[int, int], None]
"""Called after each step with the number of steps so far and of all steps."""

_LOWER = "lower client.rate, or scale the loss"


def used_examples(examples: Sequence[bytes], client: ClientSGD) -> Sequence[bytes]:
    """The first `max_examples`: which those are is decided by the example query."""
    if not examples:
        raise OperatorError("there are no examples", hint="add examples to the example store")
    return examples[: client.max_examples]


def unwatched(done: int, steps: int) -> None:
    """No-op."""


def training_batches(
    examples: Sequence[bytes], client: ClientSGD, seed: int, step_done: StepDone = unwatched
) -> Iterator[list[bytes]]:
    """The batches of all epochs, in an order drawn from the seed."""
    orders = training_orders(len(examples), client, np.random.default_rng(seed))
    return _batches(examples, orders, client.steps(len(examples)), client.batch_size, step_done)


def training_orders(
    examples: int, client: ClientSGD, rng: np.random.Generator
) -> Iterator[npt.NDArray[np.int64]]:
    """The order of the examples in each epoch; `rng` is that of the client's seed."""
    return (rng.permutation(examples) for _ in range(client.epochs))


def evaluation_batches(
    examples: Sequence[bytes], client: ClientSGD, step_done: StepDone = unwatched
) -> Iterator[list[bytes]]:
    """The examples once, as they come."""
    order = iter([np.arange(len(examples))])
    steps = math.ceil(len(examples) / client.batch_size)
    return _batches(examples, order, steps, client.batch_size, step_done)


def _batches(
    examples: Sequence[bytes],
    orders: Iterator[npt.NDArray[np.int64]],
    steps: int,
    size: int,
    step_done: StepDone,
) -> Iterator[list[bytes]]:
    """The examples in each order, `size` at a time; the last batch of each may be smaller."""
    done = 0
    for order in orders:
        for start in range(0, len(order), size):
            yield [examples[i] for i in order[start : start + size].tolist()]
            done += 1
            step_done(done, steps)


def diverged(what: str) -> Diverged:
    return Diverged(f"training diverged: the {what} is not finite", hint=_LOWER)


def update_bytes(trained: Vector, initial: Vector, clip: float | None) -> bytes:
    """The update as it is uploaded: finite, clipped to the task's clip."""
    delta = model_update(trained, initial)
    if not is_finite(delta):
        raise diverged("model")
    return (delta if clip is None else clipped(delta, clip)).tobytes()
