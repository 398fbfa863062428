"""Training and evaluation of one task on one device, with torch.

Paper, "Client Runtime" and appendix "Implementation": a client runs SGD from the model that it was
given and uploads the difference.

Deterministic: the same parameters, examples and seed give the same bytes on the same machine, on
one thread. At most `max_examples` are used, the first ones: which those are is the example
query's business. The update is clipped here, on the device, to the task's clip.

Refused (OperatorError): no examples, parameters of another model, frozen tensors other than those
that are part of the task's identity, a loss or a model that is not finite, and whatever the owner's
`batch` and `loss` raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from papaya.errors import OperatorError
from papaya.learning.client_training import (
    StepDone,
    diverged,
    evaluation_batches,
    training_batches,
    unwatched,
    update_bytes,
    used_examples,
)
from papaya.learning.evaluation import EvaluationSums
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.task import LoadedTask
from papaya.learning.torch.client_optimizer import TorchClientOptimizer
from papaya.learning.torch.frozen import frozen_digest
from papaya.learning.torch.module import (
    checked_loss,
    checked_loss_and_metrics,
    make_module,
    trainable,
    tried_batch,
)


class TorchEngine:
    """One module, made once, that is given other parameters for each job."""

    def __init__(self, loaded: LoadedTask) -> None:
        torch.set_num_threads(1)
        self.manifest = loaded.manifest
        self.task = loaded.task
        self._module = make_module(loaded.task)
        if frozen_digest(self._module) != loaded.frozen:
            raise OperatorError(
                f"{loaded.path}: the frozen tensors of the model changed since the file was loaded",
                hint="restart, and do not replace the files that the model loads meanwhile",
            )
        self._parameters = trainable(self._module)

    def check(self, examples: Sequence[bytes]) -> None:
        """Raises if the task's `batch` does not accept these examples."""
        tried_batch(self.task, examples)

    def train(
        self,
        parameters: Vector,
        examples: Sequence[bytes],
        seed: int,
        step_done: StepDone = unwatched,
        *,
        is_clipped: bool = True,
    ) -> tuple[bytes, int]:
        """The update, little-endian float32 in manifest order, and the number of examples."""
        used = used_examples(examples, self.task.client)
        self._set(parameters)
        self._module.train()
        client = self.task.client
        values = list(self._parameters.values())
        optimizer = TorchClientOptimizer(client, values, client.steps(len(used)))
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            for batch in training_batches(used, client, seed, step_done):
                optimizer.step(self._gradients(checked_loss(self.task, self._module, batch)))
        return self._update(parameters, self.task.clip if is_clipped else None), len(used)

    def evaluate(
        self,
        parameters: Vector,
        examples: Sequence[bytes],
        volume: int,
        step_done: StepDone = unwatched,
    ) -> bytes:
        """The evaluation vector of a device with `volume` training examples."""
        used = used_examples(examples, self.task.client)
        self._set(parameters)
        self._module.eval()
        sums = EvaluationSums(self.task.metric_bounds)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            for batch in evaluation_batches(used, self.task.client, step_done):
                sums.add(len(batch), *checked_loss_and_metrics(self.task, self._module, batch))
        return sums.vector(volume).tobytes()

    def try_program(self) -> None:
        """No-op: creating the engine has loaded the program."""

    def _set(self, parameters: Vector) -> None:
        tensors = self.manifest.unflatten(parameters)
        with torch.no_grad():
            for name, value in self._parameters.items():
                value.copy_(torch.from_numpy(tensors[name].copy()))

    def _gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not math.isfinite(loss.item()):
            raise diverged("loss")
        values = list(self._parameters.values())
        return torch.autograd.grad(loss, values, allow_unused=True)

    def _update(self, initial: Vector, clip: float | None) -> bytes:
        parts = [value.detach().numpy().ravel() for value in self._parameters.values()]
        trained: Vector = np.concatenate(parts).astype(FLOAT32, copy=False)
        return update_bytes(trained, initial, clip)
