"""What all systems share: clients, first model, rounds, and the dialogue with `run.py`.

    run.py  -> {"rounds": [2, 3]}          train these rounds
    system  <- {"cpu_s": 0.8, "wall_s": 0.81}
    run.py  -> {"save": "model.npz"}       write the trained parameters, by PyTorch's names
    system  <- {}

Lines of JSON on a system's standard input and output; the first line names its versions. Imports
numpy and nothing else, so that every virtual environment can read it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MODELS = ("perceptron", "cnn", "transformer", "lora", "gru", "lstm")
COHORT = 100
COHORTS = 6  # ordinary ones: round r trains cohort r modulo this
BATCH = 32
RATES = {"perceptron": 0.1, "cnn": 0.1, "transformer": 0.3, "lora": 0.3, "gru": 1.0, "lstm": 1.0}

_MEDIAN, _SIGMA, _CAP = 20, 1.2, 1500
_HELD_OUT = 1_000
_SUCCESSORS = 8
_WORDS, _STEPS, _CLASSES = 100, 20, 10  # as in torch_models.py, which these environments lack
_SHAPES = {"perceptron": (64,), "cnn": (1, 28, 28)}


class Data:
    """Clients as slices of two arrays: what goes in, and what should come out.

    Cohort 0 has one client of every size up to a full batch, so that a system which compiles for
    each shape of a batch has met them all; then come `COHORTS` of `COHORT` ordinary clients.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        about = json.loads(arrays.pop("about").tobytes())
        self.model: str = about["model"]
        self.form: dict[str, Any] = about["form"]
        self.rate = RATES[self.model]
        self.inputs, self.targets = arrays.pop("inputs"), arrays.pop("targets")
        self.offsets: Array = arrays.pop("offsets")
        self.held_out = arrays.pop("held_inputs"), arrays.pop("held_targets")
        self.trained = {n[2:]: arrays[n] for n in arrays if n.startswith("t.")}
        self.frozen = {n[2:]: arrays[n] for n in arrays if n.startswith("f.")}

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    def slice(self, client: int) -> slice:
        return slice(int(self.offsets[client]), int(self.offsets[client + 1]))

    def cohort(self, number: int) -> range:
        """The clients of a round; round 0 warms up."""
        if number == 0:
            return range(BATCH)
        start = BATCH + COHORT * ((number - 1) % COHORTS)
        return range(start, start + COHORT)


class System(Protocol):
    """A trainer and an aggregator: federated averaging, weighted by examples."""

    versions: ClassVar[dict[str, str]]

    def train(self, cohort: range) -> None:
        """One round, finished when this returns: the next starts from its model."""

    def parameters(self) -> dict[str, Array]:
        """The trained parameters of the current model, by PyTorch's names."""


def drawn_form(seed: int) -> dict[str, Any]:
    """The perceptron of this seed."""
    draw = np.random.default_rng([seed, 1])
    return {
        "depth": int(draw.integers(1, 5)),
        "width": int(draw.integers(16, 129)),
        "activation": str(draw.choice(["relu", "tanh", "sigmoid"])),
    }


def write(
    path: Path, model: str, seed: int, trained: dict[str, Array], frozen: dict[str, Array]
) -> Path:
    """The clients, drawn once for all systems, and the first model."""
    draw = np.random.default_rng([seed, MODELS.index(model)])
    volumes = _MEDIAN * np.exp(_SIGMA * draw.standard_normal(COHORTS * COHORT))
    examples = np.clip(np.rint(volumes), 1, _CAP).astype(np.int64)
    examples = np.concatenate([np.arange(1, BATCH + 1), examples])
    offsets = np.concatenate([[0], np.cumsum(examples)])
    count = int(offsets[-1]) + _HELD_OUT
    make = _classified if model in _SHAPES else _sentences
    inputs, targets = make(draw, count, _SHAPES.get(model, ()))
    about = json.dumps({"model": model, "form": drawn_form(seed)}).encode()
    columns: dict[str, Any] = {
        "about": np.frombuffer(about, np.uint8),
        "offsets": offsets,
        "inputs": inputs[:-_HELD_OUT],
        "targets": targets[:-_HELD_OUT],
        "held_inputs": inputs[-_HELD_OUT:],
        "held_targets": targets[-_HELD_OUT:],
    }
    columns |= {f"t.{name}": value for name, value in trained.items()}
    columns |= {f"f.{name}": value for name, value in frozen.items()}
    np.savez(path, **columns)
    return path


def serve(make: Callable[[Data], System]) -> None:
    """The life of a system: warm up, then rounds as they are asked for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer

    def answer(line: dict[str, object]) -> None:
        print(json.dumps(line), file=answers, flush=True)

    start_s = time.perf_counter()
    data = Data(Path(sys.argv[1]))
    system = make(data)
    ready_s = time.perf_counter()
    system.train(data.cohort(0))
    warm_s = time.perf_counter()
    answer(
        {
            "versions": system.versions,
            "set_up_s": round(ready_s - start_s, 2),
            "warm_up_s": round(warm_s - ready_s, 2),
        }
    )
    for line in sys.stdin:
        asked = json.loads(line)
        if "save" in asked:
            np.savez(asked["save"], **system.parameters())  # type: ignore[arg-type]
            answer({})
        else:
            answer(_timed(system, data, range(*asked["rounds"])))


def _timed(system: System, data: Data, rounds: range) -> dict[str, object]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for number in rounds:
        system.train(data.cohort(number))
    return {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}


def _classified(
    draw: np.random.Generator, count: int, shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """Noise around the middle of a class."""
    middles = draw.standard_normal((_CLASSES, *shape)).astype(np.float32)
    targets = draw.integers(0, _CLASSES, count).astype(np.int64)
    noise = draw.standard_normal((count, *shape), dtype=np.float32)
    return 0.3 * middles[targets] + noise, targets


def _sentences(
    draw: np.random.Generator, count: int, shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """A Markov chain: each word is followed by one of a few others, mostly by the first."""
    followers = draw.integers(0, _WORDS, (_WORDS, _SUCCESSORS))
    choices = np.minimum(draw.geometric(0.5, (count, _STEPS)) - 1, _SUCCESSORS - 1)
    words = np.empty((count, _STEPS + 1), np.int64)
    words[:, 0] = draw.integers(0, _WORDS, count)
    for step in range(_STEPS):
        words[:, step + 1] = followers[words[:, step], choices[:, step]]
    return np.ascontiguousarray(words[:, :-1]), np.ascontiguousarray(words[:, 1:])
