"""pfl-research as its documentation uses it: FederatedAveraging over SimulatedBackend, PyTorch.

Users are in-memory tensors that are made once. The algorithm's own `run` is asked for one more
iteration at a time; evaluation is off after the first, which belongs to the warm-up.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, ClassVar

import torch
import torch_models
from common import BATCH, Array, Data, serve
from modules import first_module, tensors, trained
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

_NEVER = 10**9


class WithLoss(nn.Module):
    """What pfl asks a module for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return torch_models.loss(self.module, inputs, targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Never called in a round that counts."""
        return {}


class Pfl:
    """One model, one algorithm, and a sampler that follows the cohorts of `common`."""

    versions: ClassVar[dict[str, str]] = {name: version(name) for name in ("pfl", "torch")}

    def __init__(self, data: Data) -> None:
        torch.set_num_threads(1)
        self._rounds = 0
        self._cohort = iter(range(0))
        users = [
            PyTorchTensorDataset(pair, user_id=str(user)) for user, pair in enumerate(tensors(data))
        ]
        dataset = FederatedDataset(users.__getitem__, lambda: next(self._cohort))
        module = WithLoss(first_module(data))
        learnt = [value for value in module.parameters() if value.requires_grad]
        self._model = PyTorchModel(
            module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(learnt, lr=1.0),
        )
        self._backend = SimulatedBackend(dataset, dataset, postprocessors=[WeightByDatapoints()])
        self._algorithm = FederatedAveraging()
        self._local = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=data.rate, local_batch_size=BATCH
        )

    def train(self, cohort: range) -> None:
        self._rounds += 1
        self._cohort = iter(cohort)
        self._algorithm.run(
            NNAlgorithmParams(
                central_num_iterations=self._rounds,
                evaluation_frequency=_NEVER,
                train_cohort_size=len(cohort),
                val_cohort_size=None,
            ),
            self._backend,
            self._model,
            self._local,
            send_metrics_to_platform=False,
        )

    def parameters(self) -> dict[str, Array]:
        return trained(self._model.pytorch_model.module)


if __name__ == "__main__":
    serve(Pfl)
