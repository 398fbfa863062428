"""What compiled kernels are made of: decorators, and single vectors in LLVM's own language.

Needs `papaya-fl[numba]`. Loops that LLVM has to prove free of aliases are slow, and so
are sums: here a vector is one value. Arrays are flat; `at` and `to` count elements, which need not
be aligned. An array and a place cost less than a slice, and an address less than both, because
numba counts references.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import llvmlite.binding  # type: ignore[import-untyped]
import numba
import numba.extending
import numpy as np
from llvmlite import ir
from numba import types

njit: Any = numba.njit  # its types leave out some options
intrinsic: Any = numba.extending.intrinsic

WIDTH: Final = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
"""Floats in a vector."""

FLOAT: Final = ir.FloatType()
VECTOR: Final = ir.VectorType(FLOAT, WIDTH)
POINTER: Final = VECTOR.as_pointer()
INT32: Final = ir.IntType(32)
INT64: Final = ir.IntType(64)
LANES: Final = ir.VectorType(INT32, WIDTH)
_ZERO: Final = ir.Constant(VECTOR, None)


@cache
def sources_digest(folder: Path = Path(__file__).parent) -> str:
    """Of all files that kernels are made of."""
    contents = (path.read_bytes() for path in sorted(folder.glob("_kernels*.py")))
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def compiled(function: Callable[..., Any]) -> Any:
    """`njit` for what Python calls: without the GIL, cached where a folder can be written.

    The name is the cache's key. By itself numba looks only at the file that the function is in, and
    would go on using what was compiled of the others before they changed.
    """
    function.__qualname__ += f"-{sources_digest()}"
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # no folder for numba's cache can be written
        return njit(nogil=True, error_model="numpy")(function)


def inner(function: Callable[..., Any]) -> Any:
    """`njit` for what only kernels call: compiled into them, and much sooner without a wrapper.

    LLVM may not reorder, fuse or approximate anything. It makes another copy of a function for each
    kernel, and which of them runs depends on numba's cache: all of them have to round alike. What
    should be fused is written with `fma`. Divisions are as in numpy: a check for zero would keep
    LLVM from making vectors.
    """
    return njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(
        function
    )


def _mark_apart(context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


apart: Final = intrinsic(_mark_apart)
"""In a function with many callers: it is compiled once, not into each. Saves seconds."""


def data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data


def _element(context: Any, array: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = data(context, builder, signature.args[0], args[0])
        return builder.ptrtoint(builder.gep(start, [args[1]]), INT64)

    return types.int64(array, types.int64), generate


address: Final = intrinsic(_element)
"""Of an element. For a call only: numba frees an array that is not named any more."""


def times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, INT64(factor))


def vector_at(builder: Any, pointer: Any, at: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [at]), POINTER)


def load(builder: Any, pointer: Any, at: Any) -> Any:
    return builder.load(vector_at(builder, pointer, at), align=4)


def splat(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(VECTOR, ir.Undefined)
    lanes = ir.Constant(LANES, None)
    return builder.shuffle_vector(builder.insert_element(nothing, value, INT32(0)), nothing, lanes)


def _vector(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """One vector of `target` becomes combine(itself, one vector of `source`)."""

    def typed(context: Any, target: Any, to: Any, source: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            into = data(context, builder, signature.args[0], args[0])
            other = data(context, builder, signature.args[2], args[2])
            old, new = load(builder, into, args[1]), load(builder, other, args[3])
            value = combine(builder, old, new)
            builder.store(value, vector_at(builder, into, args[1]), align=4)
            return context.get_dummy_value()

        return types.void(target, types.int64, source, types.int64), generate

    return intrinsic(typed)


move: Final = _vector(lambda builder, old, new: new)
add: Final = _vector(lambda builder, old, new: builder.fadd(old, new))
subtract: Final = _vector(lambda builder, old, new: builder.fsub(old, new))
multiply: Final = _vector(lambda builder, old, new: builder.fmul(old, new))
where_positive: Final = _vector(
    lambda builder, old, new: builder.select(builder.fcmp_ordered(">", new, _ZERO), old, _ZERO)
)


def _ask_for(context: Any, array: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = data(context, builder, signature.args[0], args[0])
        place = builder.bitcast(builder.gep(start, [args[1]]), ir.IntType(8).as_pointer())
        name = "llvm.prefetch.p0i8"
        kind = ir.FunctionType(ir.VoidType(), [place.type, INT32, INT32, INT32])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, [place, INT32(0), INT32(3), INT32(1)])  # to read, soon, as data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


prefetch: Final = intrinsic(_ask_for)
"""Memory begins to fetch an element, which may lie beyond the end."""


def _vector_by_number(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """One vector of `target` becomes combine(itself, a number in every lane)."""

    def typed(context: Any, target: Any, to: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            into = data(context, builder, signature.args[0], args[0])
            value = combine(builder, load(builder, into, args[1]), splat(builder, args[2]))
            builder.store(value, vector_at(builder, into, args[1]), align=4)
            return context.get_dummy_value()

        return types.void(target, types.int64, types.float32), generate

    return intrinsic(typed)


lower: Final = _vector_by_number(lambda builder, old, number: builder.fsub(old, number))
scale: Final = _vector_by_number(lambda builder, old, number: builder.fmul(old, number))
at_least: Final = _vector_by_number(
    lambda builder, old, number: builder.select(builder.fcmp_ordered("<", old, number), number, old)
)


def _reduction(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Whole vectors into one number: lane by lane, then halves of the last one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = builder.gep(data(context, builder, signature.args[0], args[0]), [args[1]])
        first = load(builder, start, INT64(0))
        before, head = builder.block, builder.append_basic_block("head")
        body, after = builder.append_basic_block("body"), builder.append_basic_block("after")
        builder.branch(head)
        builder.position_at_end(head)
        at, lanes = builder.phi(INT64), builder.phi(VECTOR)
        at.add_incoming(INT64(WIDTH), before)
        lanes.add_incoming(first, before)
        builder.cbranch(builder.icmp_signed("<", at, args[2]), body, after)
        builder.position_at_end(body)
        lanes.add_incoming(combine(builder, lanes, load(builder, start, at)), body)
        at.add_incoming(builder.add(at, INT64(WIDTH)), body)
        builder.branch(head)
        builder.position_at_end(after)
        value: Any = lanes
        half = WIDTH // 2
        while half:
            order = [INT32((lane + half) % WIDTH) for lane in range(WIDTH)]
            other = builder.shuffle_vector(value, value, ir.Constant(LANES, order))
            value = combine(builder, value, other)
            half //= 2
        return builder.extract_element(value, INT32(0))

    def typed(context: Any, array: Any, at: Any, size: Any) -> Any:
        return types.float32(array, types.int64, types.int64), generate

    return intrinsic(typed)


total: Final = _reduction(lambda builder, a, b: builder.fadd(a, b))
highest: Final = _reduction(
    lambda builder, a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a)
)


def _fused(context: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, kind = "llvm.fma.f32", ir.FunctionType(FLOAT, [FLOAT] * 3)
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(function, args)

    return types.float32(types.float32, types.float32, types.float32), generate


fma: Final = intrinsic(_fused)
"""a * b + c of three numbers, rounded once."""


def _turned(context: Any, source: Any, at: Any, row: Any, target: Any, to: Any, to_row: Any) -> Any:
    """A square of WIDTH vectors, transposed: squares of 1, 2, 4, ... lanes change places."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, at, row, target, to, to_row = args
        start = builder.gep(data(context, builder, signature.args[0], source), [at])
        vectors = [load(builder, start, times(builder, row, r)) for r in range(WIDTH)]
        size = 1
        while size < WIDTH:
            for r in (r for r in range(WIDTH) if not r & size):
                pair = vectors[r], vectors[r + size]
                vectors[r], vectors[r + size] = (
                    builder.shuffle_vector(*pair, ir.Constant(LANES, order))
                    for order in _exchanges(size)
                )
            size *= 2
        into = builder.gep(data(context, builder, signature.args[3], target), [to])
        for r, vector in enumerate(vectors):
            place = vector_at(builder, into, times(builder, to_row, r))
            builder.store(vector, place, align=4)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(source, whole, whole, target, whole, whole), generate


def _exchanges(size: int) -> tuple[list[Any], list[Any]]:
    """Lanes of two vectors, the second one's from WIDTH on: those of the upper and lower result."""
    lanes = range(WIDTH)
    upper = [lane if not lane & size else lane - size + WIDTH for lane in lanes]
    under = [lane + size if not lane & size else lane + WIDTH for lane in lanes]
    return [INT32(lane) for lane in upper], [INT32(lane) for lane in under]


turn: Final = intrinsic(_turned)


@inner
def clear(x: Any) -> None:
    for e in range(x.size):
        x[e] = np.float32(0)


@inner
def copy(source: Any, target: Any) -> None:
    for e in range(target.size):
        target[e] = source[e]


@inner
def aligned(size: Any) -> Any:
    """Zeros that start at a vector's boundary."""
    memory = np.zeros(size + WIDTH, np.float32)
    first = (-memory.ctypes.data % (4 * WIDTH)) // 4
    return memory[first : first + size]
