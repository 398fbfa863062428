"""The runtime's products are those of numpy for any strides, with bits that no address changes."""

from __future__ import annotations

import ctypes
import os
import shutil
from ctypes import POINTER, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from papaya.errors import CannotCompile
from papaya.learning.definition import ClientSGD, Examples, Task
from papaya.learning.torch.compiled_gradient import (
    TOLERANCE,
    CompiledGradient,
    _suits_runtime,
    compile_gradient,
    flat_gradient,
    trace_gradient,
)
from papaya.learning.torch.gradient_runtime import (
    RuntimeGradient,
    _Inputs,
    _macros,
    _sizes_and_strides,
    built_runtime,
    is_enough,
    machine_digest,
    make_private,
)
from papaya.learning.torch.module import make_module, read_batch

Floats = npt.NDArray[np.float32]
FLOAT = 6


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler: apt-get install g++")
    return ctypes.CDLL(str(built_runtime(tmp_path_factory.mktemp("runtime"))))


def handle(runtime: Any, array: Floats) -> c_void_p:
    numbers = c_int64 * array.ndim
    strides = [step // array.itemsize for step in array.strides]
    made = c_void_p()
    assert not runtime.aoti_torch_create_tensor_from_blob(
        *(c_void_p(array.ctypes.data), c_int64(array.ndim), numbers(*array.shape)),
        *(numbers(*strides), c_int64(0), c_int32(FLOAT), c_int32(0), c_int32(0)),
        ctypes.byref(made),
    )
    return made


def product(runtime: Any, left: Floats, right: Floats, out: Floats) -> Floats:
    name = {2: "aoti_torch_cpu_mm_out", 3: "aoti_torch_cpu_bmm_out"}[out.ndim]
    tensors = [handle(runtime, array) for array in (out, left, right)]
    assert getattr(runtime, name)(*tensors) == 0
    for tensor in tensors:
        runtime.aoti_torch_delete_tensor_object(tensor)
    return out


def laid_out(array: Floats, order: str, shift: int = 0) -> Floats:
    """The same matrices, by rows, by columns or with gaps, `shift` numbers after a line."""
    if order == "columns":
        return laid_out(array.swapaxes(-1, -2), "rows", shift).swapaxes(-1, -2)
    wide = array.shape[-1] + (3 if order == "gaps" else 0)
    shape = (*array.shape[:-1], wide)
    space = np.full(int(np.prod(shape)) + 32 + shift, np.nan, np.float32)
    first = -(space.ctypes.data // 4) % 16 + shift
    made = space[first : first + int(np.prod(shape))].reshape(shape)[..., : array.shape[-1]]
    made[...] = array
    return made


# Rows, columns and depth: smaller and larger than blocks of registers, panels and depths.
SIZES = [
    (1, 1, 1),
    (2, 10, 53),
    (20, 53, 64),
    (13, 70, 7),
    (200, 3, 90),
    (3, 200, 600),
    (40, 17, 0),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("lists", [(), (3,)])
def test_products_are_those_of_numpy_at_any_address(
    runtime: Any, sizes: tuple[int, int, int], lists: tuple[int, ...]
) -> None:
    rows, columns, depth = sizes
    draw = np.random.default_rng(rows)
    left = draw.standard_normal((*lists, rows, depth), np.float32)
    right = draw.standard_normal((*lists, depth, columns), np.float32)
    expected = left.astype(np.float64) @ right
    empty = np.zeros(expected.shape, np.float32)
    for a in ("rows", "columns", "gaps"):
        for b in ("rows", "columns"):
            for c in ("rows", "columns", "gaps"):
                found = [
                    product(
                        runtime,
                        laid_out(left, a, shift),
                        laid_out(right, b, shift + 2),
                        laid_out(empty, c, 2 * shift),
                    )
                    for shift in (0, 5)
                ]
                np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-4)
                assert found[0].tobytes() == found[1].tobytes()


def strided(draw: np.random.Generator, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    """NaNs with random strides, and all of the memory that they are part of."""
    order = draw.permutation(len(shape))
    steps = draw.integers(1, 3, len(shape))
    space = np.full([shape[a] * step + 1 for a, step in zip(order, steps, strict=True)], np.nan)
    space = space.astype(np.float32)
    cut = tuple(slice(0, shape[a] * step, step) for a, step in zip(order, steps, strict=True))
    return space[cut].transpose(np.argsort(order)), space


def test_products_of_random_shapes_and_strides(runtime: Any) -> None:
    """Also without rows, columns or depth, and of matrices that show one row or column again."""
    draw = np.random.default_rng(7)
    for _ in range(400):
        rows, columns, depth = (int(n) for n in draw.choice([0, 1, 2, 3, 8, 9, 17, 31, 66], 3))
        lists = tuple(int(n) for n in draw.choice([0, 1, 2], draw.integers(2)))
        inputs = []
        for shape in ((*lists, rows, depth), (*lists, depth, columns)):
            is_shown = draw.random(len(shape)) < 0.8  # other dimensions have the stride 0
            own = tuple(n if shows else min(n, 1) for n, shows in zip(shape, is_shown, strict=True))
            value, _ = strided(draw, own)
            value[...] = draw.standard_normal(own)
            inputs.append(np.broadcast_to(value, shape))
        out, space = strided(draw, (*lists, rows, columns))
        expected = inputs[0].astype(np.float64) @ inputs[1]
        product(runtime, inputs[0], inputs[1], out)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
        assert np.isfinite(space).sum() == out.size


def test_a_product_writes_nothing_beside_its_result(runtime: Any) -> None:
    space = np.full((5, 20), 7, np.float32)
    product(runtime, np.ones((3, 4), np.float32), np.ones((4, 9), np.float32), space[1:4, 6:15])
    expected = np.full((5, 20), 7, np.float32)
    expected[1:4, 6:15] = 4
    np.testing.assert_array_equal(space, expected)


def test_memory_is_used_again_and_views_keep_it(runtime: Any) -> None:
    def empty() -> tuple[c_void_p, int]:
        made, place = c_void_p(), c_void_p()
        numbers = (c_int64 * 1)(100), (c_int64 * 1)(1)
        rest = c_int32(FLOAT), c_int32(0), c_int32(0), ctypes.byref(made)
        assert not runtime.aoti_torch_empty_strided(c_int64(1), *numbers, *rest)
        runtime.aoti_torch_get_data_ptr(made, ctypes.byref(place))
        assert place.value
        assert place.value % 64 == 0
        return made, place.value

    first, place = empty()
    view = c_void_p()
    assert not runtime.aoti_torch_new_tensor_handle(first, ctypes.byref(view))
    runtime.aoti_torch_delete_tensor_object(first)
    second, other = empty()
    assert other != place
    runtime.aoti_torch_delete_tensor_object(view)
    assert empty()[1] == place
    runtime.aoti_torch_delete_tensor_object(second)


RUN = ctypes.CFUNCTYPE(
    *(c_int32, c_void_p, POINTER(c_void_p), c_size_t),
    *(POINTER(c_void_p), c_size_t, c_void_p, c_void_p),
)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_gradient_that_is_not_one_vector_is_refused(runtime: Any, step: int) -> None:
    space = np.arange(6, dtype=np.float32)
    found = np.lib.stride_tricks.as_strided(space, (3,), (4 * step,))

    def run(container: Any, inputs: Any, count: int, outputs: Any, *rest: Any) -> int:
        outputs[0], outputs[1] = (handle(runtime, each).value for each in (space[1:2], found))
        return 0

    loss, gradient = np.zeros(1, np.float32), np.zeros(3, np.float32)
    places = c_void_p(loss.ctypes.data), c_void_p(gradient.ctypes.data)
    failed = runtime.papaya_gradient(RUN(run), None, None, c_int64(0), c_int64(3), *places)
    assert bool(failed) == (step != 1)
    assert gradient.tolist() == ([0, 1, 2] if step == 1 else [0, 0, 0])


def test_shapes_of_many_inputs_stay_in_memory() -> None:
    inputs = _Inputs([torch.zeros(size) for size in range(1000)])
    found = [c_int64.from_address(blob.sizes).value for blob in inputs.blobs]
    assert found == list(range(1000))
    assert _sizes_and_strides.cache_info().currsize < 1000


def test_another_version_of_the_compiler_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    monkeypatch.setenv("CXX", str(compiler))
    found = []
    for version in ("12", "13", "13"):
        compiler.write_text(f"#!/bin/sh\necho '#define __VERSION__ {version}'\n")
        compiler.chmod(0o700)
        _macros.cache_clear()
        found.append(machine_digest())
    _macros.cache_clear()
    assert found[0] != found[1] == found[2]


def test_a_folder_that_all_users_can_write_to_is_refused(tmp_path: Path) -> None:
    built = tmp_path / "gradients"
    make_private(built)
    assert built.stat().st_mode & 0o777 == 0o700
    built.chmod(0o777)
    with pytest.raises(CannotCompile, match="all users can write to"):
        built_runtime(built)


def test_a_damaged_library_is_named(tmp_path: Path) -> None:
    damaged = tmp_path / "libpapaya_gradient.so"
    damaged.write_bytes(b"\x7fELF")
    with pytest.raises(CannotCompile, match=f"cannot load {damaged}"):
        RuntimeGradient(tmp_path / "model.so", damaged, ())


def test_code_that_calls_other_functions_of_torch_needs_torch() -> None:
    assert is_enough("aoti_torch_cpu_mm_out(a, b); aoti_torch_dtype_float32();")
    assert not is_enough("aoti_torch_cpu_mm_out(a, b); aoti_torch_cpu_sort(c);")


class Doubled(nn.Module):
    """A product of float64 matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.double() @ self.weight.double()).float()


def a_task(model: Any) -> Task:
    return Task(
        name="other",
        model=model,
        loss=lambda module, inputs: module(inputs).square().mean(),
        batch=lambda examples: (torch.tensor([[len(e), 1.0, 2.0] for e in examples]),),
        examples=Examples("any"),
        client=ClientSGD(rate=0.1),
        concurrency=10,
    )


def test_products_of_other_types_need_torch() -> None:
    for model, suits in ((Doubled, False), (lambda: nn.Linear(3, 2), True)):
        task = a_task(model)
        batch = read_batch(task, [b"1", b"22"])
        assert _suits_runtime(trace_gradient(task, make_module(task).train(), batch)) == suits


@pytest.mark.soak
def test_a_library_that_needs_torch_is_linked_with_it(tmp_path: Path) -> None:
    task = a_task(Doubled)
    examples = [b"1", b"22", b"333"]
    library = compile_gradient(task, examples, tmp_path)
    assert library.runtime is None
    module = make_module(task).train()
    batch = read_batch(task, examples)
    values = list(module.parameters())
    loss = task.loss(module, *batch)
    expected = flat_gradient(values, torch.autograd.grad(loss, values))
    found = CompiledGradient(library, module)(torch.ones(6), batch)[1]
    assert (found - expected).norm() <= TOLERANCE * expected.norm()
