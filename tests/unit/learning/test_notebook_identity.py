"""A task of a notebook is another one if anything that its code uses differs."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from papaya.learning.definition import ClientSGD, Examples, Metric, Task
from papaya.learning.notebook_identity import notebook_identity

SCALE = 1.0
TABLE = torch.ones(3)


class Scaled(torch.nn.Module):
    factor = 2.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, width)
        self.head = torch.nn.Linear(width, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.layer(inputs))
        return self.factor * hidden


def helper(value: torch.Tensor) -> torch.Tensor:
    return SCALE * value


def loss(module: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return helper(module(inputs)).square().mean() + TABLE.sum()


def batch(examples: list[bytes]) -> tuple[torch.Tensor]:
    return (torch.zeros(len(examples), 2),)


def a_task(width: int = 4, **changes: Any) -> Task:
    task = Task(
        name="notebook",
        model=lambda: Scaled(width),
        loss=loss,
        batch=batch,
        examples=Examples("points"),
        client=ClientSGD(rate=0.1),
        concurrency=10,
    )
    return structs.replace(task, **changes)


def test_equal_tasks_have_one_identity() -> None:
    assert notebook_identity(a_task()) == notebook_identity(a_task())


@pytest.mark.parametrize(
    "other",
    [
        lambda: a_task(width=5),
        lambda: a_task(personal=("head.*",)),
        lambda: a_task(batch_norm="local"),
        lambda: a_task(metrics={"zero": lambda module, inputs: 0.0}),
        lambda: a_task(metrics={"zero": Metric(lambda module, inputs: 0.0, high=2.0)}),
        lambda: a_task(train=lambda local: None),
    ],
)
def test_another_setting_makes_another_task(other: Callable[[], Task]) -> None:
    assert notebook_identity(other()) != notebook_identity(a_task())


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (sys.modules[__name__], "SCALE", 3.0),
        (sys.modules[__name__], "TABLE", torch.zeros(3)),
        (sys.modules[__name__], "helper", lambda value: value + SCALE),
        (Scaled, "factor", 3.0),
        (Scaled, "forward", lambda self, inputs: self.head(self.layer(inputs)).relu()),
    ],
)
def test_what_the_code_refers_to_belongs_to_the_task(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, value: object
) -> None:
    """A cell of a notebook that is run again replaces such a value."""
    before = notebook_identity(a_task())
    monkeypatch.setattr(where, name, value)
    assert notebook_identity(a_task()) != before


class Settings:
    """An object that a function uses."""

    def __init__(self, width: float) -> None:
        self.width = width

    @cached_property
    def area(self) -> float:
        return self.width**2


class Named(dict[str, float]):
    """A container with an attribute of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(a=1.0)
        self.name = name


def times(factor: float) -> Callable[[float], float]:
    @lru_cache
    def cached(value: float) -> float:
        return factor * value

    return cached


def objects(*widths: float) -> np.ndarray[Any, Any]:
    return np.array([Settings(width) for width in widths], object)


def with_value(value: object) -> Task:
    return a_task(train=lambda local: repr(value))


@pytest.mark.parametrize(
    ("value", "equal", "other"),
    [
        (Settings(1.0), Settings(1.0), Settings(2.0)),
        (Random(1), Random(1), Random(2)),
        (torch.float32, torch.float32, torch.float64),
        (torch.arange(3), torch.arange(3), torch.arange(1, 4)),
        (torch.tensor(2**60), torch.tensor(2**60), torch.tensor(2**60 + 1)),
        (torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.tensor([1j]), torch.tensor([1j]), torch.tensor([2j])),
        (torch.ones(4).bfloat16()[::2], torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()),
        (np.arange(6)[::2], np.arange(0, 6, 2), np.arange(3)),
        (objects(1.0, 2.0), objects(1.0, 2.0), objects(1.0, 3.0)),
        (OrderedDict(a=1), OrderedDict(a=1), OrderedDict(b=1)),
        (Named("one"), Named("one"), Named("two")),
        ({frozenset("abc"), Settings}, {Settings, frozenset("cba")}, {Settings}),
        (times(1.0), times(1.0), times(2.0)),
    ],
)
def test_objects_are_compared_by_their_content(value: object, equal: object, other: object) -> None:
    identity = notebook_identity(with_value(value))
    assert notebook_identity(with_value(equal)) == identity
    assert notebook_identity(with_value(other)) != identity


def test_contents_that_change_in_place_are_noticed() -> None:
    values = objects(1.0)
    before = notebook_identity(with_value(values))
    values[0].width = 2.0
    assert notebook_identity(with_value(values)) != before


def test_a_task_may_consist_of_partial_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    functions: dict[str, Any] = {"model": partial(Scaled, 3), "loss": partial(loss)}
    functions["batch"] = partial(batch)
    before = notebook_identity(a_task(**functions))
    monkeypatch.setattr(Scaled, "factor", 3.0)
    assert notebook_identity(a_task(**functions)) != before


def test_it_does_not_matter_in_which_cell_code_is() -> None:
    """The compiler makes one object of equal constants in a cell."""
    cells = "def own(*given): return other(*given, (3, 4))", "def other(*given): return (3, 4)"

    def of(*parts: str) -> bytes:
        names: dict[str, Any] = {"__name__": __name__}
        for part in parts:
            exec(compile(part, "<cell>", "exec"), names)
        return notebook_identity(a_task(loss=names["own"]))

    assert of(*cells) == of("\n".join(cells))


def test_it_is_the_same_in_every_process() -> None:
    code = (
        "from tests.unit.learning.test_notebook_identity import *\n"
        "values = {'b', 'a', 'c'}, {frozenset('abc'), 1}, objects(1.0), Settings(1.0)\n"
        "print(notebook_identity(with_value(values)).hex())"
    )
    found = [
        subprocess.check_output(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": s}
        )
        for s in "12"
    ]
    assert found[0] == found[1]


def test_large_values_are_not_copied_many_times() -> None:
    megabytes = torch.zeros(1 << 22)
    tracemalloc.start()
    try:
        notebook_identity(with_value((megabytes, megabytes.numpy(), bytes(1 << 24))))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * (1 << 24)


@pytest.mark.parametrize("value", [{Settings(1.0)}, [1 << 20_000]], ids=["set", "number"])
def test_a_value_that_is_hard_to_identify_is_no_error(value: object) -> None:
    task = with_value(value)
    assert notebook_identity(task) != notebook_identity(task)


def test_what_cannot_be_identified_makes_each_task_another_one(tmp_path: Path) -> None:
    with (tmp_path / "words.txt").open("w+") as file:
        task = with_value(file)
        assert notebook_identity(task) != notebook_identity(task)
        file.write("it still works")
