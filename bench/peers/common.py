"""What all systems share: clients, first model, rounds, judge, and the dialogue with `run.py`.

    run.py  -> {"rounds": [2, 12]}        train these rounds
    system  <- {"cpu_s": 0.8, "wall_s": 0.81}
    run.py  -> {"judge": true}
    system  <- {"loss": 1.23}

Lines of JSON on a system's standard input and output; the first line names its versions. A system
gets `Data`, trains one cohort at a time and gives its parameters back in the layout of `SHAPES`,
where the same numpy code judges all of them.
Imports numpy and nothing else, so that every virtual environment can read it.
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

COHORT = 100
COHORTS = 20  # ordinary ones: round r trains cohort r modulo this
BATCH = 32
RATE = 1.0
VOCABULARY, EMBEDDING, CELLS, STEPS = 100, 32, 64, 20

_MEDIAN, _SIGMA, _CAP = 20, 1.2, 1500
_HELD_OUT = 2_000
_SUCCESSORS = 8


class Data:
    """Clients as slices of two arrays: what goes in, and what should come out.

    Cohort 0 has one client of every size up to a full batch, so that a system which compiles for
    each shape of a batch has met them all; then come `COHORTS` of `COHORT` ordinary clients.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        self.inputs, self.targets = arrays.pop("inputs"), arrays.pop("targets")
        self.offsets: Array = arrays.pop("offsets")
        self.held_out = arrays.pop("held_inputs"), arrays.pop("held_targets")
        self.first_model = {name: arrays[name] for name in sorted(arrays)}

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

    def loss(self, parameters: dict[str, Array]) -> float:
        """Mean cross-entropy on data that no client has."""
        wide = {name: value.astype(np.float64) for name, value in parameters.items()}
        inputs, targets = self.held_out
        scores = _forward(wide, inputs)
        scores -= scores.max(axis=-1, keepdims=True)
        chosen = np.take_along_axis(scores, targets[..., None].astype(np.int64), axis=-1)
        return float((np.log(np.exp(scores).sum(axis=-1)) - chosen[..., 0]).mean())


class System(Protocol):
    """A trainer and an aggregator: federated averaging, weighted by examples."""

    versions: ClassVar[dict[str, str]]

    def train(self, cohort: range) -> None:
        """One round, finished when this returns: the next starts from its model."""

    def parameters(self) -> dict[str, Array]:
        """The current model, in the layout and under the names of the first one."""


def write(folder: Path, seed: int) -> Path:
    """The clients and the first model, drawn once for all systems."""
    draw = np.random.default_rng(seed)
    volumes = _MEDIAN * np.exp(_SIGMA * draw.standard_normal(COHORTS * COHORT))
    examples = np.clip(np.rint(volumes), 1, _CAP).astype(np.int64)
    examples = np.concatenate([np.arange(1, BATCH + 1), examples])
    offsets = np.concatenate([[0], np.cumsum(examples)])
    inputs, targets = _sentences(draw, int(offsets[-1]) + _HELD_OUT)
    path = folder / "clients.npz"
    columns: dict[str, Any] = {
        "offsets": offsets,
        "inputs": inputs[:-_HELD_OUT],
        "targets": targets[:-_HELD_OUT],
        "held_inputs": inputs[-_HELD_OUT:],
        "held_targets": targets[-_HELD_OUT:],
    }
    np.savez(path, **columns, **_first_model(draw))
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
            "first_loss": round(data.loss(data.first_model), 6),
        }
    )
    for line in sys.stdin:
        asked = json.loads(line)
        if "judge" in asked:
            answer({"loss": data.loss(system.parameters())})
        else:
            answer(_timed(system, data, range(*asked["rounds"])))


def _timed(system: System, data: Data, rounds: range) -> dict[str, object]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for number in rounds:
        system.train(data.cohort(number))
    return {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}


def _sentences(draw: np.random.Generator, count: int) -> tuple[Array, Array]:
    """A Markov chain: each word is followed by one of a few others, mostly by the first."""
    followers = draw.integers(0, VOCABULARY, (VOCABULARY, _SUCCESSORS))
    choices = np.minimum(draw.geometric(0.5, (count, STEPS)) - 1, _SUCCESSORS - 1)
    words = np.empty((count, STEPS + 1), np.int32)
    words[:, 0] = draw.integers(0, VOCABULARY, count)
    for step in range(STEPS):
        words[:, step + 1] = followers[words[:, step], choices[:, step]]
    return np.ascontiguousarray(words[:, :-1]), np.ascontiguousarray(words[:, 1:])


def _first_model(draw: np.random.Generator) -> dict[str, Any]:
    """Uniform, within one over the root of a row's inputs; biases start at zero."""
    arrays = {}
    for name, shape in SHAPES.items():
        bound = 1 / np.sqrt(shape[0])
        drawn = draw.uniform(-bound, bound, shape) if len(shape) > 1 else np.zeros(shape)
        arrays[name] = drawn.astype(np.float32)
    return arrays


# Gates in PyTorch's order (input, forget, cell, output) and with its two biases, both trained.
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (VOCABULARY, EMBEDDING),
    "input": (EMBEDDING, 4 * CELLS),
    "recurrent": (CELLS, 4 * CELLS),
    "input_bias": (4 * CELLS,),
    "recurrent_bias": (4 * CELLS,),
    "output": (CELLS, VOCABULARY),
    "output_bias": (VOCABULARY,),
}


def _forward(p: dict[str, Array], inputs: Array) -> Array:
    cell = hidden = np.zeros((len(inputs), CELLS))
    scores = np.empty((*inputs.shape, VOCABULARY))
    for step in range(STEPS):
        gates = p["embedding"][inputs[:, step]] @ p["input"] + p["input_bias"]
        gates += hidden @ p["recurrent"] + p["recurrent_bias"]
        enter, forget, new, leave = np.split(gates, 4, axis=1)
        cell = _sigmoid(forget) * cell + _sigmoid(enter) * np.tanh(new)
        hidden = _sigmoid(leave) * np.tanh(cell)
        scores[:, step] = hidden @ p["output"] + p["output_bias"]
    return scores


def _sigmoid(values: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-values))
    return result
