"""Small matrix products inside compiled kernels. Needs `papaya-fl[numba]`.

BLAS is slow on products of this size, and loops that LLVM has to prove free of aliases are slower.
So the innermost tile is written in LLVM's own language: `rows` x `columns` vectors of sums stay in
registers over the whole depth. Measured near the peak of a core, where BLAS reaches 60 to 90 %.

Matrices are flat arrays. What is added to, and the right factor, have whole vectors in their rows
and two strides: from row to row, and from panel, WIDTH columns of all rows, to panel. Large ones
should lie panel by panel, so that a tile reads neighbouring addresses; small ones may lie row by
row. The left factor has any two strides: it may be a transpose.

Each sum is made in the order of the depth, whatever the tile: the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from papaya.study.workloads._kernels import (
    FLOAT,
    INT64,
    VECTOR,
    WIDTH,
    apart,
    inner,
    intrinsic,
    load,
    splat,
    times,
    vector_at,
)


def _tile(rows: int, columns: int) -> Any:
    """c[:rows, :columns panels] += alpha * (a @ b), with the sums in registers."""

    def typed(
        context: Any, c: Any, c_row: Any, c_panel: Any, a: Any, a_row: Any, a_step: Any,
        b: Any, b_row: Any, b_panel: Any, depth: Any, alpha: Any,
    ) -> Any:  # fmt: skip
        return types.void(*[types.int64] * 10, types.float32), _code(rows, columns)

    return intrinsic(typed)


def _code(rows: int, columns: int) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        c, c_row, c_panel, a, a_row, a_step, b, b_row, b_panel, depth, alpha = args
        to_c, to_a, to_b = (builder.inttoptr(each, FLOAT.as_pointer()) for each in (c, a, b))
        before, head = builder.block, builder.append_basic_block("head")
        body, after = builder.append_basic_block("body"), builder.append_basic_block("after")
        builder.branch(head)
        builder.position_at_end(head)
        k = builder.phi(INT64)
        k.add_incoming(INT64(0), before)
        sums = [[builder.phi(VECTOR) for _ in range(columns)] for _ in range(rows)]
        for row in sums:
            for total in row:
                total.add_incoming(ir.Constant(VECTOR, None), before)
        builder.cbranch(builder.icmp_signed("<", k, depth), body, after)
        builder.position_at_end(body)
        step = builder.gep(to_b, [builder.mul(k, b_row)])
        rights = [load(builder, step, times(builder, b_panel, p)) for p in range(columns)]
        lefts = builder.gep(to_a, [builder.mul(k, a_step)])
        for r, row in enumerate(sums):
            left = splat(builder, builder.load(builder.gep(lefts, [times(builder, a_row, r)])))
            for total, right in zip(row, rights, strict=True):
                total.add_incoming(_fma(builder, left, right, total), body)
        k.add_incoming(builder.add(k, INT64(1)), body)
        builder.branch(head)
        builder.position_at_end(after)
        scale = splat(builder, alpha)
        for r, row in enumerate(sums):
            for p, total in enumerate(row):
                at = builder.add(times(builder, c_panel, p), times(builder, c_row, r))
                value = _fma(builder, total, scale, load(builder, to_c, at))
                builder.store(value, vector_at(builder, to_c, at), align=4)
        return context.get_dummy_value()

    return generate


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
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
    c: Any, c_row: Any, c_panel: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_row: Any,
    b_panel: Any, rows: Any, panels: Any, depth: Any, alpha: Any,
) -> None:  # fmt: skip
    """c += alpha * (a @ b), given by their addresses; strides are in elements.

    Few rows share a tile with several panels: a lone chain of sums would wait for itself. One of
    `a_row` and `a_step` should be a literal 1: what the innermost loop then knows is compiled in.
    """
    apart()
    done = 0
    while rows - done >= 12:
        for p in range(panels):
            _tile_12(c + 4 * p * c_panel, c_row, c_panel, a, a_row, a_step,
                     b + 4 * p * b_panel, b_row, b_panel, depth, alpha)  # fmt: skip
        c, a, done = c + 48 * c_row, a + 48 * a_row, done + 12
    if rows - done >= 8:
        for p in range(panels):
            _tile_8(c + 4 * p * c_panel, c_row, c_panel, a, a_row, a_step,
                    b + 4 * p * b_panel, b_row, b_panel, depth, alpha)  # fmt: skip
        c, a, done = c + 32 * c_row, a + 32 * a_row, done + 8
    if rows - done >= 4:
        p = 0
        while p + 2 <= panels:
            _tile_4x2(c + 4 * p * c_panel, c_row, c_panel, a, a_row, a_step,
                      b + 4 * p * b_panel, b_row, b_panel, depth, alpha)  # fmt: skip
            p += 2
        if p < panels:
            _tile_4(c + 4 * p * c_panel, c_row, c_panel, a, a_row, a_step,
                    b + 4 * p * b_panel, b_row, b_panel, depth, alpha)  # fmt: skip
        c, a, done = c + 16 * c_row, a + 16 * a_row, done + 4
    if rows - done >= 2:
        p = 0
        while p + 4 <= panels:
            _tile_2x4(c + 4 * p * c_panel, c_row, c_panel, a, a_row, a_step,
                      b + 4 * p * b_panel, b_row, b_panel, depth, alpha)  # fmt: skip
            p += 4
        while p < panels:
            _tile_2(c + 4 * p * c_panel, c_row, c_panel, a, a_row, a_step,
                    b + 4 * p * b_panel, b_row, b_panel, depth, alpha)  # fmt: skip
            p += 1
        c, a, done = c + 8 * c_row, a + 8 * a_row, done + 2
    if rows - done >= 1:
        p = 0
        while p + 4 <= panels:
            _tile_1x4(c + 4 * p * c_panel, c_row, c_panel, a, a_row, a_step,
                      b + 4 * p * b_panel, b_row, b_panel, depth, alpha)  # fmt: skip
            p += 4
        while p < panels:
            _tile_1(c + 4 * p * c_panel, c_row, c_panel, a, a_row, a_step,
                    b + 4 * p * b_panel, b_row, b_panel, depth, alpha)  # fmt: skip
            p += 1
