"""FedJAX at its fastest: its `for_each_client` on the jit back end, without what a round can spare.

Batches come from `ClientDataset.batch`, whose last batch is as long as it is: FedJAX's usual
`shuffle_repeat_batch` would fill it up with examples from the start, which is more work and another
gradient. The shapes, 1 to 32 examples, are all compiled in the warm-up. Sum and mean are FedJAX's
`tree_mean`. `fedjax_stock_peer.py` is FedJAX as it comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, ClassVar

import fedjax
import jax
import jax.numpy as jnp
from common import BATCH, CELLS, RATE, Array, Data, serve

Tree = Any


def word_model(p: Tree, inputs: Any) -> Any:
    """Scores (step, example, word)."""
    entering = p["embedding"][inputs.T] @ p["input"] + p["input_bias"] + p["recurrent_bias"]

    def step(state: Any, entered: Any) -> Any:
        cell, hidden = state
        enter, forget, new, leave = jnp.split(entered + hidden @ p["recurrent"], 4, axis=1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(leave) * jnp.tanh(cell)
        return (cell, hidden), hidden

    zero = jnp.zeros((inputs.shape[0], CELLS), jnp.float32)
    _, hidden = jax.lax.scan(step, (zero, zero), entering)
    return hidden @ p["output"] + p["output_bias"]


def cross_entropy(scores: Any, targets: Any) -> Any:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1)
    return -chosen.mean()


def word_loss(p: Tree, batch: Tree) -> Any:
    return cross_entropy(word_model(p, batch["inputs"]), batch["targets"].T)


VERSIONS = {name: version(name) for name in ("fedjax", "jax", "jaxlib", "dm-haiku")}


def client_datasets(data: Data) -> list[Any]:
    return [
        fedjax.ClientDataset({"inputs": data.inputs[rows], "targets": data.targets[rows]})
        for rows in map(data.slice, range(data.clients))
    ]


class FedJax:
    """The quick start of FedJAX's documentation, with the model of `common`."""

    versions: ClassVar = VERSIONS

    def __init__(self, data: Data) -> None:
        gradient = jax.grad(word_loss)
        self._train_each = fedjax.for_each_client(*client_steps(gradient))
        self._server_optimizer = fedjax.optimizers.sgd(1.0)
        self._parameters = jax.tree_util.tree_map(jnp.asarray, data.first_model)
        self._state = self._server_optimizer.init(self._parameters)
        self._clients = client_datasets(data)

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


def client_steps(gradient: Any) -> tuple[Any, Any, Any]:
    optimizer = fedjax.optimizers.sgd(RATE)

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
