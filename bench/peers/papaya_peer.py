"""A user's task file in Papaya's simulator: what `papaya.study.replay` does for a round.

Training is that of `TorchWorkload` with compiled steps, or with eager ones
(`papaya_eager_peer.py`): each client's examples are read from bytes and shuffled, as in a
simulation, where the peers have tensors that were made before. Weighted sum and step are the
aggregator's. Runs in the virtual environment of Papaya.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch_models
from common import BATCH, Array, Data, serve

from papaya.config import OptimizerConfig
from papaya.learning.executorch.shim import cache_folder
from papaya.learning.kernels import fastest
from papaya.learning.parameters import Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.task import load_task
from papaya.learning.torch.compiled_gradient import compile_gradient
from papaya.learning.torch.processor import CPU
from papaya.learning.weighting import Admitted, Contribution, WeightedSum
from papaya.study.workloads.base import Clients
from papaya.study.workloads.torch_task import TorchWorkload
from papaya.study.workloads.torch_workers import Way

_TASK = """

from papaya.learning.example_fields import Binary
from papaya.learning.task import ClientSGD, Examples, Task

task = Task(
    name="peers",
    model=lambda: make({model!r}, {form!r}),
    loss=loss,
    batch=({inputs}, {targets}),
    examples=Examples("bench"),
    client=ClientSGD(rate={rate!r}, batch_size={batch!r}),
    concurrency=100,
)
"""


class Papaya:
    """Federated averaging with the server's own arithmetic."""

    versions: ClassVar[dict[str, str]] = {
        name: version(name) for name in ("papaya-fl", "torch", "numpy")
    }

    def __init__(self, data: Data, *, compiled: bool = True) -> None:
        place = tempfile.TemporaryDirectory()
        loaded = load_task(_task_file(data, Path(place.name)))
        rows = zip(data.inputs, data.targets, strict=True)
        self._examples = [inputs.tobytes() + targets.tobytes() for inputs, targets in rows]
        self._offsets = data.offsets
        self._sgd = loaded.task.client
        way: Way = CPU
        if compiled:
            way = compile_gradient(loaded.task, self._examples[:4], cache_folder() / "gradients")
        nobody = np.zeros(0, np.int64)
        self._workload = TorchWorkload(
            loaded, self._examples_of, Clients(nobody, nobody, nobody), way=way
        )
        self._optimizer = server_optimizer(OptimizerConfig(kind="fedavg"))
        self._manifest = loaded.manifest
        self._model: Vector = loaded.manifest.flatten(data.trained)
        self._state = self._optimizer.initial_state(len(self._model))

    def train(self, cohort: range) -> None:
        device = np.arange(cohort.start, cohort.stop)
        examples = np.diff(self._offsets[cohort.start : cohort.stop + 1])
        clients = Clients(device, np.zeros_like(device), examples)
        updates = self._workload.train([self._model], np.zeros_like(device), clients, self._sgd)
        members = [
            Contribution(Admitted([row], 1.0), n, 0)
            for row, n in zip(updates, examples.tolist(), strict=True)
        ]
        total = WeightedSum.zero(len(self._model))
        total.add_all(members, fastest())
        self._model, self._state = self._optimizer.step(self._model, total.mean(), self._state)

    def parameters(self) -> dict[str, Array]:
        return self._manifest.unflatten(self._model)

    def _examples_of(self, device: int, count: int) -> list[bytes]:
        start = int(self._offsets[device])
        return self._examples[start : start + count]


def _task_file(data: Data, folder: Path) -> Path:
    shape, per_target = data.inputs.shape[1:], data.targets.shape[1:]
    kind = "float32" if data.inputs.dtype == np.float32 else "int64"
    end = data.inputs.dtype.itemsize * int(np.prod(shape))
    text = Path(torch_models.__file__).read_text() + _TASK.format(
        model=data.model,
        form=data.form,
        inputs=f"Binary({kind!r}, {shape!r})",
        targets=f"Binary('int64', {per_target!r}, start={end})",
        rate=data.rate,
        batch=BATCH,
    )
    path = folder / "task.py"
    path.write_text(text)
    return path


if __name__ == "__main__":
    serve(Papaya)
