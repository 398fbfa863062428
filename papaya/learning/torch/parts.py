"""The parts of a module: what clients upload, what stays on the device, and the rest, frozen.

    shared      the vector of a version: trainable parameters, then averaged statistics
    personal    parameters that `Task.personal` names, and local statistics; kept on the device
    frozen      all that is neither (papaya/learning/torch/frozen.py)

Statistics are the running mean and variance that BatchNorm keeps. `Task.batch_norm` says what
happens to them: "averaged" uploads their change as that of parameters, "local" keeps them.

Refused (OperatorError): a pattern that names no trainable parameter, patterns that leave nothing to
share, and statistics without `batch_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from papaya.errors import OperatorError
from papaya.learning.definition import Task
from papaya.learning.parameters import FLOAT32, Manifest, Vector, is_statistic

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class ModuleParts(NamedTuple):
    """Tensors of one module, by name, in order. Nothing is copied."""

    shared: dict[str, Tensor]
    personal: dict[str, Tensor]
    # Of averaged statistics: how many batches they have seen. It starts at zero in each job.
    counters: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """All that training changes."""
        return [*self.shared.values(), *self.personal.values(), *self.counters]

    @property
    def shared_parameters(self) -> list[Tensor]:
        return [tensor for tensor in self.shared.values() if tensor.requires_grad]

    @property
    def personal_parameters(self) -> list[Tensor]:
        return [tensor for tensor in self.personal.values() if tensor.requires_grad]

    @property
    def personal_layout(self) -> Manifest | None:
        return layout_of(self.personal) if self.personal else None

    def fill(self, shared: Mapping[str, Vector], personal: Mapping[str, Vector]) -> None:
        """Give the tensors these values; counters start again."""
        with torch.no_grad():
            for tensors, values in ((self.shared, shared), (self.personal, personal)):
                for name, tensor in tensors.items():
                    tensor.copy_(torch.from_numpy(values[name].copy()))
                    if name.rpartition(".")[2] == "running_var":
                        # A step of the server, or noise, can make a variance negative.
                        tensor.clamp_(min=0)
            for counter in self.counters:
                counter.zero_()


def layout_of(tensors: Mapping[str, Tensor]) -> Manifest:
    return Manifest(tuple((name, tuple(value.shape)) for name, value in tensors.items()))


def values_of(tensors: Mapping[str, Tensor]) -> Vector:
    """The values of these tensors, one after the other."""
    parts = [value.detach().cpu().numpy().ravel().astype(FLOAT32) for value in tensors.values()]
    return np.concatenate([*parts, np.empty(0, FLOAT32)])


def parts_of(task: Task, module: nn.Module) -> ModuleParts:
    parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
    shared, personal = _split(task, parameters)
    statistics = dict(_statistics(module))
    if statistics and task.batch_norm is None:
        layer = next(iter(statistics)).rpartition(".")[0]
        raise OperatorError(
            f"{type(module.get_submodule(layer)).__name__} {layer!r} keeps running statistics, "
            "and batch_norm does not say what happens to them",
            hint='set batch_norm="averaged" to upload them or batch_norm="local" to keep them on '
            "the device, or use LayerNorm or GroupNorm",
        )
    counters = []
    for name, value in statistics.items():
        if task.batch_norm == "local":
            personal[name] = value
        elif is_statistic(name):
            shared[name] = value
        else:
            counters.append(value)
    return ModuleParts(shared, personal, counters)


def _split(
    task: Task, parameters: dict[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    personal: dict[str, Tensor] = {}
    for pattern in task.personal:
        found = {name: value for name, value in parameters.items() if fnmatchcase(name, pattern)}
        if not found:
            raise OperatorError(
                f"personal={pattern!r} names no trainable parameter",
                hint=f"the trainable parameters are {', '.join(list(parameters)[:10])}",
            )
        personal |= found
    shared: dict[str, Tensor] = {n: v for n, v in parameters.items() if n not in personal}
    if not shared:
        problem = "all trainable parameters are personal" if personal else "no trainable parameter"
        raise OperatorError(
            f"the model has nothing to share: {problem}",
            hint="name fewer parameters in personal"
            if personal
            else "set requires_grad = True on at least one parameter",
        )
    return shared, personal


def set_batch_norms(module: nn.Module, examples: int) -> None:
    """Layers with running statistics use those for a batch of one example, which has no variance
    of its own. For the others they use the batch, and change the statistics.
    """
    for part in module.modules():
        if getattr(part, "running_mean", None) is not None:
            part.train(examples > 1)


def _statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, part in module.named_modules():
        if getattr(part, "running_mean", None) is not None:
            for statistic in _STATISTICS:
                value = getattr(part, statistic, None)
                if isinstance(value, Tensor):
                    yield f"{name}.{statistic}".lstrip("."), value
