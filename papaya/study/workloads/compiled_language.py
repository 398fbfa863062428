"""The compiled loops of the models in language.py. Importing it needs `papaya-fl[numba]`.

A client's whole training in one call, without the global lock; clients one after the other, each
in the same order of operations whatever the batch, so that the bits do not depend on it.

Every loop takes what `LanguageWorkload` gives it: models and the row of each client's start among
them, the hash and the coin of each device's data, how many examples, the tables to draw from, the
client's rate, epochs and batch size, and the matrix that the updates are written to.

LLVM may reorder sums, so another kind of CPU may round otherwise. The pieces of a loop are inlined
before LLVM sees them: a piece that is compiled on its own as well would be called in the one or in
the other copy, depending on whether numba has just compiled it or found it in its cache, and the
two round differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import njit

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_WIDTH: Final = 12
_LOG2E: Final = np.float32(1.4426950408889634)
_LN2_HIGH: Final = np.float32(0.693359375)
_LN2_LOW: Final = np.float32(-2.12194440e-4)
_REORDERED: Final = {"contract", "reassoc", "nsz", "arcp"}


def compile_loop(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no folder for numba's cache can be written
            return njit(nogil=True, **options)(function)

    return decorate


@compile_loop(inline="always")
def _draw(state: Any, coin: Any, counter: Any, contexts: Any, following: Any) -> Any:
    """(word, next word) of a device: `LanguageWorkload.examples`."""
    draw = state + (np.uint64(counter) + np.uint64(1)) * _GOLDEN  # papaya.sim.draws.splitmix64
    draw = (draw ^ (draw >> np.uint64(30))) * _MIX_1
    draw = (draw ^ (draw >> np.uint64(27))) * _MIX_2
    draw = draw ^ (draw >> np.uint64(31))
    mask = np.uint64(contexts.size - 1)
    word = np.int64(contexts[draw & mask])
    spoken = 1 if (draw >> np.uint64(32)) < coin else 0
    return word, np.int64(following[spoken, word, (draw >> np.uint64(12)) & mask])


@compile_loop(inline="always")
def _error(logits: Any, target: Any, scale: Any) -> None:
    """In place: the gradient of the loss by the logits, times `scale`.

    The exponential is Cephes' expf, written out so that the loop becomes vectors.
    """
    top = logits[0]
    for i in range(logits.size):
        top = max(top, logits[i])
    for i in range(logits.size):
        x = max(logits[i] - top, np.float32(-87))
        k = np.int32(x * _LOG2E - np.float32(0.5))
        kf = np.float32(k)
        r = x - kf * _LN2_HIGH - kf * _LN2_LOW
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        p = p * r * r + r + np.float32(1)
        logits[i] = p * np.int32((k + np.int32(127)) << np.int32(23)).view(np.float32)
    total = np.float32(0)
    for i in range(logits.size):
        total += logits[i]
    by = scale / total
    for i in range(logits.size):
        logits[i] *= by
    logits[target] -= scale


@compile_loop(fastmath=_REORDERED)
def embedding(
    models: Any, start: Any, hashes: Any, coins: Any, examples: Any, contexts: Any,
    following: Any, rate: Any, epochs: Any, batch_size: Any, updates: Any,
) -> None:  # fmt: skip
    size = following.shape[1]
    inputs, outputs, steps, back, odds = _space(size, batch_size)
    words, targets = np.empty(examples.max(), np.int64), np.empty(examples.max(), np.int64)
    for client in range(start.size):
        model, count = models[start[client]], examples[client]
        for e in range(count):
            words[e], targets[e] = _draw(hashes[client], coins[client], e, contexts, following)
        _unpack(model, inputs, outputs)
        _fit(
            inputs, outputs, words[:count], targets[:count], rate, epochs, batch_size,
            steps, back, odds,
        )  # fmt: skip
        _write_update(model, inputs, outputs, updates[client])


@compile_loop(fastmath=_REORDERED)
def embedding_of_pairs(
    models: Any, start: Any, words: Any, targets: Any, offsets: Any, rate: Any, epochs: Any,
    batch_size: Any, updates: Any,
) -> None:  # fmt: skip
    """Client i has the pairs offsets[i] to offsets[i + 1] of (words, targets)."""
    size = models.shape[1] // (2 * _WIDTH + 1)
    inputs, outputs, steps, back, odds = _space(size, batch_size)
    for client in range(start.size):
        model, first, last = models[start[client]], offsets[client], offsets[client + 1]
        _unpack(model, inputs, outputs)
        _fit(
            inputs, outputs, words[first:last], targets[first:last], rate, epochs, batch_size,
            steps, back, odds,
        )  # fmt: skip
        _write_update(model, inputs, outputs, updates[client])


@compile_loop(inline="always")
def _space(size: Any, batch_size: Any) -> Any:
    """What the training of one client needs: inputs, outputs, steps, back, odds."""
    inputs = np.empty((size, _WIDTH), np.float32)
    outputs = np.empty((_WIDTH + 1, size), np.float32)  # transposed: rows of logits; the bias last
    steps = np.empty((_WIDTH + 1, size), np.float32)
    back = np.empty((batch_size, _WIDTH), np.float32)
    return inputs, outputs, steps, back, np.empty(size, np.float32)


@compile_loop(inline="always")
def _fit(
    inputs: Any, outputs: Any, words: Any, targets: Any, rate: Any, epochs: Any, batch_size: Any,
    steps: Any, back: Any, odds: Any,
) -> None:  # fmt: skip
    for _ in range(epochs):
        for first in range(0, words.size, batch_size):
            last = min(first + batch_size, words.size)
            scale = rate / np.float32(last - first)
            steps[:] = 0
            for e in range(first, last):
                _look_back(
                    inputs[words[e]], outputs, targets[e], scale, odds, steps, back[e - first]
                )
            _descend(inputs, outputs, words[first:last], back, steps)


@compile_loop(inline="always")
def _unpack(model: Any, inputs: Any, outputs: Any) -> None:
    size = inputs.shape[0]
    for word in range(size):
        for d in range(_WIDTH):
            inputs[word, d] = model[word * _WIDTH + d]
            outputs[d, word] = model[(size + word) * _WIDTH + d]
        outputs[_WIDTH, word] = model[2 * size * _WIDTH + word]


@compile_loop(inline="always")
def _look_back(
    entered: Any, outputs: Any, target: Any, scale: Any, odds: Any, steps: Any, back: Any
) -> None:
    """One example: its gradient is added to `steps`, that of its input goes into `back`."""
    size = odds.size
    odds[:] = outputs[_WIDTH]
    for d in range(_WIDTH):
        by, row = entered[d], outputs[d]
        for i in range(size):
            odds[i] += by * row[i]
    _error(odds, target, scale)
    bias = steps[_WIDTH]
    for i in range(size):
        bias[i] += odds[i]
    for d in range(_WIDTH):
        by, row, step = entered[d], outputs[d], steps[d]
        total = np.float32(0)
        for i in range(size):
            total += odds[i] * row[i]
            step[i] += by * odds[i]
        back[d] = total


@compile_loop(inline="always")
def _descend(inputs: Any, outputs: Any, words: Any, back: Any, steps: Any) -> None:
    for e in range(words.size):
        for d in range(_WIDTH):
            inputs[words[e], d] -= back[e, d]
    for d in range(_WIDTH + 1):
        for i in range(outputs.shape[1]):
            outputs[d, i] -= steps[d, i]


@compile_loop(inline="always")
def _write_update(model: Any, inputs: Any, outputs: Any, update: Any) -> None:
    size = inputs.shape[0]
    for word in range(size):
        for d in range(_WIDTH):
            update[word * _WIDTH + d] = inputs[word, d] - model[word * _WIDTH + d]
            at = (size + word) * _WIDTH + d
            update[at] = outputs[d, word] - model[at]
        at = 2 * size * _WIDTH + word
        update[at] = outputs[_WIDTH, word] - model[at]


@compile_loop(fastmath=_REORDERED)
def bigram(
    models: Any, start: Any, hashes: Any, coins: Any, examples: Any, contexts: Any,
    following: Any, rate: Any, epochs: Any, batch_size: Any, updates: Any,
) -> None:  # fmt: skip
    """The model is not copied: a client touches few rows, and its update is the rest."""
    size = following.shape[1]
    back = np.empty((batch_size, size), np.float32)
    words = np.empty(batch_size, np.int64)
    for client in range(start.size):
        model, update = models[start[client]], updates[client]
        count = examples[client]
        update[:] = 0
        for _ in range(epochs):
            for first in range(0, count, batch_size):
                batch = min(batch_size, count - first)
                scale = rate / np.float32(batch)
                for e in range(batch):
                    words[e], target = _draw(
                        hashes[client], coins[client], first + e, contexts, following
                    )
                    at, odds = words[e] * size, back[e]
                    for i in range(size):
                        odds[i] = model[at + i] + update[at + i]
                    _error(odds, target, scale)
                for e in range(batch):
                    at, odds = words[e] * size, back[e]
                    for i in range(size):
                        update[at + i] -= odds[i]
