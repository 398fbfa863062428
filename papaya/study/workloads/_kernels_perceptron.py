"""The compiled trainer of perceptrons: a client's whole training in one call, client by client.

Needs `papaya-fl[numba]`. Only papaya/study/workloads/perceptron_trainers.py imports it.
All matrices lie row by row, and rows are padded with zeros to whole vectors. A packed model holds
each layer's matrix, a row for each output as in the vector of parameters, its transpose and its
bias. The values of a layer, and their gradients, have a row for each example of a batch.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from papaya.study.workloads._kernels import (
    WIDTH,
    address,
    aligned,
    at_least,
    compiled,
    inner,
    move,
    prefetch,
    subtract,
    turn,
    where_positive,
)
from papaya.study.workloads._kernels_functions import NO_ODDS as NO_ODDS
from papaya.study.workloads._kernels_functions import cross_entropy, shares
from papaya.study.workloads._kernels_products import add_product

LAYER: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("inputs", "outputs"),
            *("in_width", "out_width"),  # with padding
            *("matrix", "turned", "bias"),  # where they start in a packed model
            *("below", "above"),  # where its inputs and outputs start, times the rows of a batch
        )
    ]
)

_ZERO: Final = np.float32(0)
_ONE: Final = np.float32(1)


@inner
def _add_rows(c: Any, a: Any, a_row: Any, a_step: Any, b: Any, rows: Any, width: Any, depth: Any,
              alpha: Any) -> None:  # fmt: skip
    """c += alpha * (a @ b), where c and b are `width` wide."""
    panel = np.int64(WIDTH)
    add_product(c, width, panel, a, a_row, a_step, b, width, panel,
                np.int64(rows), width // panel, depth, alpha)  # fmt: skip


@inner
def _copy(source: Any, at: Any, target: Any, to: Any, length: Any) -> None:
    whole = length - length % WIDTH
    for e in range(0, whole, WIDTH):
        move(target, to + e, source, at + e)
    for e in range(whole, length):
        target[to + e] = source[at + e]


@inner
def _turn_all(layers: Any, model: Any, first: Any) -> None:
    for i in range(layers.size):
        layer = layers[i]
        for row in range(0, layer.out_width, WIDTH):
            for column in range(0, layer.in_width, WIDTH):
                at = first + layer.matrix + row * layer.in_width + column
                to = first + layer.turned + column * layer.out_width + row
                turn(model, at, layer.in_width, model, to, layer.out_width)


@inner
def _read(layers: Any, features: Any, first: Any, rows: Any, values: Any) -> None:
    """A batch of features, as the inputs of the first layer. What lies behind comes next."""
    size, width = layers[0].inputs, layers[0].in_width
    lines, length = (1, rows * size) if size == width else (rows, size)
    for line in range(lines):
        _copy(features, first * size + line * length, values, line * width, length)
    behind = (first + rows) * size
    for e in range(behind, behind + rows * size, WIDTH):
        prefetch(features, e)


@inner
def _forward(layers: Any, model: Any, rows: Any, height: Any, values: Any) -> None:
    """The values of all layers, in scratch for `height` rows."""
    for i in range(layers.size):
        layer = layers[i]
        at, width = layer.above * height, layer.out_width
        for row in range(at, at + rows * width, width):
            for e in range(0, width, WIDTH):
                move(values, row + e, model, layer.bias + e)
        _add_rows(address(values, at), address(values, layer.below * height), layer.in_width, 1,
                  address(model, layer.turned), rows, width, layer.inputs, _ONE)  # fmt: skip
        if i + 1 < layers.size:
            for e in range(at, at + rows * width, WIDTH):
                at_least(values, e, _ZERO)


@inner
def _backward(layers: Any, model: Any, rows: Any, height: Any, values: Any, gradients: Any,
              constants: Any, rate: Any) -> None:  # fmt: skip
    """From the gradient of the scores to a step of every layer."""
    for up in range(layers.size):
        layer = layers[layers.size - 1 - up]
        at, below, width = layer.above * height, layer.below * height, layer.in_width
        if below > 0:
            for e in range(below, below + rows * width, WIDTH):
                move(gradients, e, constants, 0)
            _add_rows(address(gradients, below), address(gradients, at), layer.out_width, 1,
                      address(model, layer.matrix), rows, width, layer.outputs, _ONE)  # fmt: skip
            for e in range(below, below + rows * width, WIDTH):
                where_positive(gradients, e, values, e)
        _add_rows(address(model, layer.matrix), address(gradients, at), 1, layer.out_width,
                  address(values, below), layer.outputs, width, rows, -rate)  # fmt: skip
        _add_rows(address(model, layer.bias), address(constants, WIDTH), 1, np.int64(0),
                  address(gradients, at), 1, layer.out_width, rows, -rate)  # fmt: skip


@inner
def _lines(layer: Any) -> Any:
    """How a matrix is copied: so many lines of such a length; one if there is no padding."""
    size = layer.inputs * layer.outputs
    return (1, size) if layer.inputs == layer.in_width else (layer.outputs, layer.inputs)


@compiled
def pack(layers: Any, vector: Any, packed: Any, first: Any) -> None:
    """A model by its parameters, from `first` on; `packed` has its padding already."""
    at = 0
    for i in range(layers.size):
        layer = layers[i]
        lines, length = _lines(layer)
        for line in range(lines):
            _copy(vector, at, packed, first + layer.matrix + line * layer.in_width, length)
            at += length
        _copy(vector, at, packed, first + layer.bias, layer.outputs)
        at += layer.outputs
    _turn_all(layers, packed, first)


@inner
def _difference(model: Any, packed: Any, first: Any, at: Any, target: Any, to: Any,
                length: Any) -> None:  # fmt: skip
    whole = length - length % WIDTH
    for e in range(0, whole, WIDTH):
        move(target, to + e, model, at + e)
        subtract(target, to + e, packed, first + at + e)
    for e in range(whole, length):
        target[to + e] = model[at + e] - packed[first + at + e]


@inner
def _unpack_difference(layers: Any, model: Any, packed: Any, first: Any, updates: Any,
                       to: Any) -> None:  # fmt: skip
    """What has changed since packed[first:]."""
    for i in range(layers.size):
        layer = layers[i]
        lines, length = _lines(layer)
        for line in range(lines):
            at = layer.matrix + line * layer.in_width
            _difference(model, packed, first, at, updates, to, length)
            to += length
        _difference(model, packed, first, layer.bias, updates, to, layer.outputs)
        to += layer.outputs


@compiled
def train(layers: Any, length: Any, packed: Any, start: Any, features: Any, labels: Any,
          offsets: Any, rate: Any, epochs: Any, batch_size: Any, updates: Any) -> None:  # fmt: skip
    """Client i trains from model start[i], each `length` long; its update is the difference."""
    height = 0
    for client in range(start.size):
        height = max(height, offsets[client + 1] - offsets[client])
    height = min(height, batch_size)
    top = layers[layers.size - 1]
    in_all = (top.above + top.out_width) * height
    values, gradients, model = aligned(in_all), aligned(in_all), aligned(length)
    constants = aligned(2 * WIDTH)
    constants[WIDTH] = _ONE
    scores, parameters = top.above * height, updates.size // max(start.size, 1)
    for client in range(start.size):
        initial = start[client] * length
        _copy(packed, initial, model, 0, length)
        last = offsets[client + 1]
        for epoch in range(epochs):
            first = offsets[client]
            while first < last:
                rows = min(batch_size, last - first)
                weight = np.float32(1.0 / rows)
                _read(layers, features, first, rows, values)
                _forward(layers, model, rows, height, values)
                _copy(values, scores, gradients, scores, rows * top.out_width)
                shares(gradients, scores, rows, top.out_width, weight)
                for row in range(rows):
                    gradients[scores + row * top.out_width + labels[first + row]] -= weight
                _backward(layers, model, rows, height, values, gradients, constants, rate)
                first += rows
                if first < last or epoch + 1 < epochs:
                    _turn_all(layers, model, 0)
        _unpack_difference(layers, model, packed, initial, updates, client * parameters)


@compiled
def losses(layers: Any, packed: Any, features: Any, labels: Any, batch_size: Any) -> Any:
    """The loss of each example."""
    height = min(labels.size, batch_size)
    top = layers[layers.size - 1]
    values = aligned((top.above + top.out_width) * height)
    found = np.zeros(labels.size)
    for first in range(0, labels.size, batch_size):
        rows = min(batch_size, labels.size - first)
        _read(layers, features, first, rows, values)
        _forward(layers, packed, rows, height, values)
        for row in range(rows):
            scores = top.above * height + row * top.out_width
            found[first + row] = cross_entropy(values, scores, top.out_width, labels[first + row])
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
