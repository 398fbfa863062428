"""The steps in numpy against those in torch, which are compared with torch.optim themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from papaya.learning.definition import ClientSGD
from papaya.learning.executorch.client_optimizer import NumpyClientOptimizer
from papaya.learning.executorch.engine import ExecuTorchEngine
from papaya.learning.parameters import FLOAT32
from papaya.learning.schedules import CosineDecay, LinearDecay
from papaya.learning.torch.client_optimizer import TorchClientOptimizer
from papaya.learning.torch.engine import TorchEngine
from tests.unit.learning.executorch.small_program import EXAMPLES, loaded_task, program_file

STEPS = 15
WAYS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.5, "nesterov": True, "schedule": LinearDecay(warmup_steps=4)},
    {"proximal": 0.5, "max_gradient_norm": 1.0},
    {"optimizer": "adam", "weight_decay": 0.1, "schedule": CosineDecay(end=0.1)},
    {"optimizer": "adamw", "weight_decay": 0.1, "beta1": 0.3, "beta2": 0.9},
    {"optimizer": "adam", "epsilon": 1e-3, "proximal": 2.0},
]


@pytest.mark.parametrize("way", WAYS)
def test_both_optimizers_make_the_same_steps(way: dict[str, Any]) -> None:
    client = ClientSGD(rate=0.05, **way)
    rng = np.random.default_rng(3)
    ours = {name: rng.standard_normal(4).astype(FLOAT32) for name in "ab"}
    theirs = [torch.from_numpy(value.copy()) for value in ours.values()]
    numpy_steps = NumpyClientOptimizer(client, ours, STEPS)
    torch_steps = TorchClientOptimizer(client, theirs, STEPS)
    for _ in range(STEPS):
        gradients = {name: rng.standard_normal(4).astype(FLOAT32) for name in ours}
        numpy_steps.step(gradients)
        torch_steps.step([torch.from_numpy(gradient) for gradient in gradients.values()])
        for value, expected in zip(ours.values(), theirs, strict=True):
            np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("way", [WAYS[2], WAYS[4], WAYS[6]])
def test_both_engines_train_the_same_update_in_every_way(way: dict[str, Any]) -> None:
    client = ClientSGD(rate=0.05, epochs=3, batch_size=4, max_examples=30, **way)
    loaded, program = loaded_task(), program_file()
    eager = TorchEngine(replace(loaded, task=structs.replace(loaded.task, client=client)))
    theirs = eager.train(loaded.initial_parameters(seed=1), EXAMPLES, seed=4)
    header = structs.replace(program.header, client=client)
    engine = ExecuTorchEngine(structs.replace(program, header=header))
    ours = engine.train(loaded.initial_parameters(seed=1), EXAMPLES, seed=4)
    update, expected = (np.frombuffer(each[0], FLOAT32) for each in (ours, theirs))
    np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-6)
