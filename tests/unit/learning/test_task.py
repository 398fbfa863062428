"""Task files: what an owner may write, and what is refused with file and line."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import safetensors.numpy

from papaya.config import EvaluationPlan, Requirements, StopRule, SyncFL
from papaya.errors import OperatorError
from papaya.learning.checkpoint_files import save_named
from papaya.learning.task import LoadedTask, load_task

HEAD = """\
import functools
import torch
from torch import nn
from papaya.learning.task import *

def loss(module, x, y):
    return ((module(x) - y) ** 2).mean()

def batch(examples):
    numbers = torch.tensor([[float(n) for n in e.split()] for e in examples])
    return numbers[:, :2], numbers[:, 2:]

def model():
    return nn.Linear(2, 1)

settings = dict(
    name="line", model=model, loss=loss, batch=batch, examples=Examples("points"),
    client=ClientSGD(rate=0.1), concurrency=20, sample=[b"1 2 3", b"0 1 1"],
)
a_task = functools.partial(Task, **settings)
"""
LINES = HEAD.count("\n")


def load(folder: Path, source: str) -> LoadedTask:
    (folder / "my_neighbour.py").write_text("")
    path = folder / "my_task.py"
    path.write_text(dedent(source))
    return load_task(path)


def test_the_module_that_owners_import_does_not_import_torch() -> None:
    check = "import papaya.learning.task, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_task_file_gives_manifest_hash_and_configuration(tmp_path: Path) -> None:
    source = HEAD + dedent("""
        task = a_task(
            regime=SyncFL(over_selection=0.5),
            client=ClientSGD(rate=0.1, max_examples=77),
            requirements=Requirements(min_memory_mb=64, labels=("beta",)),
            clip=2.0, training_timeout_s=60.0, stop=StopRule(versions=9, patience=2),
            evaluation=EvaluationPlan(every_versions=3), durability="step",
        )
        """)
    loaded = load(tmp_path, source)
    assert loaded.manifest.tensors == (("weight", (1, 2)), ("bias", (1,)))
    digest = hashlib.sha256(source.encode()).hexdigest()
    assert loaded.module_hash == "sha256:" + digest[:32]
    config = loaded.config()
    assert config.requirements == Requirements("torch", loaded.module_hash, 64, ("beta",))
    assert (config.task, config.model_length, config.max_examples) == ("line", 3, 77)
    assert (config.clip, config.training_timeout_s, config.durability) == (2.0, 60.0, "step")
    assert config.regime == SyncFL(over_selection=0.5)
    assert config.stop == StopRule(versions=9, patience=2)
    assert config.evaluation == EvaluationPlan(every_versions=3)


def test_the_model_starts_from_its_own_initialisation_by_seed(tmp_path: Path) -> None:
    loaded = load(tmp_path, HEAD + "task = a_task()")
    first = loaded.initial_parameters(seed=1)
    assert first.tobytes() == loaded.initial_parameters(seed=1).tobytes()
    assert first.tobytes() != loaded.initial_parameters(seed=2).tobytes()
    assert (first.dtype, first.shape) == (np.dtype("<f4"), (3,))


def test_the_model_starts_from_a_checkpoint(tmp_path: Path) -> None:
    loaded = load(tmp_path, HEAD + "task = a_task()")
    checkpoint = tmp_path / "m.safetensors"
    vector = np.array([1, 2, 3], np.float32)
    save_named(checkpoint, loaded.manifest, vector)
    assert loaded.initial_parameters(checkpoint=checkpoint).tolist() == [1, 2, 3]
    safetensors.numpy.save_file({"weight": np.ones((2, 1), np.float32)}, checkpoint)
    with pytest.raises(OperatorError, match=r"m\.safetensors.*lacks"):
        loaded.initial_parameters(checkpoint=checkpoint)


def test_a_constant_buffer_a_tied_and_a_frozen_parameter_are_fine(tmp_path: Path) -> None:
    source = HEAD + dedent("""
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = self.b = nn.Linear(2, 1, bias=False)
                self.c = nn.Parameter(torch.ones(1), requires_grad=False)
                self.register_buffer("d", torch.ones(1))
            def forward(self, x):
                return self.a(x) + self.b(x) * self.c + self.d
        task = a_task(model=Model)
        """)
    assert load(tmp_path, source).manifest.tensors == (("a.weight", (1, 2)),)


FROZEN = """
def frozen():
    module = nn.Sequential(model(), nn.Linear(1, 1))
    module[0].requires_grad_(False)
    return module
task = a_task(model=frozen)
"""
COUNTING = """
def counting():
    module = model()
    module.register_buffer("seen", torch.zeros(1))
    return module
def count(module, x, y):
    module.seen += 1
    return loss(module, x, y)
task = a_task(model=counting, loss=count)
"""
REMEMBERING = """
class Remembering(nn.Linear):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last
task = a_task(model=lambda: Remembering(2, 1))
"""
SECURE = """HUGE = AsyncFL(aggregation_goal=10**9)
task = a_task(clip=1.0, secure_aggregation=SecureAggregation(), regime=HUGE)
"""


def test_a_module_may_remember_what_it_computed(tmp_path: Path) -> None:
    """A tensor that the loss adds was not there when the module was made, on any device."""
    loaded = load(tmp_path, HEAD + REMEMBERING)
    assert "." not in loaded.module_hash


# What follows HEAD; the line within it that the message must name (0: none); the complaint.
BAD = {
    "syntax": ("task = a_task(", 1, "syntax error"),
    "null byte": ("task = 1\0", None, "syntax error"),
    "raises": ("\n1 / 0", 2, "ZeroDivisionError"),
    "exits": ("exit('goodbye')", 1, "SystemExit: goodbye"),
    "no task": ("pass", 0, "no `task`"),
    "another name": ("job = a_task()", 0, r"no `task`, only \['job'\]"),
    "not a task": ("task = 5", 0, "no `task`"),
    "two tasks": (
        "task = a_task()\nother = a_task()",
        0,
        r"more tasks than `task`: \['other'\]",
    ),
    "a neighbour": ("import my_neighbour", 1, "my_neighbour"),
    "bad name": ("task = a_task(name='My Task')", 1, "task = 'My Task'"),
    "bad value": ("task = a_task(concurrency=0)", 1, "concurrency = 0"),
    "bad type": ("task = a_task(concurrency=2.5)", 1, "concurrency = 2.5: must be a whole number"),
    "text": ("task = a_task(concurrency='x')", 1, "concurrency = 'x': must be a number"),
    "quoted rate": ("ClientSGD(rate='0.1')", 1, r"client.rate = '0.1': must be a number"),
    "quoted epochs": ("ClientSGD(rate=1., epochs='2')", 1, "client.epochs = '2': must be a number"),
    "no rate": ("ClientSGD(rate=None)", 1, "client.rate = None: must be a number"),
    "quoted goal": (
        "from papaya.learning.task import AsyncFL\ntask = a_task(regime=AsyncFL('5'))",
        2,
        "regime.aggregation_goal = '5': must be a number",
    ),
    "regime by name": ("task = a_task(regime='async')", 1, "regime = 'async': must be an AsyncFL"),
    "rule by name": ("task = a_task(stop='now')", 1, "stop = 'now': must be a StopRule"),
    "unknown field": ("task = a_task(colour=1)", 1, "colour"),
    "bad rate": ("task = a_task(client=ClientSGD(rate=-1.0))", 1, "client.rate = -1.0"),
    "bad momentum": ("task = a_task(client=ClientSGD(rate=1., momentum=1.))", 1, "client.momentum"),
    "bad epochs": ("task = a_task(client=ClientSGD(rate=1., epochs=0))", 1, "client.epochs"),
    "bad collection": ("task = a_task(examples=Examples(''))", 1, "examples.collection"),
    "bad limit": ("task = a_task(examples=Examples('x', limit=0))", 1, "examples.limit"),
    "no client": ("task = a_task(client=None)", 1, "must be a ClientSGD"),
    "no function": ("task = a_task(loss=None)", 1, "loss = None: must be callable"),
    "own module": ("task = a_task(requirements=Requirements(engine='x'))", 1, "follow from this"),
    "model raises": ("def f():\n  raise OSError('gone')\ntask = a_task(model=f)", 2, "gone"),
    "model is none": ("task = a_task(model=lambda: None)", 0, "returned a NoneType"),
    "no parameters": ("task = a_task(model=nn.Identity)", 0, "no trainable parameter"),
    "float64": ("task = a_task(model=lambda: model().double())", 0, "'weight' is torch.float64"),
    "integers": ("task = a_task(model=lambda: model().half())", 0, "torch.float16"),
    "not finite": (
        "def f():\n  m = model()\n  m.bias.data[:] = torch.nan\n  return m\ntask = a_task(model=f)",
        0,
        "NaN",
    ),
    "batch norm": (
        "task = a_task(model=lambda: nn.Sequential(model(), nn.BatchNorm1d(1)))",
        0,
        "running statistics",
    ),
    "random frozen": (FROZEN, 0, "initialized at random"),
    "changing buffer": (COUNTING, 0, "changes 'seen'"),
    "loss per example": (
        "task = a_task(loss=lambda m, x, y: m(x) - y)",
        0,
        r"\(2, 1\), expected a sc",
    ),
    "loss is a number": ("task = a_task(loss=lambda m, x, y: 1.0)", 0, "float, expected a scalar"),
    "loss is constant": ("task = a_task(loss=lambda m, x, y: x.mean())", 0, "does not depend"),
    "loss raises": ("task = a_task(loss=lambda m, x, y: m(y).mean())", 1, "RuntimeError"),
    "batch is a list": ("task = a_task(batch=lambda e: list(batch(e)))", 0, "returned a list"),
    "too large": (f"# {'x' * (1 << 20)}", 0, "more than 1048576 bytes"),
    "secure": (
        SECURE,
        2,
        "fixed-point",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_task_file_is_refused_with_its_line_and_a_hint(case: str, tmp_path: Path) -> None:
    rest, line, complaint = BAD[case]
    with pytest.raises(OperatorError, match=complaint) as raised:
        load(tmp_path, HEAD + rest)
    assert "my_task.py" in str(raised.value)
    if line:
        assert f"my_task.py:{LINES + line}:" in str(raised.value)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("rest", "meant"), [("a_task(regine=1)", "regime"), ("ClientSGD(rat=0.1)", "rate")]
)
def test_a_misspelt_field_gets_a_similar_name(rest: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=f"my_task.py:{LINES + 1}: .* is no setting") as raised:
        load(tmp_path, HEAD + rest)
    assert raised.value.hint.startswith(f"did you mean {meant}? its fields are ")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"gone\.py: No such file"):
        load_task(tmp_path / "gone.py")


def test_a_file_that_fails_leaves_no_module_behind(tmp_path: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(OperatorError):
        load(tmp_path, "1 / 0")
    assert {name for name in sys.modules if name.startswith("papaya_task_")} <= before


# What fails on the sample; which of the two functions did; what the hint tells about its input.
ON_THE_SAMPLE = {
    "batch": ("task = a_task(sample=[b'a b'])", "`sample`: batch", r"b'a b'"),
    "loss": ("task = a_task(model=lambda: nn.Linear(3, 1))", "`sample`: loss", r"float32[2, 2]"),
}


@pytest.mark.parametrize("case", ON_THE_SAMPLE)
def test_what_fails_on_the_sample_says_so_and_what_it_was_given(case: str, tmp_path: Path) -> None:
    rest, tried, given = ON_THE_SAMPLE[case]
    with pytest.raises(OperatorError, match=r"Error: .*while trying") as raised:
        load(tmp_path, HEAD + rest)
    assert f"my_task.py:{7 if case == 'loss' else 10}: " in str(raised.value)
    assert str(raised.value).endswith(f"(while trying {tried})")
    assert given in raised.value.hint
