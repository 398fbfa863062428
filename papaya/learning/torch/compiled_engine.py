"""Training of many simulated clients with a compiled gradient, one client at a time.

The batches, the optimizer and the update are those of the engine that devices run. The gradient is
the compiled one (compiled_gradient.py), and the parameters are one vector, so that a step of the
optimizer is a few operations whatever the number of tensors. A batch of another form than the
compiled one, such as a single example, takes PyTorch's own gradient.

Losses are looked at after the last step instead of after each: a client that diverges is refused
all the same, a few steps later.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Final

import torch
from torch import Tensor

from papaya.learning.client_training import (
    StepDone,
    diverged,
    training_batches,
    unwatched,
    update_bytes,
    used_examples,
)
from papaya.learning.parameters import Vector
from papaya.learning.task import LoadedTask
from papaya.learning.torch.client_optimizer import TorchClientOptimizer
from papaya.learning.torch.compiled_gradient import CompiledGradient, Library, flat_gradient
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.module import Batch, batch_loss, read_batch, seeded

_TRIM_THRESHOLD: Final = -1  # of mallopt(3)
_MMAP_THRESHOLD: Final = -3
_MOST: Final = (1 << 31) - 1


class CompiledEngine(TorchEngine):
    """A TorchEngine whose `train` uses a compiled gradient."""

    def __init__(self, loaded: LoadedTask, library: Library) -> None:
        super().__init__(loaded)
        _keep_freed_memory()
        self._compiled = CompiledGradient(library, self._module)

    def train(
        self,
        parameters: Vector,
        examples: Sequence[bytes],
        seed: int,
        step_done: StepDone = unwatched,
        *,
        is_clipped: bool = True,
    ) -> tuple[bytes, int]:
        client = self.task.client
        if client.precision or (client.weight_decay and self._compiled.library.is_partial):
            # A parameter without a gradient is not decayed; in one vector it would be. The compiled
            # gradient is float32.
            return super().train(parameters, examples, seed, step_done, is_clipped=is_clipped)
        used = used_examples(examples, client)
        trained = torch.from_numpy(parameters.copy())
        optimizer = TorchClientOptimizer(client, [trained], client.steps(len(used)))
        losses = []
        # What is compiled draws no random numbers; a function that makes batches may.
        with seeded(seed) if callable(self.task.batch) else nullcontext():
            for chosen in training_batches(used, client, seed, step_done):
                loss, gradient = self._gradient(trained, read_batch(self.task, chosen), len(chosen))
                optimizer.step([gradient])
                losses.append(loss)
        if not all(math.isfinite(loss.item()) for loss in losses):
            raise diverged("loss")
        clip = self.task.clip if is_clipped else None
        return update_bytes(trained.numpy(), parameters, clip), len(used)

    def _gradient(self, parameters: Tensor, batch: Batch, examples: int) -> tuple[Tensor, Tensor]:
        if self._compiled.takes(batch):
            return self._compiled(parameters, batch)
        self._set(parameters.numpy())
        self._module.train()
        values = self._parts.shared_parameters
        with torch.enable_grad():
            loss = batch_loss(self.task, self._module, batch, examples)
            gradients = torch.autograd.grad(loss, values, allow_unused=True)
        return loss.detach(), flat_gradient(values, gradients)


@cache
def _keep_freed_memory() -> None:
    """Without this, glibc gives the memory of large tensors back to the kernel after every step,
    and gets it again page by page: up to a third of the time of a step.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_TRIM_THRESHOLD, _MOST)
        mallopt(_MMAP_THRESHOLD, 1 << 30)
