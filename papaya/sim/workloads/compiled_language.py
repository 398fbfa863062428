"""The compiled loops of embedding.py and bigram.py. Importing it needs `papaya[numba]`.

A client's whole training in one call, without the global lock; clients one after the other, each
in the same order of operations whatever the batch, so that the bits do not depend on it.
"""

from __future__ import annotations

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


def _compile(**options: Any) -> Any:
    def decorate(function: Any) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no folder for numba's cache can be written
            return njit(nogil=True, **options)(function)

    return decorate


@_compile(inline="always")
def _word(state: Any, counter: Any) -> Any:
    """papaya.sim.draws.splitmix64."""
    word = state + (counter + np.uint64(1)) * _GOLDEN
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return word ^ (word >> np.uint64(31))


@_compile()
def _softmax(logits: Any) -> None:
    """In place. The exponential is Cephes' expf, written out so that the loop becomes vectors."""
    top = logits[0]
    for i in range(logits.size):
        top = max(top, logits[i])
    total = np.float32(0)
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
    for i in range(logits.size):
        total += logits[i]
    scale = np.float32(1) / total
    for i in range(logits.size):
        logits[i] *= scale


@_compile(fastmath={"contract", "reassoc", "nsz", "arcp"})
def embedding(
    models: Any,
    start: Any,
    hashes: Any,
    coins: Any,
    examples: Any,
    contexts: Any,
    following: Any,
    rate: Any,
    epochs: Any,
    batch_size: Any,
    updates: Any,
) -> None:
    size = following.shape[1]
    mask = np.uint64(contexts.size - 1)
    inputs = np.empty((size, _WIDTH), np.float32)
    outputs = np.empty((_WIDTH, size), np.float32)  # transposed: rows of logits
    bias = np.empty(size, np.float32)
    step_outputs = np.empty((_WIDTH, size), np.float32)
    step_bias = np.empty(size, np.float32)
    back = np.empty((batch_size, _WIDTH), np.float32)
    words = np.empty(batch_size, np.int64)
    odds = np.empty(size, np.float32)
    for client in range(start.size):
        model = models[start[client]]
        for word in range(size):
            for d in range(_WIDTH):
                inputs[word, d] = model[word * _WIDTH + d]
                outputs[d, word] = model[(size + word) * _WIDTH + d]
            bias[word] = model[2 * size * _WIDTH + word]
        count = examples[client]
        for _ in range(epochs):
            for first in range(0, count, batch_size):
                last = min(first + batch_size, count)
                scale = rate / np.float32(last - first)
                step_outputs[:] = 0
                step_bias[:] = 0
                for e in range(first, last):
                    draw = _word(hashes[client], np.uint64(e))
                    word = np.int64(contexts[draw & mask])
                    spoken = 1 if (draw >> np.uint64(32)) < coins[client] else 0
                    target = following[spoken, word, (draw >> np.uint64(12)) & mask]
                    entered = inputs[word]
                    odds[:] = bias
                    for d in range(_WIDTH):
                        by = entered[d]
                        row = outputs[d]
                        for i in range(size):
                            odds[i] += by * row[i]
                    _softmax(odds)
                    odds[target] -= np.float32(1)
                    for i in range(size):
                        odds[i] *= scale
                        step_bias[i] += odds[i]
                    for d in range(_WIDTH):
                        by = entered[d]
                        row = outputs[d]
                        step = step_outputs[d]
                        total = np.float32(0)
                        for i in range(size):
                            total += odds[i] * row[i]
                            step[i] += by * odds[i]
                        back[e - first, d] = total
                    words[e - first] = word
                for e in range(last - first):
                    for d in range(_WIDTH):
                        inputs[words[e], d] -= back[e, d]
                for d in range(_WIDTH):
                    for i in range(size):
                        outputs[d, i] -= step_outputs[d, i]
                for i in range(size):
                    bias[i] -= step_bias[i]
        update = updates[client]
        for word in range(size):
            for d in range(_WIDTH):
                update[word * _WIDTH + d] = inputs[word, d] - model[word * _WIDTH + d]
                at = (size + word) * _WIDTH + d
                update[at] = outputs[d, word] - model[at]
            at = 2 * size * _WIDTH + word
            update[at] = bias[word] - model[at]
