"""The LSTM's data: what a model is judged on, no device holds."""

from __future__ import annotations

import numpy as np

from papaya.sim.draws import Floats
from papaya.study.workloads.base import Clients
from papaya.study.workloads.language import Language
from papaya.study.workloads.lstm import Walks
from papaya.study.workloads.lstm_trainers import Tokens

DEVICES = np.arange(300)


def test_no_device_trains_on_what_is_held_out() -> None:
    source = Walks(Language())
    judged: set[bytes] = set()

    def see(walks: Tokens) -> Floats:
        judged.update(walk.tobytes() for walk in walks)
        return np.zeros(len(walks))

    source.quality(see)
    clients = Clients(DEVICES, np.zeros_like(DEVICES), np.full_like(DEVICES, 4))
    walks, offsets = source.sequences(clients, most=4)
    assert len(judged) > 1000
    assert offsets[-1] == 4 * len(DEVICES)
    assert judged.isdisjoint(walk.tobytes() for walk in walks)
