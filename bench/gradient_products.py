"""Claim: the products of compiled gradients take no longer than those of torch's library.

Sizes are those that the models of `bench/peers` have in a step of 32 examples, and a few larger
ones. Products run on one thread; both sides write to memory that exists. Calls of the runtime pay
for ctypes, which compiled code does not, so the smallest products are faster than shown.

Run as `python bench/gradient_products.py`; prints one JSON line per product, and one for the claim:
the geometric mean of torch's time divided by the runtime's. A wrong product exits with 1.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from papaya.learning.torch.gradient_runtime import DTYPES, built_runtime

# rows, columns, depth; whether the left or the right matrix is the transpose of what is stored
PRODUCTS = {
    "perceptron, forward": (32, 53, 53, False, True),
    "perceptron, of inputs": (32, 53, 53, False, False),
    "perceptron, of weights": (53, 53, 32, True, False),
    "convolution, forward": (6272, 32, 144, False, False),
    "convolution, of inputs": (6272, 144, 32, False, True),
    "convolution, of weights": (144, 32, 6272, True, False),
    "transformer, forward": (640, 128, 32, False, True),
    "transformer, of weights": (96, 32, 640, True, False),
    "LoRA, down": (640, 4, 64, False, True),
    "LoRA, up": (640, 192, 4, False, True),
    "LoRA, of weights": (192, 4, 640, True, False),
    "GRU, forward": (32, 192, 64, False, True),
    "GRU, of inputs": (32, 64, 192, False, False),
    "GRU, of weights": (192, 64, 32, True, False),
    "large, forward": (640, 2048, 512, False, True),
    "large, of weights": (4096, 1024, 32, True, False),
}
_TOLERANCE = 1e-5
_TURNS = 7
_TURN_S = 0.01


def handle(runtime: Any, value: Tensor) -> c_void_p:
    numbers = c_int64 * value.dim()
    made = c_void_p()
    runtime.aoti_torch_create_tensor_from_blob(
        *(c_void_p(value.data_ptr()), c_int64(value.dim()), numbers(*value.shape)),
        *(numbers(*value.stride()), c_int64(0), c_int32(DTYPES[value.dtype])),
        *(c_int32(0), c_int32(0), ctypes.byref(made)),
    )
    return made


def stored(rows: int, columns: int, is_transposed: bool) -> Tensor:
    return torch.randn(columns, rows).t() if is_transposed else torch.randn(rows, columns)


def turn_us(work: Callable[[], object], calls: int) -> float:
    start_s = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - start_s) / calls * 1e6


def compare(runtime: Any, name: str) -> float:
    rows, columns, depth, left_transposed, right_transposed = PRODUCTS[name]
    left = stored(rows, depth, left_transposed)
    right = stored(depth, columns, right_transposed)
    ours, theirs = torch.empty(rows, columns), torch.empty(rows, columns)
    tensors = [handle(runtime, value) for value in (ours, left, right)]

    def by_runtime() -> None:
        runtime.aoti_torch_cpu_mm_out(*tensors)

    def by_torch() -> None:
        torch.mm(left, right, out=theirs)

    by_runtime()
    by_torch()
    if (error := float((ours - theirs).norm() / theirs.norm())) > _TOLERANCE:
        sys.exit(f"{name}: the product is off by {error:.1e} of its norm")
    calls = 1 + int(_TURN_S * 1e6 / turn_us(by_torch, 3))
    turns = [(turn_us(by_runtime, calls), turn_us(by_torch, calls)) for _ in range(_TURNS)]
    our_us, their_us = (float(min(times)) for times in zip(*turns, strict=True))
    ratio = their_us / our_us
    say(name, value=round(ratio, 2), runtime_us=round(our_us, 1), torch_us=round(their_us, 1))
    return ratio


def say(case: str, **about: object) -> None:
    print(json.dumps({"bench": "gradient_products", "case": case} | about), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        runtime = ctypes.CDLL(str(built_runtime(Path(folder))))
        ratios = [compare(runtime, name) for name in PRODUCTS]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    say("all", value=round(mean, 2), lowest=round(min(ratios), 2), target=1.0, passed=mean >= 1)


if __name__ == "__main__":
    main()
