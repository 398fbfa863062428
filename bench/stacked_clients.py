"""Claim: several clients in one call of a compiled gradient gain little, and change bits.

Batches of equal size need no padding: `torch.func.vmap` maps the gradient over clients, each with
its own parameters and batch, and Inductor compiles the result like that of one client. For a
perceptron with three hidden layers of 53, this prints for each batch size the CPU time of a client
alone and of one in a stack, and how many of the clients have the same bits in both.

The value is the time alone divided by that in a stack, for full batches of 32. It is the most that
stacks could give: what surrounds the gradients takes as long in both.

Run as `python bench/stacked_clients.py`; it compiles for a minute or two and prints one JSON line
per batch size, and one for the claim. Gradients that differ by more than the tolerance of compiled
gradients exit with 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from papaya.learning.definition import ClientSGD, Examples, Task
from papaya.learning.torch.compiled_gradient import TOLERANCE, trace_gradient
from papaya.learning.torch.module import make_module

SIZES = (2, 7, 20, 32)
CLIENTS = 16
_TURNS = 15
_MOST_GAIN = 1.5


def loss(module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in operators that vmap takes for any number of clients."""
    scores = module(inputs)
    mean: Tensor = (scores.exp().sum(-1).log() - (scores * targets).sum(-1)).mean()
    return mean


def model() -> nn.Module:
    widths = (64, 53, 53, 53, 10)
    layers: list[nn.Module] = []
    for wide, next_wide in pairwise(widths):
        layers += [nn.Linear(wide, next_wide), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    task = Task(
        name="stacked",
        model=model,
        loss=loss,
        batch=lambda examples: (),
        examples=Examples("bench"),
        client=ClientSGD(rate=0.1),
        concurrency=10,
    )
    traced = trace_gradient(task, make_module(task).train(), batch_of(8))
    rows = torch.export.Dim("rows", min=2)
    together = tuple(torch.stack([value] * CLIENTS) for value in traced.inputs)
    alone = compiled(traced.graph, traced.inputs, (None, {0: rows}, {0: rows}))
    for node in traced.graph.graph.nodes:
        if node.target is torch.ops.aten.sym_size.int:  # vmap has no rule for it
            node.op, node.target = "call_method", "size"
    traced.graph.recompile()
    stacked = compiled(torch.func.vmap(traced.graph), together, (None, {1: rows}, {1: rows}))
    gains = {size: compare(traced.inputs[0], alone, stacked, size) for size in SIZES}
    gain = gains[SIZES[-1]]
    say("full batches", value=round(gain, 2), target=_MOST_GAIN, passed=gain <= _MOST_GAIN)


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    targets = nn.functional.one_hot(torch.randint(10, (rows,)), 10)
    return torch.randn(rows, 64), targets.float()


def compiled(graph: Callable[..., Any], inputs: tuple[Tensor, ...], shapes: tuple[Any, ...]) -> Any:
    import torch._inductor
    import torch._inductor.config

    class Graph(nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return graph(*given)

    with tempfile.TemporaryDirectory() as folder, torch._inductor.config.patch({"cpp.threads": 1}):
        program = torch.export.export(Graph(), inputs, dynamic_shapes=(shapes,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/run.pt2")
        return torch._inductor.aoti_load_package(path).loader.run


def compare(first: Tensor, alone: Any, stacked: Any, size: int) -> float:
    parameters = torch.stack([first + 0.01 * torch.randn_like(first) for _ in range(CLIENTS)])
    batches = [batch_of(size) for _ in range(CLIENTS)]
    inputs, targets = (torch.stack(values) for values in zip(*batches, strict=True))
    rows = [[row.clone(), *batch] for row, batch in zip(parameters, batches, strict=True)]
    expected = torch.stack([alone(row)[1] for row in rows])
    found = stacked([parameters, inputs, targets])[1]
    if (error := float((found - expected).norm() / expected.norm())) > TOLERANCE:
        sys.exit(f"gradients of {size} examples are off by {error:.1e} of their norm")
    single_us = least_us(lambda: [alone(row) for row in rows]) / CLIENTS
    stacked_us = least_us(lambda: stacked([parameters, inputs, targets])) / CLIENTS
    say(
        f"batches of {size}",
        value=round(single_us / stacked_us, 2),
        alone_us=round(single_us, 1),
        stacked_us=round(stacked_us, 1),
        clients_with_the_same_bits=int((found == expected).all(1).sum()),
        clients=CLIENTS,
    )
    return single_us / stacked_us


def least_us(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_TURNS):
        start_s = time.process_time()
        for _ in range(10):
            work()
        times.append(time.process_time() - start_s)
    return min(times) / 10 * 1e6


def say(case: str, **about: object) -> None:
    print(json.dumps({"bench": "stacked_clients", "case": case} | about), flush=True)


if __name__ == "__main__":
    main()
