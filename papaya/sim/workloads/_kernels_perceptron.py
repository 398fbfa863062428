"""The compiled trainer of perceptrons: a client's whole training in one call, client by client.

Importing it needs `papaya[numba]`. Only papaya/sim/workloads/perceptron_trainers.py imports it.
Matrices lie in panels (see _kernels.py), padded with zeros; layer i has its matrix at `matrix[i]`,
its transpose at `back[i]`, its bias at `bias[i]` of a packed model.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from papaya.sim.workloads._kernels import (
    WIDTH,
    add,
    add_product,
    aligned,
    clear,
    compiled,
    copy,
    inner,
    panels_of,
    repeat,
    rows_of,
    transpose,
)
from papaya.sim.workloads._kernels_functions import NO_ODDS as NO_ODDS
from papaya.sim.workloads._kernels_functions import cross_entropy, descend, surprise, take

_ONE: Final = np.float32(1)


class Layers(NamedTuple):
    """`sizes` and `panels` of the features and of every layer; places in a packed model."""

    sizes: Any
    panels: Any
    matrix: Any
    bias: Any
    back: Any


@inner
def _only_positive(x: Any) -> None:
    for e in range(x.size):
        x[e] = max(x[e], np.float32(0))


@inner
def _where_positive(values: Any, gradients: Any) -> None:
    for e in range(gradients.size):
        gradients[e] = gradients[e] if values[e] > np.float32(0) else np.float32(0)


@inner
def transpose_all(layers: Any, model: Any) -> None:
    for i in range(1, layers.bias.size):
        transpose(model[layers.matrix[i] :], layers.panels[i] * WIDTH, layers.panels[i + 1],
                  model[layers.back[i] :])  # fmt: skip


@inner
def _forward(layers: Any, model: Any, inputs: Any, rows: Any, values: Any, value_rows: Any,
             height: Any) -> None:  # fmt: skip
    """Values of all layers, in panels and in rows; layer i starts at (panels before) * height."""
    at, below = 0, 0
    for i in range(layers.bias.size):
        panels = layers.panels[i + 1]
        into = values[at : at + panels * WIDTH * rows]
        repeat(model[layers.bias[i] :], rows, panels, into)
        right, right_panel = model[layers.matrix[i] :], layers.panels[i] * WIDTH * WIDTH
        if i == 0:
            add_product(into, rows * WIDTH, inputs, layers.sizes[0], 1, right, right_panel,
                        rows, panels, layers.sizes[0], _ONE)  # fmt: skip
        else:
            add_product(into, rows * WIDTH, value_rows[below:], layers.panels[i] * WIDTH, 1,
                        right, right_panel, rows, panels, layers.sizes[i], _ONE)  # fmt: skip
        if i + 1 < layers.bias.size:
            _only_positive(into)
        rows_of(into, rows, panels, value_rows[at:])
        below = at
        at += panels * height


@inner
def _backward(layers: Any, model: Any, inputs: Any, rows: Any, values: Any, value_rows: Any,
              height: Any, gradients: Any, gradient_rows: Any, d_bias: Any,
              rate: Any) -> None:  # fmt: skip
    """From the gradient of the scores, in `gradient_rows`, to a step of every layer."""
    at = 0
    for i in range(layers.bias.size - 1):
        at += layers.panels[i + 1] * height
    panels_of(gradient_rows, rows, layers.panels[layers.bias.size], gradients[at:])
    for up in range(layers.bias.size):
        i = layers.bias.size - 1 - up
        panels = layers.panels[i + 1]
        below = at - layers.panels[i] * height
        change = gradients[at : at + panels * WIDTH * rows]
        if i > 0:
            lower = gradients[below : below + layers.panels[i] * WIDTH * rows]
            clear(lower)
            add_product(lower, rows * WIDTH, gradient_rows, panels * WIDTH, 1,
                        model[layers.back[i] :], panels * WIDTH * WIDTH,
                        rows, layers.panels[i], layers.sizes[i + 1], _ONE)  # fmt: skip
            _where_positive(values[below:], lower)
            rows_of(lower, rows, layers.panels[i], gradient_rows)
        matrix, matrix_panel = model[layers.matrix[i] :], layers.panels[i] * WIDTH * WIDTH
        if i > 0:
            add_product(matrix, matrix_panel, value_rows[below:], 1, layers.panels[i] * WIDTH,
                        change, rows * WIDTH, layers.sizes[i], panels, rows, -rate)  # fmt: skip
        else:
            add_product(matrix, matrix_panel, inputs, 1, layers.sizes[0],
                        change, rows * WIDTH, layers.sizes[0], panels, rows, -rate)  # fmt: skip
        bias = d_bias[: panels * WIDTH]
        clear(bias)
        for p in range(panels):
            for row in range(rows):
                add(bias, p * WIDTH, change, (p * rows + row) * WIDTH)
        descend(model[layers.bias[i] : layers.bias[i] + bias.size], bias, rate)
        at = below


@compiled
def pack(layers: Any, places: Any, vector: Any, packed: Any) -> None:
    """A model by its parameters; `packed` has its padding already."""
    for e in range(vector.size):
        packed[places[e]] = vector[e]
    transpose_all(layers, packed)


@compiled
def train(layers: Any, places: Any, packed: Any, start: Any, features: Any, labels: Any,
          offsets: Any, rate: Any, epochs: Any, batch_size: Any, updates: Any) -> None:  # fmt: skip
    """Client i trains from packed[start[i]] on its examples; updates[i] is the difference."""
    longest = 0
    for client in range(start.size):
        longest = max(longest, offsets[client + 1] - offsets[client])
    longest = min(longest, batch_size)
    widest, height = layers.panels.max() * WIDTH, longest * WIDTH
    in_all = layers.panels[1:].sum() * height
    values, value_rows, gradients = aligned(in_all), aligned(in_all), aligned(in_all)
    gradient_rows, d_bias = aligned(widest * longest), aligned(widest)
    model = aligned(packed.shape[1])
    classes = layers.sizes[layers.bias.size]
    score_width = layers.panels[layers.bias.size] * WIDTH
    scores_at = (layers.panels[1:].sum() - layers.panels[layers.bias.size]) * height
    for client in range(start.size):
        initial = packed[start[client]]
        copy(initial, model)
        last = offsets[client + 1]
        for epoch in range(epochs):
            first = offsets[client]
            while first < last:
                rows = min(batch_size, last - first)
                inputs = features[first * layers.sizes[0] :]
                _forward(layers, model, inputs, rows, values, value_rows, height)
                copy(value_rows[scores_at:], gradient_rows[: rows * score_width])
                for row in range(rows):
                    scores = gradient_rows[row * score_width : (row + 1) * score_width]
                    weight = np.float32(1.0 / rows)
                    surprise(scores, classes, labels[first + row], weight)
                _backward(layers, model, inputs, rows, values, value_rows, height, gradients,
                          gradient_rows, d_bias, rate)  # fmt: skip
                first += rows
                if first < last or epoch + 1 < epochs:
                    transpose_all(layers, model)
        descend(model, initial, _ONE)
        take(model, places, updates[client])


@compiled
def losses(layers: Any, packed: Any, features: Any, labels: Any, batch_size: Any) -> Any:
    """The loss of each example."""
    rows_at_once = min(labels.size, batch_size)
    height = rows_at_once * WIDTH
    in_all = layers.panels[1:].sum() * height
    values, value_rows = aligned(in_all), aligned(in_all)
    score_width = layers.panels[layers.bias.size] * WIDTH
    scores_at = (layers.panels[1:].sum() - layers.panels[layers.bias.size]) * height
    found = np.zeros(labels.size)
    for first in range(0, labels.size, batch_size):
        rows = min(batch_size, labels.size - first)
        _forward(layers, packed, features[first * layers.sizes[0] :], rows, values, value_rows,
                 height)  # fmt: skip
        for row in range(rows):
            at = scores_at + row * score_width
            scores = value_rows[at : at + score_width]
            found[first + row] = cross_entropy(scores, labels[first + row])
    return found


_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


@inner
def _splitmix64(state: Any, counter: Any) -> Any:
    """As in papaya.sim.draws."""
    word = state + (counter + np.uint64(1)) * _GOLDEN
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return word ^ (word >> np.uint64(31))


@compiled
def draw_features(states: Any, centres: Any, step: Any, features: Any) -> None:
    """Row i: centres[i] and noise, four features from each word; `Prototypes` says the same."""
    half, mask = np.float32(32767.5), np.uint64(0xFFFF)
    width = features.shape[1]
    for row in range(len(states)):
        for first in range(0, width, 4):
            word = _splitmix64(states[row], np.uint64(first // 4))
            for place in range(min(4, width - first)):
                drawn = np.float32((word >> np.uint64(16 * place)) & mask) - half
                features[row, first + place] = centres[row, first + place] + step * drawn
