"""A tuned plain loop in PyTorch: what a researcher writes who needs no system."""

from __future__ import annotations

from importlib.metadata import version
from typing import ClassVar

import torch
from common import Array, Data, serve
from modules import PlainLoop, tensors, trained


class Loop:
    """Federated averaging with tensors that are made once and changed in place."""

    versions: ClassVar[dict[str, str]] = {"torch": version("torch")}

    def __init__(self, data: Data) -> None:
        self._loop = PlainLoop(data)
        self._learnt = self._loop.learnt
        self._clients = tensors(data)
        self._server = [value.detach().clone() for value in self._learnt]
        self._sums = [torch.zeros_like(value) for value in self._server]

    def train(self, cohort: range) -> None:
        examples = 0
        torch._foreach_zero_(self._sums)
        for client in cohort:
            with torch.no_grad():
                torch._foreach_copy_(self._learnt, self._server)
            self._loop.train(*self._clients[client])
            count = len(self._clients[client][0])
            with torch.no_grad():
                torch._foreach_add_(self._sums, self._learnt, alpha=count)
            examples += count
        torch._foreach_copy_(self._server, self._sums)
        torch._foreach_div_(self._server, examples)

    def parameters(self) -> dict[str, Array]:
        with torch.no_grad():
            torch._foreach_copy_(self._learnt, self._server)
        return trained(self._loop.module)


if __name__ == "__main__":
    serve(Loop)
