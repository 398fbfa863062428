"""Training and evaluation of one task on one device, with torch.

Paper, "Client Runtime" and appendix "Implementation": a client runs SGD from the model that it was
given and uploads the difference.

Deterministic on the CPU: the same parameters, examples and seed give the same bytes on the same
machine, on one thread. A simulation may compute on a GPU instead, which can round differently from
one time to the next. At most `max_examples` are used, the first ones: which those are is the
example query's business. The update is clipped here, on the device, to the task's clip.

Refused (OperatorError): no examples, parameters of another model, frozen tensors other than those
that are part of the task's identity, a loss or a model that is not finite, and whatever the owner's
`batch`, `loss` and `train` raise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from papaya.errors import OperatorError
from papaya.learning.client_training import (
    StepDone,
    diverged,
    evaluation_batches,
    unwatched,
    update_bytes,
    used_examples,
)
from papaya.learning.device_state import decode_state, encode_state
from papaya.learning.evaluation import EvaluationSums
from papaya.learning.parameters import Manifest, Vector, is_finite
from papaya.learning.task import LoadedTask
from papaya.learning.torch.frozen import frozen_digest
from papaya.learning.torch.local_training import LocalTraining, by_gradients, run_own_loop
from papaya.learning.torch.module import (
    checked_loss_and_metrics,
    make_module,
    seeded,
    tried_batch,
)
from papaya.learning.torch.parts import parts_of, values_of
from papaya.learning.torch.processor import CPU


class TorchEngine:
    """One module, made once, that is given other parameters for each job.

    `device_state`: the personal tensors of the device. Set it before a job; training replaces it.
    Empty: they have the values that the module is made with. `processor`: where it computes.
    """

    def __init__(self, loaded: LoadedTask, processor: torch.device = CPU) -> None:
        torch.set_num_threads(1)
        self.manifest = loaded.manifest
        self.task = loaded.task
        self.device_state = b""
        self._processor = processor
        self._module = make_module(loaded.task)
        parts = parts_of(loaded.task, self._module)
        if frozen_digest(self._module, parts.tensors) != loaded.frozen:
            raise OperatorError(
                f"{loaded.path}: the frozen tensors of the model changed since the file was loaded",
                hint="restart, and do not replace the files that the model loads meanwhile",
            )
        # Its tensors on a GPU are other ones.
        self._parts = parts_of(loaded.task, self._module.to(processor))
        self._personal_layout = self._parts.personal_layout
        self._initial_personal = values_of(self._parts.personal)

    @property
    def keeps_state(self) -> bool:
        """Whether the task has personal tensors."""
        return self._personal_layout is not None

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
        local = LocalTraining(
            self.task, self._module, self._parts, used, seed, step_done, self._processor
        )
        with seeded(seed, self._processor), torch.enable_grad():
            if self.task.train is None:
                by_gradients(local)
            else:
                run_own_loop(self.task.train, local, self._parts)
        clip = self.task.clip if is_clipped else None
        update = update_bytes(values_of(self._parts.shared), parameters, clip)
        if self._personal_layout is not None:
            self.device_state = self._trained_state(self._personal_layout)
        return update, len(used)

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
        with seeded(0, self._processor), torch.no_grad():
            for batch in evaluation_batches(used, self.task.client, step_done):
                found = checked_loss_and_metrics(self.task, self._module, batch, self._processor)
                sums.add(len(batch), *found)
        return sums.vector(volume).tobytes()

    def try_program(self) -> None:
        """No-op: creating the engine has loaded the program."""

    def _set(self, parameters: Vector) -> None:
        personal: dict[str, Vector] = {}
        if self._personal_layout is not None:
            kept = decode_state(self._personal_layout, self.device_state)
            values = self._initial_personal if kept is None else kept
            personal = self._personal_layout.unflatten(values)
        self._parts.fill(self.manifest.unflatten(parameters), personal)

    def _trained_state(self, layout: Manifest) -> bytes:
        values = values_of(self._parts.personal)
        if not is_finite(values):
            raise diverged("personal part of the model")
        return encode_state(layout, values)
