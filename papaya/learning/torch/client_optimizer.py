"""The steps of a client, in torch: those of `torch.optim`, bit by bit.

They are written out because `torch.optim` imports torch's compiler at its first use, seconds in
each child process. A parameter without a gradient is left as it is, and so is its state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from papaya.learning.definition import ClientSGD

_SMALL_NORM = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class TorchClientOptimizer:
    """Changes `values` in place. Made for one training of `steps` steps, at its initial model.

    `personal`: parameters that were not downloaded, so the proximal term does not apply to them.
    """

    def __init__(
        self,
        client: ClientSGD,
        shared: Sequence[Tensor],
        steps: int,
        personal: Sequence[Tensor] = (),
    ) -> None:
        self.values = values = [*shared, *personal]
        self._client = client
        self._steps = steps
        self._done = 0
        self._initial = [value.detach().clone() for value in shared] if client.proximal else []
        # Of each value: its velocity, or its first and second moment and its number of steps.
        self._velocities: list[Tensor | None] = [None] * len(values)
        self._moments: list[tuple[Tensor, Tensor] | None] = [None] * len(values)
        self._counts = [0] * len(values)

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        with torch.no_grad():
            self.step_without_graph(gradients)

    def step_without_graph(self, gradients: Sequence[Tensor | None]) -> None:
        """For a caller that has switched gradients off already."""
        client = self._client
        rate = client.rate_at(self._done, self._steps)
        self._done += 1
        if client.proximal:
            gradients = self._with_proximal_term(gradients, client.proximal)
        if client.max_gradient_norm:
            gradients = _bounded(gradients, client.max_gradient_norm)
        step = self._adam if client.optimizer else self._sgd
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                step(index, gradient, rate)

    def _with_proximal_term(
        self, gradients: Sequence[Tensor | None], proximal: float
    ) -> list[Tensor | None]:
        count = len(self._initial)
        terms = zip(gradients[:count], self.values[:count], self._initial, strict=True)
        own = [g if g is None else g.add(w - start, alpha=proximal) for g, w, start in terms]
        return [*own, *gradients[count:]]

    def _sgd(self, index: int, gradient: Tensor, rate: float) -> None:
        client, value = self._client, self.values[index]
        if client.weight_decay:
            gradient = gradient.add(value, alpha=client.weight_decay)
        if client.momentum:
            velocity = self._velocities[index]
            if velocity is None:
                velocity = self._velocities[index] = gradient.clone()
            else:
                velocity.mul_(client.momentum).add_(gradient)
            if client.nesterov:
                gradient = gradient.add(velocity, alpha=client.momentum)
            else:
                gradient = velocity
        value.add_(gradient, alpha=-rate)

    def _adam(self, index: int, gradient: Tensor, rate: float) -> None:
        client, value = self._client, self.values[index]
        if client.weight_decay:
            if client.optimizer == "adamw":
                value.mul_(1 - rate * client.weight_decay)
            else:
                gradient = gradient.add(value, alpha=client.weight_decay)
        if (moments := self._moments[index]) is None:
            moments = self._moments[index] = (torch.zeros_like(value), torch.zeros_like(value))
        first, second = moments
        beta1, beta2, epsilon = client.adam
        self._counts[index] += 1
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1 = 1 - beta1 ** self._counts[index]
        correction2 = 1 - beta2 ** self._counts[index]
        scale = (second.sqrt() / math.sqrt(correction2)).add_(epsilon)
        value.addcdiv_(first, scale, value=-rate / correction1)


def _bounded(gradients: Sequence[Tensor | None], most: float) -> list[Tensor | None]:
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients if gradient is not None]
    if not norms:
        return list(gradients)
    factor = (most / (torch.linalg.vector_norm(torch.stack(norms)) + _SMALL_NORM)).clamp(max=1.0)
    return [gradient if gradient is None else gradient * factor for gradient in gradients]
