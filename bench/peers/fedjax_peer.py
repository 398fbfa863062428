"""FedJAX at its fastest: its `for_each_client` on the jit back end, without what a round can spare.

Batches come from `ClientDataset.batch`, whose last batch is as long as it is: FedJAX's usual
`shuffle_repeat_batch` would fill it up with examples from the start, which is more work and another
gradient. The shapes, 1 to 32 examples, are all compiled in the warm-up. Sum and mean are FedJAX's
`tree_mean`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar

import fedjax
import jax
import jax.numpy as jnp
import jax_models
from common import BATCH, Array, Data, serve

Tree = Any


class FedJax:
    """The quick start of FedJAX's documentation, with the models of `jax_models.py`."""

    versions: ClassVar = {name: version(name) for name in ("fedjax", "jax", "jaxlib", "dm-haiku")}

    def __init__(self, data: Data) -> None:
        frozen = {name: jnp.asarray(value) for name, value in data.frozen.items()}
        loss = partial(jax_models.loss, data.model, data.form)

        def batch_loss(p: Tree, batch: Tree) -> Any:
            return loss(p | frozen, batch["inputs"], batch["targets"])

        self._train_each = fedjax.for_each_client(*client_steps(jax.grad(batch_loss), data.rate))
        self._server_optimizer = fedjax.optimizers.sgd(1.0)
        self._parameters = {name: jnp.asarray(value) for name, value in data.trained.items()}
        self._state = self._server_optimizer.init(self._parameters)
        self._clients = [
            fedjax.ClientDataset({"inputs": data.inputs[rows], "targets": data.targets[rows]})
            for rows in map(data.slice, range(data.clients))
        ]

    def train(self, cohort: range) -> None:
        clients = [(c, self._clients[c].batch(batch_size=BATCH), None) for c in cohort]
        mean = fedjax.tree_util.tree_mean(self._weighted(clients))
        self._state, self._parameters = self._server_optimizer.apply(
            mean, self._state, self._parameters
        )
        jax.block_until_ready(self._parameters)

    def parameters(self) -> dict[str, Array]:
        return {name: jax.device_get(value) for name, value in self._parameters.items()}

    def _weighted(self, clients: list[Any]) -> Iterator[tuple[Tree, int]]:
        for client, difference in self._train_each(self._parameters, clients):
            yield difference, len(self._clients[client])


def client_steps(gradient: Any, rate: float) -> tuple[Any, Any, Any]:
    optimizer = fedjax.optimizers.sgd(rate)

    def init(server: Tree, _: None) -> Tree:
        return {"parameters": server, "optimizer": optimizer.init(server)}

    def step(state: Tree, batch: Tree) -> Tree:
        gradients = gradient(state["parameters"], batch)
        next_state, parameters = optimizer.apply(gradients, state["optimizer"], state["parameters"])
        return {"parameters": parameters, "optimizer": next_state}

    def final(server: Tree, state: Tree) -> Tree:
        return jax.tree_util.tree_map(jnp.subtract, server, state["parameters"])

    return init, step, final


if __name__ == "__main__":
    serve(FedJax)
