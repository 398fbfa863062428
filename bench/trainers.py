"""Claim: built-in models train 20 times (perceptron) and twice (LSTM) as fast as a torch loop.

The torch loop is a tuned one: one module for all clients, slices instead of loaders, one fused call
for a step. These are floors; the comparison with other systems is in bench/peers. Clients have
20·exp(1.2·z) examples, at most 1500; batches of 32, one epoch, one thread. All trainers take turns
on the same clients, and the fastest turn of each counts, in CPU time, because machines are noisy.
Compilation is not counted.
Run as `python bench/trainers.py`; prints one JSON line per case with value, target and whether it
passed. A trainer that disagrees with the torch loop exits with 1; a slow one is only reported.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read once, when numpy is imported

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import FLOAT32, Vector
from papaya.sim.draws import Ints
from papaya.sim.population import DEFAULT, Population
from papaya.study.workloads.base import Clients, Matrix
from papaya.study.workloads.lstm import Lstm
from papaya.study.workloads.lstm_trainers import CompiledLstm, TorchLstm
from papaya.study.workloads.perceptron import Perceptron
from papaya.study.workloads.perceptron_trainers import (
    CompiledPerceptron,
    PerceptronExamples,
    PerceptronSizes,
    StackedPerceptron,
)

TURNS = 12
CLIENTS = {"perceptron": 400, "lstm": 60}
STARTS = 5
TARGETS = {"perceptron numba": 20.0, "perceptron numpy": 8.0, "lstm numba": 2.0}
CLIENTS_PER_S = {"perceptron": 20_000, "lstm": 600}


class TorchPerceptron:
    """The tuned loop."""

    name = "torch"

    def __init__(self, sizes: PerceptronSizes) -> None:
        torch.set_num_threads(1)
        parts: list[torch.nn.Module] = []
        for inward, outward in pairwise(sizes.layers):
            parts += [torch.nn.Linear(inward, outward), torch.nn.ReLU()]
        self._net = torch.nn.Sequential(*parts[:-1])
        self._parameters = list(self._net.parameters())
        self._lengths = [value.numel() for value in self._parameters]

    def train(
        self, models: list[Vector], start: Ints, examples: PerceptronExamples, sgd: ClientSGD
    ) -> Matrix:
        features = torch.from_numpy(examples.features)
        labels = torch.from_numpy(examples.labels.astype(np.int64))
        updates = np.empty((len(start), len(models[0])), FLOAT32)
        for client, (first, last) in enumerate(pairwise(examples.offsets.tolist())):
            model = torch.from_numpy(models[start[client]].copy())
            with torch.no_grad():
                for value, piece in zip(self._parameters, model.split(self._lengths), strict=True):
                    value.copy_(piece.view_as(value))
            for done in range(first, last, sgd.batch_size):
                rows = slice(done, min(done + sgd.batch_size, last))
                loss = torch.nn.functional.cross_entropy(self._net(features[rows]), labels[rows])
                gradients = torch.autograd.grad(loss, self._parameters)
                with torch.no_grad():
                    torch._foreach_add_(self._parameters, gradients, alpha=-sgd.rate)
            trained = [value.detach().numpy().ravel() for value in self._parameters]
            updates[client] = np.concatenate(trained) - models[start[client]]
        return updates


def report(case: str, value: float, target: float, **more: float) -> None:
    line = {"bench": "trainers", "case": case, "value": round(value, 2), "target": target}
    rounded = {name: round(number, 1) for name, number in more.items()}
    print(json.dumps(line | {"passed": value >= target} | rounded, ensure_ascii=False), flush=True)


def best_s(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The shortest CPU time of each; they take turns."""
    found = dict.fromkeys(works, float("inf"))
    for _ in range(TURNS):
        for name, work in works.items():
            start_s = time.process_time()
            work()
            found[name] = min(found[name], time.process_time() - start_s)
    return found


def clients(count: int) -> Clients:
    visits = Population(DEFAULT, seed=1).visitors(np.arange(count))
    return Clients(visits.device, visits.participation, visits.examples)


def race(
    model: str,
    trains: dict[str, Callable[[], Matrix]],
    whole: Callable[[], Matrix],
) -> None:
    """`trains` is given its data; `whole` is the workload, which draws them as well."""
    expected = trains["torch"]()
    for name, train in [*trains.items(), ("workload", whole)]:
        error = float(np.abs(train() - expected).max() / np.abs(expected).max())
        if error > 1e-4:
            print(f"wrong result: {model} {name} is off by {error:.1e}", file=sys.stderr)
            sys.exit(1)
    seconds = best_s({**trains, "workload": whole})
    count = CLIENTS[model]
    for name in trains:
        if name != "torch":
            report(
                f"{model}, {name} ÷ tuned torch loop",
                seconds["torch"] / seconds[name],
                TARGETS[f"{model} {name}"],
                clients_per_s=count / seconds[name],
                torch_clients_per_s=count / seconds["torch"],
            )
    rate = count / seconds["workload"]
    report(f"{model}, clients per CPU second with their data drawn", rate, CLIENTS_PER_S[model])


def main() -> None:
    perceptron, sgd = Perceptron(), ClientSGD(rate=0.1)
    members = clients(CLIENTS["perceptron"])
    start = np.arange(len(members)) % STARTS
    models = [perceptron.initial(seed) for seed in range(STARTS)]
    examples = perceptron.source.examples(members, sgd.max_examples)
    kinds = (TorchPerceptron, CompiledPerceptron, StackedPerceptron)
    perceptrons = [kind(perceptron.sizes) for kind in kinds]
    race(
        "perceptron",
        {
            each.name: lambda each=each: each.train(models, start, examples, sgd)
            for each in perceptrons
        },
        lambda: perceptron.train(models, start, members, sgd),
    )
    lstm, rate = Lstm(), ClientSGD(rate=1.0)
    speakers = clients(CLIENTS["lstm"])
    first = np.arange(len(speakers)) % STARTS
    versions = [lstm.initial(seed) for seed in range(STARTS)]
    data = lstm.source.sequences(speakers, rate.max_examples)
    lstms = [kind(lstm.sizes) for kind in (TorchLstm, CompiledLstm)]
    race(
        "lstm",
        {each.name: lambda each=each: each.train(versions, first, *data, rate) for each in lstms},
        lambda: lstm.train(versions, first, speakers, rate),
    )


if __name__ == "__main__":
    main()
