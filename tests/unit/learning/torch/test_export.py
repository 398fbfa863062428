"""What cannot be compiled is refused with its place and a remedy; what was compiled is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from papaya.errors import OperatorError
from papaya.learning.definition import ClientSGD, Examples, Task
from papaya.learning.example_fields import Numbers
from papaya.learning.executorch.program_file import decode_program
from papaya.learning.task import LoadedTask
from papaya.learning.torch import export
from papaya.learning.torch.module import checked_module

SAMPLE = [b"1,2,3,4", b"0,-1,1,0.5", b"2,2,-1,0"]


class Functional(nn.Module):
    """A layer, and a function without a layer of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.forgotten = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def squares(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().flatten(1).sum(1)  # type: ignore[no-any-return]


def a_task(model: Callable[[], nn.Module], **changes: Any) -> LoadedTask:
    settings: dict[str, Any] = {"loss": squares, "batch": (Numbers(4),), "sample": SAMPLE}
    task = Task(
        name="squares",
        model=model,
        examples=Examples("numbers"),
        client=ClientSGD(rate=0.1, batch_size=4),
        concurrency=1,
        **(settings | changes),
    )
    return LoadedTask(Path("squares.py"), task, "sha256:ab", *checked_module(task))


def a_linear() -> nn.Module:
    return nn.Linear(4, 1)


def between(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 4), *layers)


@pytest.mark.parametrize(
    ("model", "problem", "remedy"),
    [
        (
            between(nn.AvgPool1d(2)),
            r"layer '1' \(AvgPool1d\): avg_pool1d has no gradient",
            "stride",
        ),
        (between(nn.MaxPool1d(2)), r"layer '1' \(MaxPool1d\): max_pool1d has a wrong", "stride"),
        (
            between(nn.BatchNorm1d(4, track_running_stats=False)),
            r"layer '1' \(BatchNorm1d\): batch_norm has no gradient",
            "LayerNorm",
        ),
        (between(nn.GroupNorm(2, 4)), r"layer '1' \(GroupNorm\): group_norm", "LayerNorm"),
        (between(nn.Dropout(0.5)), r"layer '1' \(Dropout\): dropout draws random", "remove it"),
        (
            lambda: Functional(lambda x: pad(x, (1, 1))),
            r"the model \(Functional\): pad has no gradient",
            "torch.cat",
        ),
        (
            lambda: Functional(lambda x: scaled_dot_product_attention(x, x, x)),
            r"the model \(Functional\): scaled_dot_product_attention has no gradient",
            "write it out",
        ),
        (
            lambda: Functional(lambda x: x + torch.rand(4)),
            r"the model \(Functional\): rand draws random numbers",
            "remove it",
        ),
        (Unused, r"does not depend on the parameters forgotten.weight, forgotten.bias", "remove"),
    ],
)
def test_operators_that_cannot_be_trained_are_refused(
    model: Callable[[], nn.Module], problem: str, remedy: str
) -> None:
    with pytest.raises(OperatorError, match=problem) as refused:
        export.compile_task(a_task(model))
    assert remedy in refused.value.hint


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"batch": lambda examples: (torch.zeros(len(examples), 4),)}, "batch is a function"),
        ({"sample": ()}, "no examples to compare"),
        ({"loss": lambda module, x: module(x).square().mean()}, r"shape \[\] for 4 examples"),
        (
            {"loss": lambda module, x: (module(x)[:, 0] * 0).square()},
            "the gradient of the loss on the sample has norm 0.0",
        ),
    ],
)
def test_tasks_that_cannot_be_compiled_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(OperatorError, match=problem):
        export.compile_task(a_task(a_linear, **changes))


def test_a_program_is_compiled_once_and_a_damaged_copy_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[LoadedTask] = []
    compile_now = export._compiled

    def counting(loaded: LoadedTask) -> bytes:
        compiled.append(loaded)
        return first if len(compiled) > 1 else compile_now(loaded)

    monkeypatch.setattr(export, "_compiled", counting)
    first, loaded = b"", a_task(a_linear)
    first = export.compile_task(loaded, tmp_path / "programs")
    assert export.compile_task(loaded, tmp_path / "programs") == first
    assert len(compiled) == 1
    (kept,) = (tmp_path / "programs").iterdir()
    kept.write_bytes(first[:-1])
    again = export.compile_task(loaded, tmp_path / "programs")
    assert len(compiled) == 2
    export.compile_task(loaded, tmp_path / "programs", "another file beside the task's own")
    assert len(compiled) == 3
    assert decode_program(again).header.task == "squares"


@pytest.mark.parametrize("wrong", ["bias", "weight"])
def test_an_update_that_differs_in_one_tensor_is_refused(wrong: str) -> None:
    loaded = a_task(a_linear)
    initial = loaded.initial_parameters()
    theirs = np.full(5, 0.01, np.float32)
    ours = theirs.copy()
    export.compare_updates(loaded, initial, ours, theirs)
    loaded.manifest.unflatten(ours)[wrong][...] *= 1.001
    with pytest.raises(OperatorError, match=f"parameter '{wrong}': after 10 steps"):
        export.compare_updates(loaded, initial, ours, theirs)
    loaded.manifest.unflatten(theirs)[wrong][...] = 0
    with pytest.raises(OperatorError, match=f"parameter '{wrong}' does not change"):
        export.compare_updates(loaded, initial, theirs, theirs)
