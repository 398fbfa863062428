"""The compiled loops of the LSTM. Importing it needs `papaya-fl[numba]`.

`train` runs the whole training of each client in one call, without the global lock: clients one
after the other, each with the same operations in the same order, so that its bits do not depend on
who is trained in the same call, thread or process. Multiplications and additions may be fused
(`contract`), but sums are not reordered. Another kind of CPU may round differently. Indices are not
checked: the caller does that. Division does not test for zero (`error_model`), which would keep
LLVM from vectorizing.

The vector of parameters is described in lstm_trainers.py. For a batch of B sequences:

    gates[t] = table[word t] + hidden[t - 1] W_hh^T    in PyTorch's order i, f, g, o
    cell[t] = f cell[t - 1] + i g;  hidden[t] = o tanh(cell[t]);  scores = hidden[t] W_out^T + b_out

where table[word] = embedding[word] W_ih^T + b_ih + b_hh is computed once for each word that occurs.
Row 0 of `hidden` and `cell` is the state of zeros before the first word. `turned` holds W_ih, W_hh
and W_out transposed, so that every product adds whole rows.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from papaya.study.workloads.compiled_language import compile_loop

_LOG2E: Final = np.float32(1.4426950408889634)
_LN2_HIGH: Final = np.float32(0.693359375)
_LN2_LOW: Final = np.float32(-2.12194440e-4)
_ONE: Final = np.float32(1)
_TWO: Final = np.float32(2)


@compile_loop(inline="always")
def _exp(value: Any) -> Any:
    """Cephes' expf, for -87 to 87, written out so that LLVM vectorizes loops over it."""
    x = min(max(value, np.float32(-87)), np.float32(87))
    k = np.floor(x * _LOG2E + np.float32(0.5))
    r = x - k * _LN2_HIGH - k * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + _ONE
    return p * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)


@compile_loop(inline="always")
def _eight(rows: Any, k: Any) -> Any:
    """Row k and the seven after it, or numbers if `rows` is one row."""
    return (
        rows[k], rows[k + 1], rows[k + 2], rows[k + 3],
        rows[k + 4], rows[k + 5], rows[k + 6], rows[k + 7],
    )  # fmt: skip


@compile_loop(inline="always")
def _column(rows: Any, j: Any) -> Any:
    """Number j of each of eight rows."""
    return (
        rows[0][j], rows[1][j], rows[2][j], rows[3][j],
        rows[4][j], rows[5][j], rows[6][j], rows[7][j],
    )  # fmt: skip


@compile_loop(inline="always")
def _plus_products(value: Any, a: Any, b: Any) -> Any:
    left = value + a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]
    return left + (a[4] * b[4] + a[5] * b[5] + a[6] * b[6] + a[7] * b[7])


@compile_loop(error_model="numpy", fastmath={"contract"})
def _add_product(out: Any, a: Any, b: Any) -> None:
    """out += a b. Eight rows of b are added to two rows of `out` at a time, so that rows are read
    less often. The order of additions is the same for a last row without a partner.
    """
    rows, inner = a.shape
    columns = b.shape[1]
    whole = inner - inner % 8
    for i in range(0, rows - 1, 2):
        upper, lower = out[i], out[i + 1]
        for k in range(0, whole, 8):
            a_upper, a_lower, b_rows = _eight(a[i], k), _eight(a[i + 1], k), _eight(b, k)
            for j in range(columns):
                b_column = _column(b_rows, j)
                upper[j] = _plus_products(upper[j], a_upper, b_column)
                lower[j] = _plus_products(lower[j], a_lower, b_column)
    for i in range(rows - rows % 2, rows):
        last = out[i]
        for k in range(0, whole, 8):
            a_last, b_rows = _eight(a[i], k), _eight(b, k)
            for j in range(columns):
                last[j] = _plus_products(last[j], a_last, _column(b_rows, j))
    for i in range(rows):
        row = out[i]
        for k in range(whole, inner):
            a_k, b_row = a[i, k], b[k]
            for j in range(columns):
                row[j] += a_k * b_row[j]


@compile_loop(inline="always")
def _views(vector: Any, vocabulary: Any, embedding: Any, hidden: Any) -> Any:
    """The tensors of a parameter vector, as views."""
    gates = 4 * hidden
    ih = vocabulary * embedding
    hh = ih + gates * embedding
    bias_ih = hh + gates * hidden
    bias_hh = bias_ih + gates
    out = bias_hh + gates
    bias_out = out + vocabulary * hidden
    return (
        vector[:ih].reshape(vocabulary, embedding),
        vector[ih:hh].reshape(gates, embedding),
        vector[hh:bias_ih].reshape(gates, hidden),
        vector[bias_ih:bias_hh],
        vector[bias_hh:out],
        vector[out:bias_out].reshape(vocabulary, hidden),
        vector[bias_out:],
    )


@compile_loop(error_model="numpy", fastmath={"contract"})
def _forward(words: Any, w: Any, turned: Any, states: Any) -> None:
    """Fill `states` for a batch of sequences; row 0 of hidden and cell is zero before."""
    embedding, _, _, bias_ih, bias_hh, _, _ = w
    w_ih_t, w_hh_t, _ = turned
    used, table, slope, gates, hidden, cell, tanh_cell = states
    batch, steps = words.shape[0], words.shape[1] - 1
    units = cell.shape[2]
    used[:] = False
    for row in range(batch):
        for step in range(steps):
            used[words[row, step]] = True
    for word in range(used.size):
        if used[word]:
            for j in range(4 * units):
                table[word, j] = bias_ih[j] + bias_hh[j]
            _add_product(table[word : word + 1], embedding[word : word + 1], w_ih_t)
    for step in range(steps):
        now = gates[step, :batch]
        for row in range(batch):
            now[row] = table[words[row, step]]
        _add_product(now, hidden[step, :batch], w_hh_t)
        for row in range(batch):
            gate, before, after = now[row], cell[step, row], cell[step + 1, row]
            for j in range(4 * units):
                # tanh(x) is 2 sigmoid(2 x) - 1: the slope is 2 for the gate g and 1 for the others
                gate[j] = slope[j] / (_ONE + _exp(-slope[j] * gate[j])) - (slope[j] - _ONE)
            for j in range(units):
                after[j] = gate[units + j] * before[j] + gate[j] * gate[2 * units + j]
            for j in range(units):
                tanh = _TWO / (_ONE + _exp(-_TWO * after[j])) - _ONE
                tanh_cell[step, row, j] = tanh
                hidden[step + 1, row, j] = gate[3 * units + j] * tanh


@compile_loop(inline="always")
def _scores(hidden: Any, w_out_t: Any, bias_out: Any, scores: Any) -> None:
    for row in range(hidden.shape[0]):
        scores[row] = bias_out
    _add_product(scores, hidden, w_out_t)


@compile_loop(inline="always")
def _exponentials(scores: Any) -> Any:
    """Replace scores by their exponentials, relative to the largest; returns (largest, sum)."""
    top = scores[0]
    for j in range(scores.size):
        top = max(top, scores[j])
    for j in range(scores.size):
        scores[j] = _exp(scores[j] - top)
    total = np.float32(0)
    for j in range(scores.size):
        total += scores[j]
    return top, total


@compile_loop(error_model="numpy", fastmath={"contract"})
def _backward(words: Any, w: Any, dw: Any, turned: Any, states: Any, back: Any) -> None:
    """Write the gradient of a batch's mean loss into `dw`, after `_forward`."""
    embedding, w_ih, w_hh, _, _, w_out, bias_out = w
    d_embedding, d_ih, d_hh, d_bias_ih, d_bias_hh, d_out, d_bias_out = dw
    used, _, _, gates, hidden, cell, tanh_cell = states
    scores, d_gates, d_hidden, d_cell, d_table = back
    batch, steps = words.shape[0], words.shape[1] - 1
    units = cell.shape[2]
    scale = _ONE / np.float32(batch * steps)
    odds, dg, dh, dc = scores[:batch], d_gates[:batch], d_hidden[:batch], d_cell[:batch]
    dh[:] = 0
    dc[:] = 0
    d_table[:] = 0
    for step in range(steps - 1, -1, -1):
        _scores(hidden[step + 1, :batch], turned[2], bias_out, odds)
        for row in range(batch):
            odd = odds[row]
            _, total = _exponentials(odd)
            by = scale / total
            for j in range(odd.size):
                odd[j] *= by
            odd[words[row, step + 1]] -= scale
            for j in range(odd.size):
                d_bias_out[j] += odd[j]
        _add_product(d_out, odds.T, hidden[step + 1, :batch])
        _add_product(dh, odds, w_out)
        for row in range(batch):
            gate, d_gate, d_word = gates[step, row], dg[row], d_table[words[row, step]]
            for j in range(units):
                i, f, g, o = gate[j], gate[units + j], gate[2 * units + j], gate[3 * units + j]
                tanh = tanh_cell[step, row, j]
                by = dc[row, j] + dh[row, j] * o * (_ONE - tanh * tanh)
                d_gate[j] = by * g * i * (_ONE - i)
                d_gate[units + j] = by * cell[step, row, j] * f * (_ONE - f)
                d_gate[2 * units + j] = by * i * (_ONE - g * g)
                d_gate[3 * units + j] = dh[row, j] * tanh * o * (_ONE - o)
                dc[row, j] = by * f
            for j in range(4 * units):
                d_word[j] += d_gate[j]
        _add_product(d_hh, dg.T, hidden[step, :batch])
        dh[:] = 0
        _add_product(dh, dg, w_hh)
    for word in range(used.size):
        if used[word]:
            d_word = d_table[word : word + 1]
            for j in range(4 * units):
                d_bias_ih[j] += d_word[0, j]
            _add_product(d_embedding[word : word + 1], d_word, w_ih)
            _add_product(d_ih, d_word.T, embedding[word : word + 1])
    d_bias_hh[:] = d_bias_ih


@compile_loop(inline="always")
def _turn(w: Any, turned: Any) -> None:
    """Matrices as the way forward multiplies by them."""
    turned[0][:] = w[1].T
    turned[1][:] = w[2].T
    turned[2][:] = w[5].T


@compile_loop(inline="always")
def _scratch(vocabulary: Any, width: Any, units: Any, steps: Any, batch: Any) -> Any:
    """Memory of (transposed matrices, states): see `_forward`."""
    gates = 4 * units
    slope = np.ones(gates, np.float32)
    slope[2 * units : 3 * units] = 2
    turned = (
        np.empty((width, gates), np.float32),
        np.empty((units, gates), np.float32),
        np.empty((units, vocabulary), np.float32),
    )
    states = (
        np.empty(vocabulary, np.bool_),
        np.empty((vocabulary, gates), np.float32),
        slope,
        np.empty((steps, batch, gates), np.float32),
        np.zeros((steps + 1, batch, units), np.float32),
        np.zeros((steps + 1, batch, units), np.float32),
        np.empty((steps, batch, units), np.float32),
    )
    return turned, states


@compile_loop(error_model="numpy", fastmath={"contract"})
def train(
    vocabulary: Any, width: Any, units: Any, models: Any, start: Any, tokens: Any, offsets: Any,
    rate: Any, epochs: Any, batch_size: Any, updates: Any,
) -> None:  # fmt: skip
    """Client i trains from models[start[i]] on tokens[offsets[i] : offsets[i + 1]]."""
    model = np.empty(models.shape[1], np.float32)
    gradient = np.empty_like(model)
    w = _views(model, vocabulary, width, units)
    dw = _views(gradient, vocabulary, width, units)
    turned, states = _scratch(vocabulary, width, units, tokens.shape[1] - 1, batch_size)
    back = (
        np.empty((batch_size, vocabulary), np.float32),
        np.empty((batch_size, 4 * units), np.float32),
        np.empty((batch_size, units), np.float32),
        np.empty((batch_size, units), np.float32),
        np.empty((vocabulary, 4 * units), np.float32),
    )
    for client in range(start.size):
        model[:] = models[start[client]]
        for _ in range(epochs):
            for first in range(offsets[client], offsets[client + 1], batch_size):
                words = tokens[first : min(first + batch_size, offsets[client + 1])]
                _turn(w, turned)
                _forward(words, w, turned, states)
                gradient[:] = 0
                _backward(words, w, dw, turned, states, back)
                for j in range(model.size):
                    model[j] -= rate * gradient[j]
        for j in range(model.size):
            updates[client, j] = model[j] - models[start[client], j]


@compile_loop(error_model="numpy", fastmath={"contract"})
def losses(
    vocabulary: Any, width: Any, units: Any, model: Any, tokens: Any, batch_size: Any, found: Any
) -> None:
    """Add the losses of all words of sequence i to found[i]."""
    steps = tokens.shape[1] - 1
    w = _views(model, vocabulary, width, units)
    turned, states = _scratch(vocabulary, width, units, steps, batch_size)
    scores = np.empty((batch_size, vocabulary), np.float32)
    _turn(w, turned)
    for first in range(0, tokens.shape[0], batch_size):
        words = tokens[first : first + batch_size]
        _forward(words, w, turned, states)
        for step in range(steps):
            _scores(
                states[4][step + 1, : words.shape[0]], turned[2], w[6], scores[: words.shape[0]]
            )
            for row in range(words.shape[0]):
                wanted = scores[row, words[row, step + 1]]
                top, total = _exponentials(scores[row])
                found[first + row] += top + np.log(total) - wanted
