"""The example task: it loads, and a few updates from real sources make its perplexity fall."""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import json.encoder
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from msgspec import structs

from papaya.learning.evaluation import summarize
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.task import LoadedTask, load_task
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.module import tried_batch
from papaya.learning.weighting import WeightedSum

PATH = Path(__file__).parents[4] / "examples" / "next_word.py"


@pytest.fixture(scope="module")
def loaded() -> LoadedTask:
    return load_task(PATH)


@pytest.fixture(scope="module")
def module(loaded: LoadedTask) -> ModuleType:
    return sys.modules["papaya_task_" + loaded.module_hash.removeprefix("sha256:")]


def place(module: ModuleType, word: str) -> int:
    field = structs.replace(module.task.batch[0], count=1)
    return int(field.read(word.encode())[0])


def test_every_word_of_a_text_but_the_last_few_is_predicted_once(module: ModuleType) -> None:
    text = "def f(x):\n    return x + 1  # again\n" * 9
    examples = module.load_examples(text)
    before, targets = module.pairs(tried_batch(module.task, examples)[0])
    words = [place(module, w if w != "\n" else "<line>") for w in module._WORD.findall(text)]
    assert targets.tolist() == words[: len(words) // 8 * 8]
    assert before[0].tolist() == [place(module, "<start>")] * 3
    assert before[3:].tolist() == [words[i : i + 3] for i in range(len(targets) - 3)]
    assert module.load_examples("") == []


def test_the_common_words_have_places_of_their_own(module: ModuleType) -> None:
    places = [place(module, word) for word in ("one_of_many", "zebra", "äöü", "def")]
    assert places[0] >= module.SHARED
    assert places[3] < module.SHARED
    assert all(place < module.PLACES for place in places)


def test_a_few_updates_make_the_perplexity_fall(loaded: LoadedTask, module: ModuleType) -> None:
    engine = TorchEngine(loaded)
    sources = [inspect.getsource(source) for source in (argparse, json.decoder, json.encoder)]
    devices = [module.load_examples(source)[:250] for source in sources]
    parameters = loaded.initial_parameters(seed=0)

    def perplexity(model: Vector) -> float:
        sums = [engine.evaluate(model, data[::5], len(data)) for data in devices]
        return summarize(np.sum([np.frombuffer(s, FLOAT32) for s in sums], axis=0)).all.perplexity

    first = perplexity(parameters)
    assert first == pytest.approx(module.PLACES, rel=0.05), "it knows nothing yet"
    optimizer = server_optimizer(loaded.task.optimizer)
    state = optimizer.initial_state(parameters.size)
    for version in range(6):
        buffer = WeightedSum.zero(parameters.size)
        for data in devices:
            update, examples = engine.train(parameters, data, seed=version)
            buffer.add(np.frombuffer(update, FLOAT32), examples, staleness=0)
        parameters, state = optimizer.step(parameters, buffer.mean(), state)
    assert perplexity(parameters) < first / 2
