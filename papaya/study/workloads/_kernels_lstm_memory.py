"""Where the compiled LSTM (_kernels_lstm.py) keeps its model and its scratch.

Needs `papaya-fl[numba]`. Matrices lie in panels: columns p * WIDTH to (p + 1) * WIDTH of
all rows, one row after the other, then the next panel (see _kernels_products.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from papaya.study.workloads._kernels import WIDTH, address, aligned, inner, move, turn
from papaya.study.workloads._kernels_products import add_product


class Sizes(NamedTuple):
    """What the model is, and in how many panels it lies."""

    vocabulary: int
    embedding: int
    hidden: int
    steps: int
    word_panels: int
    embedding_panels: int
    hidden_panels: int


class Weights(NamedTuple):
    """Views of one packed model. `*_back` are the transposes, rebuilt after each step."""

    embedding: Any
    ih: Any
    hh: Any
    out: Any
    bias_ih: Any
    bias_hh: Any
    bias_out: Any
    ih_back: Any
    hh_back: Any
    out_back: Any


class LstmMemory(NamedTuple):
    """Scratch for batches of up to `rows` sequences."""

    gates: Any  # [step][4 gates][hidden panel][row][WIDTH]
    cells: Any  # [step + 1][hidden panel][row][WIDTH]
    cell_tanh: Any  # [step]...
    d_hidden: Any  # one step
    d_cell: Any  # one step
    hidden: Any  # [step + 1][row][hidden]
    scores: Any  # one step: [word panel][row][WIDTH]
    score_rows: Any  # one step: [row][word]
    gate_rows: Any  # one step, or all words: [row][4 gates][hidden]
    table: Any  # [4 gates][hidden panel][word][WIDTH]
    d_table: Any
    word_rows: Any  # [word][embedding]
    d_words: Any  # [embedding panel][word][WIDTH]
    d_hh: Any
    d_out: Any
    d_bias: Any
    d_bias_out: Any


@inner
def weights(ends: Any, packed: Any) -> Any:
    """The parts of a packed model, in their order."""
    return Weights(
        packed[: ends[0]],
        packed[ends[0] : ends[1]],
        packed[ends[1] : ends[2]],
        packed[ends[2] : ends[3]],
        packed[ends[3] : ends[4]],
        packed[ends[4] : ends[5]],
        packed[ends[5] : ends[6]],
        packed[ends[6] : ends[7]],
        packed[ends[7] : ends[8]],
        packed[ends[8] :],
    )


@inner
def scratch(sizes: Any, rows: Any) -> Any:
    v, e, h = sizes.word_panels * WIDTH, sizes.embedding_panels * WIDTH, sizes.hidden_panels * WIDTH
    t = sizes.steps
    words = min(sizes.vocabulary, rows * t)
    return LstmMemory(
        gates=aligned(t * 4 * h * rows),
        cells=aligned((t + 1) * h * rows),
        cell_tanh=aligned(t * h * rows),
        d_hidden=aligned(h * rows),
        d_cell=aligned(h * rows),
        hidden=aligned((t + 1) * h * rows),
        scores=aligned(v * rows),
        score_rows=aligned(v * rows),
        gate_rows=aligned(4 * h * max(rows, words)),
        table=aligned(4 * h * words),
        d_table=aligned(4 * h * words),
        word_rows=aligned(e * words),
        d_words=aligned(e * words),
        d_hh=aligned(h * 4 * h),
        d_out=aligned(h * v),
        d_bias=aligned(4 * h),
        d_bias_out=aligned(v),
    )


@inner
def add_panels(c: Any, c_panel: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_panel: Any,
               rows: Any, panels: Any, depth: Any, alpha: Any) -> None:  # fmt: skip
    """c += alpha * (a @ b), all from their beginning; `*_panel` is the distance of panels."""
    row = np.int64(WIDTH)
    add_product(address(c, 0), row, c_panel, address(a, 0), a_row, a_step,
                address(b, 0), row, b_panel, rows, panels, depth, alpha)  # fmt: skip


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
            turn(matrix, (p * rows + q * WIDTH) * WIDTH, WIDTH,
                 target, (q * panels + p) * WIDTH * WIDTH, WIDTH)  # fmt: skip
