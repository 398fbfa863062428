"""One client's training, as the loop of a task sees it.

    def train(local: LocalTraining) -> None:
        for batch in local.batches():
            local.step(local.gradients(local.loss(batch)))

This loop is the engine's own (`by_gradients`). A task may bring another: `Task(train=…)`. It
changes `local.module` in place, by any means of PyTorch; the engine takes the difference from the
downloaded model, clips it, and keeps the personal tensors.

Refused (OperatorError): a loop that returns something, replaces a parameter by another tensor, or
changes what clients neither upload nor keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from papaya.errors import OperatorError
from papaya.learning.client_training import StepDone, diverged, training_batches
from papaya.learning.definition import ClientSGD, Task
from papaya.learning.torch.client_optimizer import TorchClientOptimizer
from papaya.learning.torch.frozen import frozen_tensors
from papaya.learning.torch.module import Batch, batch_loss, read_batch
from papaya.learning.torch.parts import ModuleParts, set_batch_norms
from papaya.learning.torch.processor import moved


class LocalTraining:
    """What a loop gets. PyTorch's random numbers follow from `seed` while it runs.

    `module` has the downloaded model and this client's personal tensors. `parameters` are those of
    its tensors that are trained: the shared ones, then the personal ones. `client` are the settings
    of the task; what a loop does not use has no effect. `examples` are the client's, as stored.
    """

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        parts: ModuleParts,
        examples: Sequence[bytes],
        seed: int,
        step_done: StepDone,
        processor: torch.device,
    ) -> None:
        shared, personal = parts.shared_parameters, parts.personal_parameters
        self.module = module
        self.parameters = [*shared, *personal]
        self.client: ClientSGD = task.client
        self.examples = examples
        self.seed = seed
        self._task = task
        self._step_done = step_done
        self._processor = processor
        self._optimizer = TorchClientOptimizer(self.client, shared, self.steps, personal)
        self._in_batch = 0  # examples of the batch that was given last

    @property
    def steps(self) -> int:
        """The number of batches."""
        return self.client.steps(len(self.examples))

    def batches(self) -> Iterator[Batch]:
        """The tensors of each batch, for all epochs, in an order drawn from the seed, where the
        module computes. A second call gives the same batches again.
        """
        for examples in training_batches(self.examples, self.client, self.seed, self._step_done):
            set_batch_norms(self.module, len(examples))
            self._in_batch = len(examples)
            yield moved(read_batch(self._task, examples), self._processor)

    def loss(self, batch: Batch) -> Tensor:
        """The task's mean loss of the batch that `batches` gave last."""
        is_short = bool(self.client.precision)
        with torch.autocast(self._processor.type, torch.bfloat16, enabled=is_short):
            return batch_loss(self._task, self.module, batch, self._in_batch)

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        """Of each of `parameters`; None if the loss does not depend on it."""
        if not math.isfinite(loss.item()):
            raise diverged("loss")
        return list(torch.autograd.grad(loss, self.parameters, allow_unused=True))

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One step of the task's client optimizer. Without a gradient, a parameter stays."""
        self._optimizer.step(gradients)


def by_gradients(local: LocalTraining) -> None:
    """The loop of a task that brings none."""
    for batch in local.batches():
        local.step(local.gradients(local.loss(batch)))


def run_own_loop(
    train: Callable[[LocalTraining], object], local: LocalTraining, parts: ModuleParts
) -> None:
    """Run the loop of a task. The next client gets the same module, so whatever the loop leaves in
    its tensors, except values of `parts`, is undone or refused. Hooks and other attributes stay.
    """
    module = local.module
    flags = [(value, value.requires_grad) for value in module.parameters()]
    before = _marks(module, parts)
    try:
        result = train(local)
    finally:
        for value, flag in flags:
            value.requires_grad_(flag).grad = None
    if result is not None:
        raise OperatorError(
            f"train returned an object of type {type(result).__name__}, expected nothing",
            hint="change local.module in place: with torch.no_grad(): parameter.copy_(values)",
        )
    after = _marks(module, parts)
    for name in before | after:
        if before.get(name) != after.get(name):
            is_trained = name in parts.shared or name in parts.personal
            raise OperatorError(
                f"train replaced {name!r} by another tensor"
                if is_trained
                else f"train changed {name!r}, which clients neither upload nor keep",
                hint="change parameters in place, with values of the same type and shape"
                if is_trained
                else "work on a copy of it; parameters that personal=[…] names stay on the device",
            )


def _marks(module: nn.Module, parts: ModuleParts) -> dict[str, tuple[object, ...]]:
    """Which tensors a module holds. Of those that are frozen also how often they were changed,
    which is cheaper than to compare the values.
    """
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    frozen = frozen_tensors(module, parts.tensors)
    own = {name: value for name, value in held.items() if name not in frozen}
    marks = {name: (id(value), value.dtype, value.shape) for name, value in own.items()}
    return marks | {
        name: (id(value), value.dtype, value.shape, value.data_ptr(), value._version)
        for name, value in frozen.items()
    }
