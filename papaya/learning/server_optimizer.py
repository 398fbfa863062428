"""The server's optimizer: turns the mean update of a full buffer into the next version.

As in the paper's experiments, clients use SGD and the server FedAdam. The step is a difference of
models and takes the place of the negative gradient.

- fedavg, fedsgd: `torch.optim.SGD` with momentum (rate 1 adds the mean update as it is). They are
  the same on the server; they differ in what the client does before it uploads.
- fedadam: `torch.optim.Adam`, with its bias correction.
- fedyogi, fedadagrad: Reddi et al., "Adaptive Federated Optimization", Algorithm 2: both keep the
  first moment m = beta1 m + (1 - beta1) step, square the step itself and not m, divide by
  sqrt(v) + tau and correct no bias. The algorithm asks for v >= tau^2 at the start; here v = tau^2.
  tau is `epsilon`.

Any other kind is an extension (`extensions.py`): a subclass of `ServerOptimizer` that defines
`initial_moments` and `move`, and takes numbers of its own from `self.parameters`:

    class Signs(ServerOptimizer):
        initial_moments = ()

        def move(self, steps, step, moments):
            return self.rate * np.sign(step), ()

The last `averaged` values of a model are statistics, not parameters: their mean update is added as
it is, whatever the optimizer.

A step is pure and elementwise in float32: given the same bytes, a successor computes the same
bytes. Refused: a step whose result is not finite (OperatorError), so that no broken version is
ever published, an extension that fails (OperatorError), and state of another optimizer, length or
encoding (ProtocolError).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

import numpy as np
from msgspec import Struct

from papaya.config import OptimizerConfig
from papaya.errors import ConfigError, Diverged, InvariantError, OperatorError, ProtocolError
from papaya.learning import extensions
from papaya.learning.parameters import (
    FLOAT32,
    Tensor,
    Vector,
    blocks,
    decode_tensors,
    encode_tensors,
    is_finite,
)

_RATES: Final = {
    "fedavg": 1.0,
    "fedsgd": 1.0,
    "fedadam": 1e-3,
    "fedyogi": 1e-2,
    "fedadagrad": 1e-2,
}
_EPSILONS: Final = {"fedadam": 1e-8, "fedyogi": 1e-3, "fedadagrad": 1e-3}
_MOMENTS: Final = ("first_moment", "second_moment")
_OWN_RATE: Final = 1.0  # of an extension


class OptimizerState(Struct, frozen=True, eq=False):
    """An optimizer's state: the number of steps, and vectors of the length of the model."""

    steps: int
    moments: tuple[Vector, ...]


class ServerOptimizer(ABC):
    """One kind of optimizer. It holds no state: `step` takes it and returns the next.

    `parameters`: the numbers that a task passes to an extension, by name.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self.rate = _RATES.get(config.kind, _OWN_RATE) if config.rate is None else config.rate
        self.parameters = dict(config.parameters)

    @property
    @abstractmethod
    def initial_moments(self) -> tuple[float, ...]:
        """The value with which each moment starts, in every coordinate."""

    def move(
        self, steps: int, step: Tensor, moments: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The change of the parameters at the `steps`-th step (from 1), and the next moments.

        Called for one block of coordinates after the other, so each coordinate must be computed
        from its own values. If it needs those of the others, or its place, define `change` instead.
        """
        raise NotImplementedError

    def change(
        self, steps: int, parameters: Vector, step: Vector, moments: tuple[Vector, ...]
    ) -> tuple[Vector, tuple[Vector, ...]]:
        """The next parameters and moments, as new vectors."""
        result = np.empty_like(parameters)
        after = tuple(np.empty_like(moment) for moment in moments)
        for block in blocks(parameters.size):
            old = tuple(moment[block] for moment in moments)
            moved, new = self.move(steps, step[block], old)
            np.add(parameters[block], moved, out=result[block])
            for moment, values in zip(after, new, strict=True):
                moment[block] = values
        return result, after

    def initial_state(self, length: int) -> OptimizerState:
        """The state before the first step."""
        return OptimizerState(
            0, tuple(np.full(length, value, FLOAT32) for value in self.initial_moments)
        )

    def step(
        self, parameters: Vector, step: Vector, state: OptimizerState
    ) -> tuple[Vector, OptimizerState]:
        """The next version and state; the arguments are not changed."""
        self._check(parameters, step, state)
        steps = state.steps + 1
        with np.errstate(all="ignore"):  # what matters is looked for below
            result, moments = self._checked_change(steps, parameters, step, state.moments)
        if averaged := self.config.averaged:
            tail = slice(max(0, parameters.size - averaged), None)
            np.add(parameters[tail], step[tail], out=result[tail])
        if not all(is_finite(vector) for vector in (result, *moments)):
            raise Diverged(
                f"the model diverged: step {steps} of {self.config.kind} is not finite",
                hint="lower optimizer.rate or the clients' learning rate, or set clip",
            )
        return result, OptimizerState(steps, moments)

    def _checked_change(
        self, steps: int, parameters: Vector, step: Vector, moments: tuple[Vector, ...]
    ) -> tuple[Vector, tuple[Vector, ...]]:
        try:
            result, after = self.change(steps, parameters, step, moments)
            self._check(result, step, OptimizerState(steps, after))
        except Exception as error:
            if self.config.kind in _KINDS:
                raise
            raise OperatorError(
                f"the server optimizer {self.config.kind} failed: {error!r}",
                hint="the operator has to repair the extension of the servers",
            ) from error
        return result, after

    def encode_state(self, state: OptimizerState) -> bytes:
        """The one encoding of this state."""
        tensors = dict(zip(_moment_names(len(state.moments)), state.moments, strict=True))
        return encode_tensors(tensors, {"kind": self.config.kind, "steps": str(state.steps)})

    def decode_state(self, data: bytes, length: int) -> OptimizerState:
        """The state that was encoded, for a model of this length, or ProtocolError."""
        names = _moment_names(len(self.initial_moments))
        tensors, metadata = decode_tensors(data, names, length)
        return OptimizerState(
            _steps(metadata, self.config.kind), tuple(tensors[name] for name in names)
        )

    def _check(self, parameters: Vector, step: Vector, state: OptimizerState) -> None:
        vectors = (parameters, step, *state.moments)
        if len(state.moments) != len(self.initial_moments) or any(
            vector.shape != (parameters.size,) or vector.dtype != FLOAT32 for vector in vectors
        ):
            found = [f"{vector.shape} {vector.dtype}" for vector in vectors]
            raise InvariantError(f"{self.config.kind} cannot step on {found}")


class _Sgd(ServerOptimizer):
    @property
    def initial_moments(self) -> tuple[float, ...]:
        return (0.0,) if self.config.momentum else ()

    def move(
        self, steps: int, step: Tensor, moments: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not moments:
            return self.rate * step, ()
        velocity = self.config.momentum * moments[0] + step
        return self.rate * velocity, (velocity,)


class _Adaptive(ServerOptimizer):
    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self.epsilon = _EPSILONS[config.kind] if config.epsilon is None else config.epsilon

    @property
    def initial_moments(self) -> tuple[float, ...]:
        return (0.0, self.epsilon**2)

    def move(
        self, steps: int, step: Tensor, moments: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        first, second = moments
        first = self.config.beta1 * first + (1 - self.config.beta1) * step
        second = self._second(second, step * step)
        return self._change(steps, first, second), (first, second)

    @abstractmethod
    def _second(self, second: Tensor, squared: Tensor) -> Tensor:
        """The next second moment."""

    def _change(self, steps: int, first: Tensor, second: Tensor) -> Tensor:
        return self.rate * first / (np.sqrt(second) + self.epsilon)


class _Adam(_Adaptive):
    @property
    def initial_moments(self) -> tuple[float, ...]:
        return (0.0, 0.0)

    def _second(self, second: Tensor, squared: Tensor) -> Tensor:
        return self.config.beta2 * second + (1 - self.config.beta2) * squared

    def _change(self, steps: int, first: Tensor, second: Tensor) -> Tensor:
        rate = self.rate / (1 - self.config.beta1**steps)
        root = math.sqrt(1 - self.config.beta2**steps)
        return rate * first / (np.sqrt(second) / root + self.epsilon)


class _Yogi(_Adaptive):
    def _second(self, second: Tensor, squared: Tensor) -> Tensor:
        return second - (1 - self.config.beta2) * squared * np.sign(second - squared)


class _Adagrad(_Adaptive):
    def _second(self, second: Tensor, squared: Tensor) -> Tensor:
        return second + squared


_KINDS: Final[dict[str, type[ServerOptimizer]]] = {
    "fedavg": _Sgd,
    "fedsgd": _Sgd,
    "fedadam": _Adam,
    "fedyogi": _Yogi,
    "fedadagrad": _Adagrad,
}


def server_optimizer(config: OptimizerConfig) -> ServerOptimizer:
    """The optimizer of a task's configuration. Raises ConfigError if this process has none."""
    if (built_in := _KINDS.get(config.kind)) is not None:
        return built_in(config)
    found = extensions.find("server_optimizers", config.kind)
    try:
        optimizer: ServerOptimizer = found(config)
        assert isinstance(optimizer, ServerOptimizer), f"{found!r} is no ServerOptimizer"
        optimizer.initial_state(0)
    except Exception as error:
        raise ConfigError(
            f"the server optimizer {config.kind} cannot be made: {error!r}",
            hint=f"check optimizer.parameters = {dict(config.parameters)}",
        ) from error
    return optimizer


def _moment_names(count: int) -> list[str]:
    more = (f"moment_{number}" for number in range(len(_MOMENTS) + 1, count + 1))
    return [*_MOMENTS[:count], *more]


def _steps(metadata: dict[str, str], kind: str) -> int:
    try:
        steps = int(metadata["steps"])
    except (KeyError, ValueError):
        steps = -1
    if steps < 0 or metadata != {"kind": kind, "steps": str(steps)}:
        raise ProtocolError(f"the metadata of {kind} state must be its steps, not {metadata}")
    return steps
