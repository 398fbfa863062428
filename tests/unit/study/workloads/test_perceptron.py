"""The perceptron's data: what a model is judged on, no device holds."""

from __future__ import annotations

import numpy as np

from papaya.sim.draws import Floats
from papaya.study.workloads.base import Clients, Matrix
from papaya.study.workloads.perceptron import Prototypes, PrototypesConfig
from papaya.study.workloads.perceptron_trainers import PerceptronLabels

DEVICES = np.arange(300)
LOUD = PrototypesConfig(noise=1e6)  # beside which a prototype, and so the label, is nothing


def test_no_device_trains_on_what_is_held_out() -> None:
    source = Prototypes(config=LOUD)
    judged: set[bytes] = set()

    def see(features: Matrix, labels: PerceptronLabels) -> Floats:
        judged.update(_noise(features))
        return np.zeros(len(features))

    source.quality(see)
    clients = Clients(DEVICES, np.zeros_like(DEVICES), np.full_like(DEVICES, 4))
    examples = source.examples(clients, most=4)
    assert len(judged) == 2048
    assert len(examples.features) == 4 * len(DEVICES)
    assert judged.isdisjoint(_noise(examples.features))


def _noise(features: Matrix) -> set[bytes]:
    return {row.tobytes() for row in features > 0}
