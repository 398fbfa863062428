"""The owner's torch module: made, checked, and read out as named parameters.

What is shared is the vector of trainable parameters, in the order of `named_parameters()`, without
those that stay on the device (`papaya/learning/torch/parts.py`). All else in a module has to be the
same on every device without being sent: a device makes the module from its own file, and the digest
of the rest is part of the task's identity (`papaya/learning/torch/frozen.py`). So a buffer or a
frozen parameter that differs from one construction to the next is refused, and so is one that
training changes, other than the statistics of BatchNorm.

Refused: a model that is no module, without trainable parameters, with parameters that are not
float32 on the CPU; on examples that are tried, a batch that is no tuple, or a loss with a gradient
that is neither a scalar nor one number for each example.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch

from papaya.errors import OperatorError
from papaya.learning.definition import Task
from papaya.learning.device_state import MAX_STATE_BYTES, encode_state
from papaya.learning.example_fields import read_fields
from papaya.learning.parameters import Manifest, Vector
from papaya.learning.torch.frozen import (
    fill_frozen,
    first_difference,
    frozen_digest,
    frozen_tensors,
)
from papaya.learning.torch.parts import (
    ModuleParts,
    layout_of,
    parts_of,
    set_batch_norms,
    values_of,
)
from papaya.learning.torch.processor import CPU, moved

Batch: TypeAlias = tuple[Any, ...]
"""The result of the owner's `batch` or fields; passed to `loss` after the module."""

_FLOAT32 = torch.float32


def make_module(task: Task, seed: int = 0) -> torch.nn.Module:
    """The owner's module, initialised by this seed. Global random generators are unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = task.model()
    if not isinstance(module, torch.nn.Module):
        raise OperatorError(
            f"model returned a {type(module).__name__}, expected a torch.nn.Module",
            hint="use the module's class, or a function that returns a module",
        )
    if task.frozen is not None:
        fill_frozen(module, Path(task.frozen))
    return module


@contextmanager
def seeded(seed: int, processor: torch.device = CPU) -> Iterator[None]:
    """Random numbers by this seed; the CPU's global generator is unchanged afterwards.

    `torch.manual_seed` would also seed every accelerator, and formats a traceback for each: half a
    millisecond.
    """
    if processor.type != "cpu":
        torch.get_device_module(processor).manual_seed(seed)
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


@contextmanager
def no_files_left() -> Iterator[None]:
    """torch's compiler keeps a folder for a cache; this one ends with the context."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            os.environ.pop(name, None)


def initial_parameters(task: Task, manifest: Manifest, seed: int) -> Vector:
    """The module's own initialisation, as a vector."""
    shared = parts_of(task, make_module(task, seed)).shared
    return manifest.flatten({name: value.detach().numpy() for name, value in shared.items()})


def state_dict(manifest: Manifest, vector: Vector) -> dict[str, torch.Tensor]:
    """A version by tensor names. Load it with `strict=False` into a module with fixed buffers."""
    return {
        name: torch.from_numpy(tensor.copy()) for name, tensor in manifest.unflatten(vector).items()
    }


def checked_module(task: Task) -> tuple[Manifest, bytes]:
    """The manifest and the frozen digest of a module that can be trained on devices."""
    module = make_module(task, seed=0)
    parts = parts_of(task, module)
    _check_fixed_parts(task, module, parts)
    for name, value in (parts.shared | parts.personal).items():
        if value.device.type != "cpu" or (value.is_floating_point() and value.dtype != _FLOAT32):
            raise OperatorError(
                f"parameter {name!r} is {value.dtype} on {value.device}, not float32 on the CPU",
                hint="make the module with float32 parameters; devices train on the CPU",
            )
    manifest = layout_of(parts.shared)
    # Finite, too.
    manifest.flatten({name: value.detach().numpy() for name, value in parts.shared.items()})
    _check_personal(parts)
    return manifest, frozen_digest(module, parts.tensors)


def _check_fixed_parts(task: Task, module: torch.nn.Module, parts: ModuleParts) -> None:
    other = make_module(task, seed=1)
    others = frozen_tensors(other, parts_of(task, other).tensors)
    odd = first_difference(frozen_tensors(module, parts.tensors), others)
    if odd is not None:
        raise OperatorError(
            f"{odd!r} is initialized at random and not trained, so it would differ between devices",
            hint=f"train {odd!r}, draw it from a generator with a seed of its own, or put it into "
            'a file: Task(frozen="base.safetensors", ...)',
        )


def _check_personal(parts: ModuleParts) -> None:
    layout = parts.personal_layout
    size = 0 if layout is None else len(encode_state(layout, values_of(parts.personal)))
    if size > MAX_STATE_BYTES:
        raise OperatorError(
            f"the personal tensors have {size} bytes, the limit is {MAX_STATE_BYTES}",
            hint="share more of the parameters",
        )


def tried_batch(task: Task, examples: Sequence[bytes]) -> Batch:
    """The result of the owner's `batch`. Global random generators are unchanged."""
    with torch.random.fork_rng(devices=[]):
        return read_batch(task, examples)


def try_loss(task: Task, batch: Batch, examples: int) -> None:
    """The owner's `loss` of a fresh module. Refused if no client could learn from it."""
    module = make_module(task).train()
    changing = parts_of(task, module).tensors
    before = {name: value.clone() for name, value in frozen_tensors(module, changing).items()}
    set_batch_norms(module, examples)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        loss = batch_loss(task, module, batch, examples)
    if not torch.isfinite(loss):
        raise OperatorError(
            f"the loss of a fresh module is {loss.item()}",
            hint="look for log(0), a division by zero or NaN in the example",
        )
    held = frozen_tensors(module, changing)
    after = {name: value for name, value in held.items() if name in before}
    changed = first_difference(before, after)
    if changed is not None:
        raise OperatorError(
            f"the loss changes {changed!r}, which clients neither upload nor keep",
            hint="compute it from the batch, without changing a buffer",
        )


def try_metrics(task: Task, batch: Batch, examples: int) -> None:
    """The metrics of a fresh module. Refused if one has another shape or is out of bounds."""
    module = make_module(task).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        values = [_metric(task, i, module, batch, examples) for i in range(len(task.metrics))]
    for bounds, value in zip(task.metric_bounds, values, strict=True):
        if not bounds.low <= value <= bounds.high:
            raise OperatorError(
                f"metric {bounds.name!r} of a fresh module is {value:g}, not from "
                f"{bounds.low:g} to {bounds.high:g}",
                hint="set its bounds: Metric(function, low=…, high=…)",
            )


def checked_loss(task: Task, module: torch.nn.Module, examples: Sequence[bytes]) -> torch.Tensor:
    """The loss of one batch, with its graph. No backward here: see papaya/device/fork_server.py."""
    return batch_loss(task, module, read_batch(task, examples), len(examples))


def checked_loss_and_metrics(
    task: Task, module: torch.nn.Module, examples: Sequence[bytes], processor: torch.device
) -> tuple[float, list[float]]:
    """The means of the loss and of the metrics of one batch, without gradients."""
    batch = moved(read_batch(task, examples), processor)
    loss = float(batch_loss(task, module, batch, len(examples)))
    metrics = range(len(task.metrics))
    return loss, [_metric(task, i, module, batch, len(examples)) for i in metrics]


def _metric(task: Task, index: int, module: torch.nn.Module, batch: Batch, examples: int) -> float:
    """The mean of a metric over the batch."""
    value = task.metric_functions[index](module, *batch)
    if isinstance(value, torch.Tensor) and value.shape in ((), (examples,)):
        return float(value.detach().cpu().double().mean())  # not every GPU has float64
    if isinstance(value, bool | int | float):
        return float(value)
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise OperatorError(
        f"metric {task.metric_bounds[index].name!r} returned {found}, expected one number for each "
        f"of {examples} examples, or their mean",
        hint="for example (module(inputs).argmax(-1) == targets).float()",
    )


def read_batch(task: Task, examples: Sequence[bytes]) -> Batch:
    """The tensors of these examples, by the owner's function or fields."""
    if not callable(task.batch):
        return tuple(torch.from_numpy(array) for array in read_fields(task.batch, examples))
    batch = task.batch(list(examples))
    if not isinstance(batch, tuple):
        raise OperatorError(
            f"batch returned a {type(batch).__name__}, expected a tuple of tensors",
            hint="end it with: return (inputs, targets)",
        )
    return batch


def batch_loss(task: Task, module: torch.nn.Module, batch: Batch, examples: int) -> torch.Tensor:
    """The owner's mean loss, with its graph."""
    loss = task.loss(module, *batch)
    is_loss = isinstance(loss, torch.Tensor) and loss.is_floating_point()
    if not is_loss or loss.shape not in ((), (examples,)):
        found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise OperatorError(
            f"loss returned {found}, expected a scalar tensor, or one loss for each example",
            hint="return the mean over the batch, for example cross_entropy(...) or x.mean()",
        )
    mean: torch.Tensor = loss if loss.dim() == 0 else loss.mean()
    if torch.is_grad_enabled() and not mean.requires_grad:
        raise OperatorError(
            "loss does not depend on the trainable parameters",
            hint="compute it with the module that it is given, without detach() or no_grad()",
        )
    return mean
