"""The compiled trainer of the LSTM: a client's whole training in one call, one client at a time.

Needs `papaya-fl[numba]`. Only papaya/study/workloads/lstm.py imports it.

Everything is float32 and lies in panels (see _kernels.py), padded with zeros to whole panels: a
padded unit keeps c = h = 0 and gets no gradient. Each matrix is held twice, as it is multiplied on
the way forward and on the way back. What an input word adds to the gates depends on the word only,
so it is computed once for each word of a batch, and so are its gradients.

    gates_t = table[word_t] + h_t-1 W_hh^T,  in PyTorch's order i f g o; g by tanh, else sigmoid
    c_t = f c_t-1 + i g;  h_t = o tanh(c_t);  scores_t = h_t W_out^T + b_out
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from papaya.study.workloads._kernels import (
    WIDTH,
    add,
    aligned,
    apart,
    clear,
    compiled,
    copy,
    fma,
    inner,
    move,
    multiply,
)
from papaya.study.workloads._kernels_functions import (
    NO_ODDS as NO_ODDS,
)
from papaya.study.workloads._kernels_functions import (
    cross_entropy,
    descend,
    shares,
    sigmoid_all,
    take,
    tanh_all,
)
from papaya.study.workloads._kernels_lstm_memory import Sizes as Sizes
from papaya.study.workloads._kernels_lstm_memory import (
    add_panels,
    panels_of,
    repeat,
    rows_of,
    scratch,
    transpose,
    weights,
)

_ONE: Final = np.float32(1)


@inner
def _lookup(sizes: Any, w: Any, work: Any, tokens: Any, first: Any, rows: Any, slots: Any) -> Any:
    """The words of a batch: slots[word] is their row in the table of what they add to the gates."""
    words, e = 0, sizes.embedding_panels * WIDTH
    for word in range(slots.size):
        slots[word] = -1
    for row in range(first, first + rows):
        for step in range(sizes.steps):
            word = tokens[row, step]
            if slots[word] < 0:
                slots[word] = words
                for p in range(sizes.embedding_panels):
                    at = p * WIDTH
                    move(work.word_rows, words * e + at, w.embedding, word * e + at)
                words += 1
    panels = 4 * sizes.hidden_panels
    repeat(w.bias_ih, words, panels, work.table)
    for p in range(panels):
        for slot in range(words):
            add(work.table, (p * words + slot) * WIDTH, w.bias_hh, p * WIDTH)
    add_panels(work.table, words * WIDTH, work.word_rows, e, 1, w.ih, e * WIDTH,
               words, panels, sizes.embedding, _ONE)  # fmt: skip
    return words


@inner
def _gather(table: Any, words: Any, slots: Any, tokens: Any, first: Any, rows: Any, step: Any,
            panels: Any, gates: Any) -> None:  # fmt: skip
    for p in range(panels):
        for row in range(rows):
            slot = slots[tokens[first + row, step]]
            move(gates, (p * rows + row) * WIDTH, table, (p * words + slot) * WIDTH)


@inner
def _scatter(table: Any, words: Any, slots: Any, tokens: Any, first: Any, rows: Any, step: Any,
             panels: Any, gates: Any) -> None:  # fmt: skip
    for p in range(panels):
        for row in range(rows):
            slot = slots[tokens[first + row, step]]
            add(table, (p * words + slot) * WIDTH, gates, (p * rows + row) * WIDTH)


@inner
def _remember(i: Any, f: Any, g: Any, before: Any, cell: Any) -> None:
    for e in range(cell.size):
        cell[e] = fma(f[e], before[e], i[e] * g[e])


@inner
def _show(o: Any, cell_tanh: Any, rows: Any, panels: Any, hidden: Any) -> None:
    """h = o tanh(c), from panels into rows."""
    for p in range(panels):
        for row in range(rows):
            at, to = (p * rows + row) * WIDTH, (row * panels + p) * WIDTH
            move(hidden, to, o, at)
            multiply(hidden, to, cell_tanh, at)


@inner
def _scores(sizes: Any, w: Any, work: Any, rows: Any, hidden: Any) -> None:
    """The scores of all next words, as rows."""
    h = sizes.hidden_panels * WIDTH
    scores = work.scores
    repeat(w.bias_out, rows, sizes.word_panels, scores)
    add_panels(scores, rows * WIDTH, hidden, h, 1, w.out, h * WIDTH,
               rows, sizes.word_panels, sizes.hidden, _ONE)  # fmt: skip
    rows_of(scores, rows, sizes.word_panels, work.score_rows)


@inner
def forward(sizes: Any, w: Any, work: Any, tokens: Any, first: Any, rows: Any, slots: Any,
            words: Any, step: Any) -> None:  # fmt: skip
    """One step: gates, cell, hidden state."""
    apart()
    h, n = sizes.hidden_panels * WIDTH, sizes.hidden_panels * WIDTH * rows
    gates = work.gates[step * 4 * n : (step + 1) * 4 * n]
    hidden = work.hidden[step * n : (step + 1) * n]
    _gather(work.table, words, slots, tokens, first, rows, step, 4 * sizes.hidden_panels, gates)
    if step > 0:  # before, the hidden state is zero
        add_panels(gates, rows * WIDTH, hidden, h, 1, w.hh, h * WIDTH,
                   rows, 4 * sizes.hidden_panels, sizes.hidden, _ONE)  # fmt: skip
    sigmoid_all(gates[: 2 * n])
    tanh_all(gates[2 * n : 3 * n])
    sigmoid_all(gates[3 * n :])
    cell = work.cells[(step + 1) * n : (step + 2) * n]
    _remember(gates[:n], gates[n : 2 * n], gates[2 * n : 3 * n], work.cells[step * n :], cell)
    cell_tanh = work.cell_tanh[step * n : (step + 1) * n]
    copy(cell, cell_tanh)
    tanh_all(cell_tanh)
    _show(gates[3 * n :], cell_tanh, rows, sizes.hidden_panels,
          work.hidden[(step + 1) * n : (step + 2) * n])  # fmt: skip


@inner
def judge(sizes: Any, w: Any, work: Any, tokens: Any, first: Any, rows: Any, step: Any) -> None:
    """The gradients of one step's loss are added to d_hidden, d_out and d_bias_out."""
    apart()
    v, h = sizes.word_panels * WIDTH, sizes.hidden_panels * WIDTH
    n = h * rows
    hidden = work.hidden[(step + 1) * n : (step + 2) * n]
    _scores(sizes, w, work, rows, hidden)
    weight = np.float32(1.0 / (rows * sizes.steps))
    shares(work.score_rows, np.int64(0), rows, v, weight)
    for row in range(rows):
        work.score_rows[row * v + tokens[first + row, step + 1]] -= weight
        for p in range(sizes.word_panels):
            add(work.d_bias_out, p * WIDTH, work.score_rows, row * v + p * WIDTH)
    panels_of(work.score_rows, rows, sizes.word_panels, work.scores)
    add_panels(work.d_hidden, rows * WIDTH, work.score_rows, v, 1, w.out_back, v * WIDTH,
               rows, sizes.hidden_panels, sizes.vocabulary, _ONE)  # fmt: skip
    add_panels(work.d_out, h * WIDTH, hidden, 1, h, work.scores, rows * WIDTH,
               sizes.hidden, sizes.word_panels, rows, _ONE)  # fmt: skip


@inner
def _through_cell(d_hidden: Any, cell_tanh: Any, o: Any, d_cell: Any) -> None:
    for e in range(d_cell.size):
        slope = fma(-cell_tanh[e], cell_tanh[e], _ONE)
        d_cell[e] = fma(d_hidden[e] * o[e], slope, d_cell[e])


@inner
def _through_output(d_hidden: Any, cell_tanh: Any, o: Any) -> None:
    for e in range(o.size):
        o[e] = d_hidden[e] * cell_tanh[e] * o[e] * (_ONE - o[e])


@inner
def _through_input(d_cell: Any, i: Any, g: Any) -> None:
    for e in range(i.size):
        x, y = i[e], g[e]
        i[e] = d_cell[e] * y * x * (_ONE - x)
        g[e] = d_cell[e] * x * fma(-y, y, _ONE)


@inner
def _through_forget(before: Any, f: Any, d_cell: Any) -> None:
    for e in range(f.size):
        x, d = f[e], d_cell[e]
        f[e] = d * before[e] * x * (_ONE - x)
        d_cell[e] = d * x


@inner
def backward(sizes: Any, w: Any, work: Any, rows: Any, step: Any) -> None:
    """One step back: the gates become their gradients, d_hidden that of the step before."""
    apart()
    h, n = sizes.hidden_panels * WIDTH, sizes.hidden_panels * WIDTH * rows
    gates = work.gates[step * 4 * n : (step + 1) * 4 * n]
    i, f, g, o = gates[:n], gates[n : 2 * n], gates[2 * n : 3 * n], gates[3 * n :]
    d_hidden, d_cell = work.d_hidden[:n], work.d_cell[:n]
    cell_tanh = work.cell_tanh[step * n :]
    _through_cell(d_hidden, cell_tanh, o, d_cell)
    _through_output(d_hidden, cell_tanh, o)
    _through_input(d_cell, i, g)
    _through_forget(work.cells[step * n :], f, d_cell)
    if step > 0:
        rows_of(gates, rows, 4 * sizes.hidden_panels, work.gate_rows)
        clear(d_hidden)
        add_panels(d_hidden, rows * WIDTH, work.gate_rows, 4 * h, 1, w.hh_back, 4 * h * WIDTH,
                   rows, sizes.hidden_panels, 4 * h, _ONE)  # fmt: skip
        add_panels(work.d_hh, h * WIDTH, work.hidden[step * n :], 1, h, gates, rows * WIDTH,
                   sizes.hidden, 4 * sizes.hidden_panels, rows, _ONE)  # fmt: skip


@inner
def _learn_words(sizes: Any, w: Any, work: Any, slots: Any, words: Any, rate: Any) -> None:
    """Steps of the input matrix, of the biases and of the embeddings of the batch's words."""
    e, panels = sizes.embedding_panels * WIDTH, 4 * sizes.hidden_panels
    add_panels(w.ih, e * WIDTH, work.word_rows, 1, e, work.d_table, words * WIDTH,
               sizes.embedding, panels, words, -rate)  # fmt: skip
    clear(work.d_bias)
    for p in range(panels):
        for slot in range(words):
            add(work.d_bias, p * WIDTH, work.d_table, (p * words + slot) * WIDTH)
    descend(w.bias_ih, work.d_bias, rate)
    descend(w.bias_hh, work.d_bias, rate)
    rows_of(work.d_table, words, panels, work.gate_rows)
    clear(work.d_words)
    add_panels(work.d_words, words * WIDTH, work.gate_rows, panels * WIDTH, 1, w.ih_back,
               panels * WIDTH * WIDTH, words, sizes.embedding_panels, panels * WIDTH,
               _ONE)  # fmt: skip
    for word in range(sizes.vocabulary):
        if slots[word] >= 0:
            for p in range(sizes.embedding_panels):
                at, to = (p * words + slots[word]) * WIDTH, word * e + p * WIDTH
                for lane in range(WIDTH):
                    w.embedding[to + lane] -= rate * work.d_words[at + lane]


@inner
def transpose_all(sizes: Any, w: Any) -> None:
    e, h = sizes.embedding_panels * WIDTH, sizes.hidden_panels * WIDTH
    transpose(w.ih, e, 4 * sizes.hidden_panels, w.ih_back)
    transpose(w.hh, h, 4 * sizes.hidden_panels, w.hh_back)
    transpose(w.out, h, sizes.word_panels, w.out_back)


@inner
def train_batch(sizes: Any, w: Any, work: Any, tokens: Any, first: Any, rows: Any, slots: Any,
                rate: Any) -> None:  # fmt: skip
    """One step of SGD on the mean loss of sequences `first` to `first + rows`."""
    n = sizes.hidden_panels * WIDTH * rows
    words = _lookup(sizes, w, work, tokens, first, rows, slots)
    d_table = work.d_table[: 4 * sizes.hidden_panels * WIDTH * words]
    for started in (work.cells[:n], work.hidden[:n], work.d_hidden, work.d_cell, d_table):
        clear(started)
    for gradient in (work.d_hh, work.d_out, work.d_bias_out):
        clear(gradient)
    for step in range(sizes.steps):
        forward(sizes, w, work, tokens, first, rows, slots, words, step)
    for back in range(sizes.steps):
        step = sizes.steps - 1 - back
        judge(sizes, w, work, tokens, first, rows, step)
        backward(sizes, w, work, rows, step)
        _scatter(work.d_table, words, slots, tokens, first, rows, step, 4 * sizes.hidden_panels,
                 work.gates[step * 4 * n :])  # fmt: skip
    _learn_words(sizes, w, work, slots, words, rate)
    descend(w.hh, work.d_hh, rate)
    descend(w.out, work.d_out, rate)
    descend(w.bias_out, work.d_bias_out, rate)


@compiled
def pack(sizes: Any, ends: Any, places: Any, vector: Any, packed: Any) -> None:
    """A model by its parameters; `packed` has its padding already."""
    for e in range(vector.size):
        packed[places[e]] = vector[e]
    transpose_all(sizes, weights(ends, packed))


@compiled
def train(sizes: Any, ends: Any, places: Any, packed: Any, start: Any, tokens: Any, offsets: Any,
          rate: Any, epochs: Any, batch_size: Any, updates: Any) -> None:  # fmt: skip
    """Client i trains from packed[start[i]] on its sequences; updates[i] is the difference."""
    longest = 0
    for client in range(start.size):
        longest = max(longest, offsets[client + 1] - offsets[client])
    work = scratch(sizes, min(longest, batch_size))
    slots = np.empty(sizes.vocabulary, np.int64)
    model = aligned(packed.shape[1])
    w = weights(ends, model)
    for client in range(start.size):
        initial = packed[start[client]]
        copy(initial, model)
        last = offsets[client + 1]
        for epoch in range(epochs):
            first = offsets[client]
            while first < last:
                rows = min(batch_size, last - first)
                train_batch(sizes, w, work, tokens, first, rows, slots, rate)
                first += rows
                if first < last or epoch + 1 < epochs:
                    transpose_all(sizes, w)
        descend(model, initial, _ONE)
        take(model, places, updates[client])


@compiled
def losses(sizes: Any, ends: Any, packed: Any, tokens: Any, batch_size: Any) -> Any:
    """The loss of each sequence, summed over its steps."""
    work = scratch(sizes, min(len(tokens), batch_size))
    slots = np.empty(sizes.vocabulary, np.int64)
    w = weights(ends, packed)
    v, h = sizes.word_panels * WIDTH, sizes.hidden_panels * WIDTH
    found = np.zeros(len(tokens))
    for first in range(0, len(tokens), batch_size):
        rows = min(batch_size, len(tokens) - first)
        n = h * rows
        words = _lookup(sizes, w, work, tokens, first, rows, slots)
        clear(work.cells[:n])
        clear(work.hidden[:n])
        for step in range(sizes.steps):
            forward(sizes, w, work, tokens, first, rows, slots, words, step)
            _scores(sizes, w, work, rows, work.hidden[(step + 1) * n : (step + 2) * n])
            for row in range(rows):
                target = tokens[first + row, step + 1]
                found[first + row] += cross_entropy(work.score_rows, row * v, v, target)
    return found
