"""A task file's own `load_examples` makes examples of texts: in a child process, with limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from papaya.device import training as training_module
from papaya.device.executor import Job, JobFailed, UnfitExample
from papaya.device.sandbox import Sandbox
from papaya.device.training import ExecutorTrainer
from papaya.errors import OperatorError

SOURCE = """
import os
import torch
from papaya.learning.task import ClientSGD, Examples, Task

def load_examples(text):
    if text == "mistake":
        return 1 / 0
    if text == "exit":
        os._exit(3)
    if text == "text":
        return ["not", "bytes"]
    return (word.encode() for word in text.split())

def lengths(examples):
    if b"bad" in examples:
        raise ValueError("a bad word")
    # Words of different lengths do not fit into one tensor.
    return (torch.tensor([list(example) for example in examples]),)

task = Task(
    name="words", model=lambda: torch.nn.Linear(1, 1), batch=lengths,
    loss=lambda module, words: module.weight.sum(), examples=Examples("words"),
    client=ClientSGD(rate=1.0), concurrency=2,
)
"""


class Loader:
    """A sandbox with the one file, and the loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self.file = folder / "words.py"
        self.file.write_text(SOURCE)
        self.sandbox = Sandbox([self.file], memory_mb=256)
        self._runner = runner

    def load(self, *texts: str) -> list[list[bytes]]:
        trainer = ExecutorTrainer(self.sandbox, lambda: 0.0, Random(1))
        return self._runner.run(trainer.load_examples(self.file, texts))

    def first_unfit(self, collection: str, *examples: bytes) -> tuple[str, UnfitExample] | None:
        trainer = ExecutorTrainer(self.sandbox, lambda: 0.0, Random(1))
        return self._runner.run(trainer.first_unfit(collection, examples))


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    with asyncio.Runner() as runner:
        found = Loader(runner, tmp_path_factory.mktemp("loading"))
        runner.run(found.sandbox.start())
        yield found
        runner.run(found.sandbox.close())


def test_texts_become_what_the_file_makes_of_them(loader: Loader) -> None:
    assert loader.load("a b", "", "c ü") == [[b"a", b"b"], [], [b"c", "ü".encode()]]
    assert loader.load() == []


def test_the_first_example_that_the_task_cannot_use_is_found(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loader.first_unfit("words", b"a", b"bb", b"a") is None
    assert loader.first_unfit("words", *[b"a"] * 100, b"bb", b"bad") == (
        "words",
        UnfitExample(101, "ValueError: a bad word"),
    )
    assert loader.first_unfit("other", b"bad") is None
    monkeypatch.setattr(training_module, "_LOAD_BYTES", 4)
    found = loader.first_unfit("words", b"a", b"bbb", b"c", b"bad")
    assert found is not None
    assert found[1].index == 3


def test_many_texts_go_in_lots(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "_LOAD_BYTES", 4)
    texts = ["one", "two", "three", "four", "five"]
    assert loader.load(*texts) == [[text.encode()] for text in texts]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("mistake", "ZeroDivisionError"),
        ("exit", "ended with status 3"),
        ("text", "returned a str, expected bytes"),
    ],
)
def test_a_loader_that_fails_is_named(loader: Loader, text: str, problem: str) -> None:
    with pytest.raises(OperatorError, match=problem) as caught:
        loader.load("fine", text)
    assert f"load_examples of {loader.file} failed" in str(caught.value)
    assert "list of bytes" in caught.value.hint
    assert loader.load("goes on") == [[b"goes", b"on"]]


def test_only_files_of_this_device_are_run(loader: Loader, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(SOURCE)
    job = Job("load", str(other), b"", (b"a",))
    with pytest.raises(JobFailed, match="not a task file of this device"):
        loader._runner.run(loader.sandbox.run(job, 60.0))
