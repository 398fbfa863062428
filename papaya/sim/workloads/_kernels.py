"""Small matrix products inside compiled kernels. Importing it needs `papaya[numba]`.

BLAS is slow on products of this size, and loops that LLVM has to prove free of aliases are slower.
So the innermost tile is written in LLVM's own language: `rows` x `columns` vectors of sums stay in
registers over the whole depth. Measured near the peak of a core, where BLAS reaches 60 to 90 %.

Matrices are flat arrays. What is added to, and the right factor, lie in panels: columns p * WIDTH
to (p + 1) * WIDTH of all rows, one row after the other, then the next panel. So a tile reads its
vectors from neighbouring addresses. The left factor has any two strides: it may be a transpose.

Each sum is made in the order of the depth, whatever the tile: the same bits in any batch.

numba's cache looks only at the file that a kernel is in: after a change here, touch those files.
"""

from __future__ import annotations

from collections.abc import Callable
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

_FLOAT: Final = ir.FloatType()
_VECTOR: Final = ir.VectorType(_FLOAT, WIDTH)
_POINTER: Final = _VECTOR.as_pointer()
_INT32: Final = ir.IntType(32)
_INT64: Final = ir.IntType(64)


def compiled(function: Callable[..., Any]) -> Any:
    """`njit` for what Python calls: without the GIL, cached where a folder can be written."""
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


def _tile(rows: int, columns: int) -> Any:
    """c[:rows, :columns panels] += alpha * (a @ b), with the sums in registers."""

    def typed(
        context: Any, c: Any, c_at: Any, c_panel: Any, a: Any, a_at: Any, a_row: Any,
        a_step: Any, b: Any, b_at: Any, b_panel: Any, depth: Any, alpha: Any,
    ) -> Any:  # fmt: skip
        whole = types.int64
        signature = types.void(
            c, whole, whole, a, whole, whole, whole, b, whole, whole, whole, types.float32
        )
        return signature, _code(rows, columns)

    return intrinsic(typed)


def _code(rows: int, columns: int) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        c, c_at, c_panel, a, a_at, a_row, a_step, b, b_at, b_panel, depth, alpha = args
        to_c, to_a, to_b = (
            builder.gep(_data(context, builder, kind, array), [at])
            for kind, array, at in (
                (signature.args[0], c, c_at),
                (signature.args[3], a, a_at),
                (signature.args[7], b, b_at),
            )
        )
        before, head = builder.block, builder.append_basic_block("head")
        body, after = builder.append_basic_block("body"), builder.append_basic_block("after")
        builder.branch(head)
        builder.position_at_end(head)
        k = builder.phi(_INT64)
        k.add_incoming(_INT64(0), before)
        sums = [[builder.phi(_VECTOR) for _ in range(columns)] for _ in range(rows)]
        for row in sums:
            for total in row:
                total.add_incoming(ir.Constant(_VECTOR, None), before)
        builder.cbranch(builder.icmp_signed("<", k, depth), body, after)
        builder.position_at_end(body)
        step = builder.gep(to_b, [_times(builder, k, WIDTH)])
        rights = [_load(builder, step, _times(builder, b_panel, p)) for p in range(columns)]
        lefts = builder.gep(to_a, [builder.mul(k, a_step)])
        for r, row in enumerate(sums):
            left = _splat(builder, builder.load(builder.gep(lefts, [_times(builder, a_row, r)])))
            for total, right in zip(row, rights, strict=True):
                total.add_incoming(_fma(builder, left, right, total), body)
        k.add_incoming(builder.add(k, _INT64(1)), body)
        builder.branch(head)
        builder.position_at_end(after)
        scale = _splat(builder, alpha)
        for r, row in enumerate(sums):
            for p, total in enumerate(row):
                at = builder.add(_times(builder, c_panel, p), _INT64(r * WIDTH))
                value = _fma(builder, total, scale, _load(builder, to_c, at))
                builder.store(value, _vector_at(builder, to_c, at), align=4)
        return context.get_dummy_value()

    return generate


def _data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data


def _times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, _INT64(factor))


def _vector_at(builder: Any, pointer: Any, at: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [at]), _POINTER)


def _load(builder: Any, pointer: Any, at: Any) -> Any:
    return builder.load(_vector_at(builder, pointer, at), align=4)


def _splat(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    lanes = ir.Constant(ir.VectorType(_INT32, WIDTH), None)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _INT32(0)), nothing, lanes)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    name = f"llvm.fma.v{WIDTH}f32"
    fma = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(fma, [a, b, c])


_tile_12 = _tile(12, 1)
_tile_8 = _tile(8, 1)
_tile_4 = _tile(4, 1)
_tile_4x2 = _tile(4, 2)
_tile_2 = _tile(2, 1)
_tile_2x4 = _tile(2, 4)
_tile_1 = _tile(1, 1)
_tile_1x4 = _tile(1, 4)


@inner
def add_product(
    c: Any, c_panel: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_panel: Any,
    rows: Any, panels: Any, depth: Any, alpha: Any,
) -> None:  # fmt: skip
    """c += alpha * (a @ b); `*_panel` is the distance of panels, `a_row` and `a_step` of elements.

    Few rows share a tile with several panels: a lone chain of sums would wait for itself.
    """
    apart()
    done = 0
    while rows - done >= 12:
        for p in range(panels):
            _tile_12(c, p * c_panel + done * WIDTH, c_panel, a, done * a_row, a_row, a_step,
                     b, p * b_panel, b_panel, depth, alpha)  # fmt: skip
        done += 12
    if rows - done >= 8:
        for p in range(panels):
            _tile_8(c, p * c_panel + done * WIDTH, c_panel, a, done * a_row, a_row, a_step,
                    b, p * b_panel, b_panel, depth, alpha)  # fmt: skip
        done += 8
    if rows - done >= 4:
        p = 0
        while p + 2 <= panels:
            _tile_4x2(c, p * c_panel + done * WIDTH, c_panel, a, done * a_row, a_row, a_step,
                      b, p * b_panel, b_panel, depth, alpha)  # fmt: skip
            p += 2
        if p < panels:
            _tile_4(c, p * c_panel + done * WIDTH, c_panel, a, done * a_row, a_row, a_step,
                    b, p * b_panel, b_panel, depth, alpha)  # fmt: skip
        done += 4
    if rows - done >= 2:
        p = 0
        while p + 4 <= panels:
            _tile_2x4(c, p * c_panel + done * WIDTH, c_panel, a, done * a_row, a_row, a_step,
                      b, p * b_panel, b_panel, depth, alpha)  # fmt: skip
            p += 4
        while p < panels:
            _tile_2(c, p * c_panel + done * WIDTH, c_panel, a, done * a_row, a_row, a_step,
                    b, p * b_panel, b_panel, depth, alpha)  # fmt: skip
            p += 1
        done += 2
    if rows - done >= 1:
        p = 0
        while p + 4 <= panels:
            _tile_1x4(c, p * c_panel + done * WIDTH, c_panel, a, done * a_row, a_row, a_step,
                      b, p * b_panel, b_panel, depth, alpha)  # fmt: skip
            p += 4
        while p < panels:
            _tile_1(c, p * c_panel + done * WIDTH, c_panel, a, done * a_row, a_row, a_step,
                    b, p * b_panel, b_panel, depth, alpha)  # fmt: skip
            p += 1


def _vector(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """One vector of `target` becomes combine(itself, one vector of `source`)."""

    def typed(context: Any, target: Any, to: Any, source: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            into = _data(context, builder, signature.args[0], args[0])
            other = _data(context, builder, signature.args[2], args[2])
            old, new = _load(builder, into, args[1]), _load(builder, other, args[3])
            value = combine(builder, old, new)
            builder.store(value, _vector_at(builder, into, args[1]), align=4)
            return context.get_dummy_value()

        return types.void(target, types.int64, source, types.int64), generate

    return intrinsic(typed)


move: Final = _vector(lambda builder, old, new: new)
add: Final = _vector(lambda builder, old, new: builder.fadd(old, new))
multiply: Final = _vector(lambda builder, old, new: builder.fmul(old, new))


def _reduction(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Whole vectors into one number: lane by lane, then halves of the last one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = _data(context, builder, signature.args[0], args[0])
        first = _load(builder, data, _INT64(0))
        before, head = builder.block, builder.append_basic_block("head")
        body, after = builder.append_basic_block("body"), builder.append_basic_block("after")
        builder.branch(head)
        builder.position_at_end(head)
        at, lanes = builder.phi(_INT64), builder.phi(_VECTOR)
        at.add_incoming(_INT64(WIDTH), before)
        lanes.add_incoming(first, before)
        builder.cbranch(builder.icmp_signed("<", at, args[1]), body, after)
        builder.position_at_end(body)
        lanes.add_incoming(combine(builder, lanes, _load(builder, data, at)), body)
        at.add_incoming(builder.add(at, _INT64(WIDTH)), body)
        builder.branch(head)
        builder.position_at_end(after)
        value: Any = lanes
        half = WIDTH // 2
        while half:
            order = [_INT32((lane + half) % WIDTH) for lane in range(WIDTH)]
            other = builder.shuffle_vector(
                value, value, ir.Constant(ir.VectorType(_INT32, WIDTH), order)
            )
            value = combine(builder, value, other)
            half //= 2
        return builder.extract_element(value, _INT32(0))

    def typed(context: Any, array: Any, size: Any) -> Any:
        return types.float32(array, types.int64), generate

    return intrinsic(typed)


total: Final = _reduction(lambda builder, a, b: builder.fadd(a, b))
highest: Final = _reduction(
    lambda builder, a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a)
)


def _fused(context: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, kind = "llvm.fma.f32", ir.FunctionType(_FLOAT, [_FLOAT] * 3)
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(function, args)

    return types.float32(types.float32, types.float32, types.float32), generate


fma: Final = intrinsic(_fused)
"""a * b + c of three numbers, rounded once."""


@inner
def rows_of(panels: Any, rows: Any, columns: Any, target: Any) -> None:
    """Panels as plain rows of `columns` whole panels."""
    for p in range(columns):
        for row in range(rows):
            move(target, (row * columns + p) * WIDTH, panels, (p * rows + row) * WIDTH)


@inner
def panels_of(source: Any, rows: Any, columns: Any, panels: Any) -> None:
    """The way back."""
    for p in range(columns):
        for row in range(rows):
            move(panels, (p * rows + row) * WIDTH, source, (row * columns + p) * WIDTH)


@inner
def repeat(vectors: Any, rows: Any, columns: Any, panels: Any) -> None:
    """The same `columns` vectors in every row."""
    for p in range(columns):
        for row in range(rows):
            move(panels, (p * rows + row) * WIDTH, vectors, p * WIDTH)


@inner
def transpose(matrix: Any, rows: Any, panels: Any, target: Any) -> None:
    """[panels][rows][WIDTH] into [rows / WIDTH][panels * WIDTH][WIDTH]; rows are whole panels."""
    for q in range(rows // WIDTH):
        for p in range(panels):
            for row in range(WIDTH):
                at = (p * rows + q * WIDTH + row) * WIDTH
                to = (q * panels + p) * WIDTH * WIDTH + row
                for lane in range(WIDTH):
                    target[to + lane * WIDTH] = matrix[at + lane]


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
