"""The task file that the documentation shows: it loads, and it learns from a handful of devices."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np

from papaya.learning.evaluation import summarize
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.task import load_task
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.weighting import WeightedSum

PATH = Path(__file__).resolve().parents[2] / "examples" / "opened.py"


def phone(seed: int) -> list[bytes]:
    """Opened at day and soon after the phone was used; not always, and not alike on all phones."""
    rng = Random(seed)
    lines = []
    for _ in range(rng.randrange(40, 200)):
        hour, minutes = rng.uniform(0, 24), rng.expovariate(1 / 60)
        opened = rng.random() < (0.9 if 7 < hour < 22 and minutes < 60 else 0.1)
        lines.append(f"{hour:.1f},{minutes:.0f},{int(opened)}".encode())
    return lines


def test_the_example_of_the_documentation_learns() -> None:
    loaded = load_task(PATH)
    engine, config = TorchEngine(loaded), loaded.config()
    phones, held_out = [phone(seed) for seed in range(4)], phone(99)
    optimizer = server_optimizer(config.optimizer)
    parameters = loaded.initial_parameters(seed=0)
    state = optimizer.initial_state(config.model_length)

    def loss(of: Vector) -> float:
        uploaded = engine.evaluate(of, held_out, volume=len(held_out))
        bounds = loaded.task.metric_bounds
        return summarize(np.frombuffer(uploaded, FLOAT32), metrics=bounds).all.loss

    before = loss(parameters)
    for version in range(config.stop.versions or 0):
        update, examples = engine.train(parameters, phones[version % 4], seed=version)
        total = WeightedSum.zero(config.model_length)
        total.add(np.frombuffer(update, FLOAT32), examples, 0)
        parameters, state = optimizer.step(parameters, total.mean(), state)
    assert loss(parameters) < 0.8 * before
