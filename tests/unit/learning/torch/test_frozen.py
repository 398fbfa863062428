"""Frozen tensors: which they are, their digest, and what a task's identity says about them."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from papaya.errors import OperatorError
from papaya.learning.task import LoadedTask, load_task, module_hash
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.frozen import frozen_digest, frozen_tensors

LORA = """\
from pathlib import Path
import numpy as np
import torch
from torch import nn
from papaya.learning.task import *

BASE = Path(__file__).with_name("base.npy")

class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        base = torch.from_numpy(np.load(BASE))
        self.base = nn.Parameter(base, requires_grad=False)
        self.up = nn.Parameter(torch.zeros(2, 1))
        self.down = nn.Parameter(torch.ones(1, 2))

    def forward(self, x):
        return x @ (self.base + self.up @ self.down).T

def batch(examples):
    return (torch.tensor([[float(n) for n in e.split()] for e in examples]),)

def loss(module, x):
    return (module(x) ** 2).mean()

task = Task(
    name="lora", model=Lora, loss=loss, batch=batch, examples=Examples("points"),
    client=ClientSGD(rate=0.1), concurrency=1, regime=AsyncFL(aggregation_goal=1),
    participation_gap_s=0.0,
)
"""


def lora_in(folder: Path, base: float) -> Path:
    """The same task file with another base model beside it."""
    folder.mkdir()
    np.save(folder / "base.npy", np.full((2, 2), base, np.float32))
    path = folder / "lora.py"
    path.write_text(LORA)
    return path


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(1, 1)


def holding(change: Callable[[Holder], object]) -> Holder:
    module = Holder()
    change(module)
    return module


def test_a_base_model_is_part_of_a_task_s_identity(tmp_path: Path) -> None:
    one = load_task(lora_in(tmp_path / "one", 1.0))
    same = load_task(lora_in(tmp_path / "same", 1.0))
    other = load_task(lora_in(tmp_path / "other", 2.0))
    assert one.module_hash == same.module_hash
    assert one.module_hash != other.module_hash
    assert one.config().requirements.module == one.module_hash
    file, _, _ = one.module_hash.partition(".")
    assert file == module_hash(LORA.encode())
    assert len(one.module_hash) <= 64  # a name in a check-in


def test_the_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    path = lora_in(tmp_path / "one", 1.0)
    code = "import sys; from pathlib import Path; from papaya.learning.task import load_task; "
    code += "print(load_task(Path(sys.argv[1])).module_hash)"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == load_task(path).module_hash


def test_the_digest_is_the_one_on_the_protocol_page() -> None:
    """Written out with hashlib: a digest of name, dtype, shape and bytes, in order of names."""
    module = holding(lambda m: m.register_buffer("b", torch.tensor([1, 2], dtype=torch.int16)))
    module.register_buffer("a", torch.tensor(0.5), persistent=False)
    module.again = module.a
    written = b"papaya-frozen-tensors-1\n"
    written += b'["a","float32",[],null]\n' + np.float32(0.5).tobytes()
    written += b'["again","float32",[],"a"]\n'
    written += b'["b","int16",[2],null]\n' + np.array([1, 2], "<i2").tobytes()
    assert frozen_digest(module) == hashlib.sha256(written).digest()


def test_the_identity_names_the_file_and_128_bits_of_the_digest() -> None:
    digest = hashlib.sha256(b"x").digest()
    name = module_hash(b"source", digest)
    assert name == module_hash(b"source") + "." + base64.b64encode(digest[:16])[:22].decode()
    assert module_hash(b"source", b"") == module_hash(b"source")


def test_a_module_that_trains_everything_has_no_digest() -> None:
    module = holding(lambda m: setattr(m, "tied", m.trained))
    assert frozen_tensors(module) == {}
    assert frozen_digest(module) == b""


def _hidden(module: Holder, value: float) -> None:
    """Not registered, so that named_parameters() does not show it."""
    inner = nn.Linear(1, 1)
    nn.init.constant_(inner.weight, value)
    nn.init.zeros_(inner.bias)
    module.hidden = [inner.requires_grad_(False)]  # type: ignore[assignment]


HELD: dict[str, tuple[Callable[[Holder, float], object], str]] = {
    "frozen parameter": (
        lambda m, v: setattr(m, "p", nn.Parameter(torch.tensor([v]), requires_grad=False)),
        "p",
    ),
    "buffer": (lambda m, v: m.register_buffer("b", torch.tensor([v])), "b"),
    "non-persistent buffer": (
        lambda m, v: m.register_buffer("n", torch.tensor([v]), persistent=False),
        "n",
    ),
    "of a part": (lambda m, v: m.trained.register_buffer("b", torch.tensor([v])), "trained.b"),
    "plain attribute": (lambda m, v: setattr(m, "t", torch.tensor([v])), "t"),
    "in a dict": (lambda m, v: setattr(m, "d", {1: (torch.tensor([v]),)}), "d[1][0]"),
    "hidden module": (_hidden, "hidden[0].weight"),
    "bfloat16": (lambda m, v: setattr(m, "t", torch.tensor(v, dtype=torch.bfloat16)), "t"),
    "complex": (lambda m, v: setattr(m, "t", torch.tensor(complex(v)).conj()), "t"),
    "transposed": (lambda m, v: setattr(m, "t", torch.tensor([[v, 0.0]]).T), "t"),
}


@pytest.mark.parametrize("case", HELD)
def test_every_tensor_that_is_held_and_not_trained_counts(case: str) -> None:
    hold, name = HELD[case]
    one, same, other = (holding(lambda m, v=v: hold(m, v)) for v in (1.0, 1.0, 2.0))  # type: ignore[misc]
    assert name in frozen_tensors(one)
    assert frozen_digest(one) == frozen_digest(same)
    assert frozen_digest(one) != frozen_digest(other)


DIFFERENT: list[Callable[[Holder], object]] = [
    lambda m: m.register_buffer("a", torch.zeros(4)),
    lambda m: m.register_buffer("b", torch.zeros(4)),
    lambda m: m.register_buffer("a", torch.zeros(2, 2)),
    lambda m: m.register_buffer("a", torch.zeros(4, dtype=torch.int32)),
    lambda m: m.register_buffer("a", -torch.zeros(4)),
    lambda m: m.register_buffer("a", torch.zeros(2, dtype=torch.float64)),
    lambda m: m.register_buffer("a", torch.full((4,), torch.nan)),
]


def test_name_type_shape_and_bytes_all_count() -> None:
    assert len({frozen_digest(holding(change)) for change in DIFFERENT}) == len(DIFFERENT)


def test_a_cycle_of_modules_ends() -> None:
    module = holding(lambda m: m.register_buffer("b", torch.ones(1)))
    module.me = [module]  # type: ignore[assignment]
    assert list(frozen_tensors(module)) == ["b"]


def test_a_tensor_without_bytes_of_its_own_is_refused() -> None:
    for odd in (torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()):
        with pytest.raises(OperatorError, match="frozen tensor 'odd'") as raised:
            frozen_digest(holding(lambda m, odd=odd: setattr(m, "odd", odd)))  # type: ignore[misc]
        assert raised.value.hint


RANDOM = {
    "torch": "torch.rand(1)",
    "numpy": "torch.from_numpy(np.random.rand(1))",
    "the system": "torch.tensor(list(__import__('os').urandom(8)))",
}


@pytest.mark.parametrize("case", RANDOM)
def test_frozen_tensors_that_differ_per_construction_are_refused(case: str, tmp_path: Path) -> None:
    path = lora_in(tmp_path / "one", 1.0)
    forward = "    def forward"
    path.write_text(LORA.replace(forward, f"        self.odd = {RANDOM[case]}\n\n{forward}", 1))
    path.write_text(path.read_text().replace("\n\n        self.odd", "\n        self.odd"))
    with pytest.raises(OperatorError, match="'odd' is initialized at random") as raised:
        load_task(path)
    assert "seed" in raised.value.hint
    assert "file" in raised.value.hint


def test_a_constant_nan_is_not_random(tmp_path: Path) -> None:
    path = lora_in(tmp_path / "one", 1.0)
    np.save(path.with_name("base.npy"), np.full((2, 2), np.nan, np.float32))
    assert load_task(path).module_hash


def test_an_engine_trains_only_with_the_tensors_that_were_hashed(tmp_path: Path) -> None:
    path = lora_in(tmp_path / "one", 1.0)
    loaded: LoadedTask = load_task(path)
    TorchEngine(loaded)
    np.save(path.with_name("base.npy"), np.full((2, 2), 2.0, np.float32))
    with pytest.raises(OperatorError, match=r"lora\.py.*frozen tensors.*changed"):
        TorchEngine(loaded)
