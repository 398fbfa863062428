"""Training and evaluation of one task on one device, with ExecuTorch instead of torch.

The program computes the loss, its gradients and the metrics for a batch of fixed size; the
optimizer's steps are ours, in numpy. Both engines train the same update from the same seed, up to
rounding. A batch with fewer examples is filled with copies of its first example that have the
weight 0.

Refused (OperatorError): no examples, examples that do not fit the task's fields, parameters of
another model, a loss or a model that is not finite, and what the runtime refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import numpy as np

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
from papaya.learning.device_state import decode_state, encode_state
from papaya.learning.evaluation import EvaluationSums
from papaya.learning.example_fields import Array, read_fields
from papaya.learning.executorch.client_optimizer import NumpyClientOptimizer
from papaya.learning.executorch.program_file import ProgramFile
from papaya.learning.executorch.runtime import LoadedProgram, require_operators
from papaya.learning.frozen_file import FrozenTensor
from papaya.learning.parameters import FLOAT32, Manifest, Vector, is_finite


class ExecuTorchEngine:
    """One program. It is loaded for each job, in the job's own process.

    `frozen`: gives the tensors that the program's header names; called when it is loaded.
    `device_state`: the personal parameters of the device. Set it before a job; training replaces
    it. Empty: they have their initial values.
    """

    def __init__(
        self, file: ProgramFile, frozen: Callable[[], Mapping[str, FrozenTensor]] = dict
    ) -> None:
        require_operators(file.header)
        self.manifest = file.header.manifest
        self._file = file
        self._frozen = frozen
        self._client = file.header.client
        self._personal = file.header.personal_layout
        self.device_state = b""

    @property
    def keeps_state(self) -> bool:
        """Whether the task has personal parameters."""
        return self._personal is not None

    def check(self, examples: Sequence[bytes]) -> None:
        """Raises if an example does not fit the task's fields."""
        read_fields(self._file.header.fields, examples)

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
        used = used_examples(examples, self._client)
        steps = self._client.steps(len(used))
        with self._loaded(parameters) as program:
            personal = dict(self._file.header.personal)
            optimizer = NumpyClientOptimizer(self._client, program.parameters, steps, personal)
            for batch in training_batches(used, self._client, seed, step_done):
                loss, _, gradients = self._run(program, batch)
                if not math.isfinite(loss):
                    raise diverged("loss")
                optimizer.step(gradients)
            trained = _values(program, self.manifest)
            state = b"" if self._personal is None else self._state(program, self._personal)
        update = update_bytes(
            trained, parameters, self._file.header.terms.clip if is_clipped else None
        )
        self.device_state = state
        return update, len(used)

    def evaluate(
        self,
        parameters: Vector,
        examples: Sequence[bytes],
        volume: int,
        step_done: StepDone = unwatched,
    ) -> bytes:
        """The evaluation vector of a device with `volume` training examples."""
        used = used_examples(examples, self._client)
        sums = EvaluationSums(self._file.header.terms.metric_bounds)
        with self._loaded(parameters) as program:
            for batch in evaluation_batches(used, self._client, step_done):
                loss, metrics, _ = self._run(program, batch)
                sums.add(len(batch), loss, metrics)
        return sums.vector(volume).tobytes()

    def try_program(self) -> None:
        """Load the program, with all parameters zero."""
        with self._loaded(np.zeros(self.manifest.length, FLOAT32)):
            pass

    def _loaded(self, parameters: Vector) -> closing[LoadedProgram]:
        values = self.manifest.unflatten(parameters)
        tensors = dict(self._frozen())
        if self._personal is not None:
            values |= self._personal_values(self._personal, tensors)
        return closing(LoadedProgram(self._file, values, tensors))

    def _personal_values(
        self, layout: Manifest, tensors: dict[str, FrozenTensor]
    ) -> dict[str, Vector]:
        """What the device has kept, or the initial values, which are taken out of the file."""
        initial = {name: tensors.pop(name, None) for name, _ in layout.tensors}
        kept = decode_state(layout, self.device_state)
        if kept is not None:
            return layout.unflatten(kept)
        for name, shape in layout.tensors:
            found = initial[name]
            if found is None or (found.dtype, found.shape) != ("F32", shape):
                raise OperatorError(
                    f"the file of frozen tensors has no initial value of {name!r}",
                    hint="compile it again: papaya task compile TASK.py",
                )
        return {n: t.data.view(FLOAT32).reshape(t.shape) for n, t in initial.items() if t}

    def _state(self, program: LoadedProgram, layout: Manifest) -> bytes:
        values = _values(program, layout)
        if not is_finite(values):
            raise diverged("personal part of the model")
        return encode_state(layout, values)

    def _run(
        self, program: LoadedProgram, batch: list[bytes]
    ) -> tuple[float, list[float], dict[str, Vector]]:
        size = self._client.batch_size
        weights = np.zeros(size, FLOAT32)
        weights[: len(batch)] = 1 / len(batch)
        arrays = read_fields(self._file.header.fields, batch)
        return program.run([weights, *(_filled(array, size) for array in arrays)])


def _values(program: LoadedProgram, layout: Manifest) -> Vector:
    return np.concatenate([program.parameters[name].reshape(-1) for name, _ in layout.tensors])


def _filled(array: Array, size: int) -> Array:
    missing = size - len(array)
    return np.concatenate((array, np.repeat(array[:1], missing, axis=0))) if missing else array
