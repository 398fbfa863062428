"""FedJAX as it comes: its own `federated_averaging`, called as its documentation does.

It shuffles, fills the last batch of a client up with examples from the start (so it needs one
compiled shape only), hands a random key to every step and computes the norm of every update; its
loss therefore differs a little. `fedjax_peer.py` has the same library without these.
"""

from __future__ import annotations

from typing import Any, ClassVar

import fedjax
import jax
import jax.numpy as jnp
from common import BATCH, RATE, Array, Data, serve
from fedjax.algorithms.fed_avg import federated_averaging
from fedjax_peer import VERSIONS, client_datasets, word_loss


class FedJaxStock:
    """The algorithm and its state; keys are split for each round as FedJAX's samplers do."""

    versions: ClassVar = VERSIONS

    def __init__(self, data: Data) -> None:
        gradient = jax.grad(word_loss)

        def keyed(parameters: Any, batch: Any, _: Any) -> Any:
            return gradient(parameters, batch)

        self._algorithm = federated_averaging(
            keyed,
            fedjax.optimizers.sgd(RATE),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1, seed=1),
        )
        first = jax.tree_util.tree_map(jnp.asarray, data.first_model)
        self._state = self._algorithm.init(first)
        self._clients = client_datasets(data)
        self._round = 0

    def train(self, cohort: range) -> None:
        self._round += 1
        keys = jax.random.split(jax.random.PRNGKey(self._round), len(cohort))
        clients = [(c, self._clients[c], keys[i]) for i, c in enumerate(cohort)]
        self._state, _ = self._algorithm.apply(self._state, clients)
        jax.block_until_ready(self._state.params)

    def parameters(self) -> dict[str, Array]:
        return {name: jax.device_get(value) for name, value in self._state.params.items()}


if __name__ == "__main__":
    serve(FedJaxStock)
