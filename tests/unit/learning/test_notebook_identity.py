"""A task of a notebook is another one if anything that its code uses differs."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

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


def with_value(value: object) -> Task:
    return a_task(train=lambda local: repr(value))


@pytest.mark.parametrize(
    ("value", "equal", "other"),
    [
        (Settings(1.0), Settings(1.0), Settings(2.0)),
        (Random(1), Random(1), Random(2)),
        (torch.float32, torch.float32, torch.float64),
        (torch.arange(3), torch.arange(3), torch.arange(1, 4)),
        (OrderedDict(a=1), OrderedDict(a=1), OrderedDict(b=1)),
    ],
)
def test_objects_are_compared_by_their_content(value: object, equal: object, other: object) -> None:
    identity = notebook_identity(with_value(value))
    assert notebook_identity(with_value(equal)) == identity
    assert notebook_identity(with_value(other)) != identity


def test_what_cannot_be_identified_makes_each_task_another_one(tmp_path: Path) -> None:
    with (tmp_path / "words.txt").open("w+") as file:
        task = with_value(file)
        assert notebook_identity(task) != notebook_identity(task)
        file.write("it still works")
