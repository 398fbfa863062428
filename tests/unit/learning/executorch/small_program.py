"""A task of two numbers and a sum, compiled once for each process."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from papaya.learning.executorch.program_file import ProgramFile, decode_program
from papaya.learning.task import LoadedTask, load_task

SOURCE = """
from torch import nn
from papaya.learning.example_fields import Numbers
from papaya.learning.task import AsyncFL, ClientSGD, Examples, SecureAggregation, Task

task = Task(
    name="sums",
    model=lambda: nn.Linear(2, 1),
    batch=(Numbers(2), Numbers(1, start=2)),
    loss=lambda module, x, y: (module(x) - y).square()[:, 0],
    examples=Examples("numbers", limit=40),
    client=ClientSGD(rate=0.1, batch_size=4, max_examples=30),
    concurrency=4,
    clip=0.5,
    regime=AsyncFL(aggregation_goal=2),
    secure_aggregation=SecureAggregation(),
    participation_gap_s=0.0,
    sample=[b"1,2,3", b"0.5,-1,-0.5", b"-2,1,-1"],
)
"""
EXAMPLES = [f"{x},{y},{x + y}".encode() for x in (-1, 0, 0.5) for y in (-2, 1, 3)]


@cache
def loaded_task() -> LoadedTask:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sums.py"
        path.write_text(SOURCE)
        return load_task(path)


@cache
def program_bytes() -> bytes:
    from papaya.learning.torch.export import compile_task

    return compile_task(loaded_task())


def program_file() -> ProgramFile:
    return decode_program(program_bytes())
