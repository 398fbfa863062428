"""The steps of a client, in numpy: those of `papaya/learning/torch/client_optimizer.py`, up to
rounding. The program computes gradients only, so its owner can change these settings without
compiling it again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import Vector

_SMALL_NORM = 1e-6


class NumpyClientOptimizer:
    """Changes `values` in place. Made for one training of `steps` steps, at its initial model.

    `personal`: parameters that were not downloaded, so the proximal term does not apply to them.
    """

    def __init__(
        self,
        client: ClientSGD,
        values: Mapping[str, Vector],
        steps: int,
        personal: Collection[str] = (),
    ) -> None:
        self._client = client
        self._values = values
        self._steps = steps
        self._done = 0
        shared = [name for name in values if name not in personal]
        self._initial = {name: values[name].copy() for name in shared} if client.proximal else {}
        self._velocities: dict[str, Vector] = {}
        self._moments: dict[str, tuple[Vector, Vector]] = {}

    def step(self, gradients: Mapping[str, Vector]) -> None:
        """The gradients are not kept: they may be views that the next run overwrites."""
        client = self._client
        rate = client.rate_at(self._done, self._steps)
        self._done += 1
        if client.proximal:
            mu, terms = np.float32(client.proximal), dict(gradients)
            for name, start in self._initial.items():
                terms[name] = gradients[name] + mu * (self._values[name] - start)
            gradients = terms
        if client.max_gradient_norm:
            gradients = _bounded(gradients, client.max_gradient_norm)
        step = self._adam if client.optimizer else self._sgd
        for name, gradient in gradients.items():
            step(name, gradient, rate)

    def _sgd(self, name: str, gradient: Vector, rate: float) -> None:
        client, value = self._client, self._values[name]
        momentum = np.float32(client.momentum)
        if client.weight_decay:
            gradient = gradient + np.float32(client.weight_decay) * value
        if client.momentum:
            if name in self._velocities:
                self._velocities[name] *= momentum
                self._velocities[name] += gradient
            else:
                self._velocities[name] = gradient.copy()
            velocity = self._velocities[name]
            gradient = gradient + momentum * velocity if client.nesterov else velocity
        value -= np.float32(rate) * gradient

    def _adam(self, name: str, gradient: Vector, rate: float) -> None:
        client, value = self._client, self._values[name]
        if client.weight_decay:
            if client.optimizer == "adamw":
                value *= np.float32(1 - rate * client.weight_decay)
            else:
                gradient = gradient + np.float32(client.weight_decay) * value
        if name not in self._moments:
            self._moments[name] = (np.zeros_like(value), np.zeros_like(value))
        first, second = self._moments[name]
        beta1, beta2, epsilon = client.adam
        first += np.float32(1 - beta1) * (gradient - first)
        second *= np.float32(beta2)
        second += np.float32(1 - beta2) * (gradient * gradient)
        correction1, correction2 = 1 - beta1**self._done, 1 - beta2**self._done
        scale = np.sqrt(second) / np.float32(math.sqrt(correction2)) + np.float32(epsilon)
        value -= np.float32(rate / correction1) * (first / scale)


def _bounded(gradients: Mapping[str, Vector], most: float) -> dict[str, Vector]:
    norm = math.sqrt(sum(float(np.vdot(gradient, gradient)) for gradient in gradients.values()))
    factor = np.float32(min(1.0, most / (norm + _SMALL_NORM)))
    return {name: factor * gradient for name, gradient in gradients.items()}
