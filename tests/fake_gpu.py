"""A GPU that every machine has: tensors on it are kept on the CPU, and apart from those there.

PyTorch calls Python for each operator on it. An operator that gets tensors of both kinds fails, as
on a real GPU (PyTorch allows single numbers). Results are those of the CPU, bit for bit. Without
convolutions and recurrent layers, for which PyTorch has code for each kind of processor.

It cannot be removed again, so `install` belongs into a process of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "fakegpu"


class _Module(_DummyBackendModule):
    """What PyTorch expects at `torch.fakegpu`."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class FakeGpu:
    """`operators` counts what was computed on it; `seeds` are those it was given."""

    def __init__(self) -> None:
        module = _Module()
        _setup_privateuseone_for_python_backend(NAME, backend_module=module)
        self.seeds = module.seeds
        self.operators = 0
        # By storage, which views of a tensor share. It is kept, so that no address is used twice.
        self._held: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}
        library: Any = torch.library.Library  # it has no types
        self._library = library("_", "IMPL")
        self._library.fallback(self._call, "PrivateUse1")

    def _call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        self.operators += 1
        if operator._schema.name == "aten::_copy_from":  # between the two kinds, or on the GPU
            source, target = (self._content(x) if _is_on_gpu(x) else x for x in args[:2])
            target.copy_(source)
            return args[1]
        given = [x for x in tree_leaves((args, kwargs)) if _is_on_gpu(x)]
        found = operator(*tree_map(self._plain, args), **tree_map(self._plain, kwargs))

        def on_gpu(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            # Operators that work in place return what they were given.
            same = (each for each in given if self._content(each) is value)
            return self._keep(value) if (found := next(same, None)) is None else found

        return tree_map(on_gpu, found)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if _is_on_gpu(value):
            return self._content(value)
        if value.dim():
            raise RuntimeError(f"a tensor of shape {tuple(value.shape)} is not on the GPU")
        return value

    def _content(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._held[tensor.untyped_storage()._cdata][0]

    def _keep(self, content: torch.Tensor) -> torch.Tensor:
        tensor: torch.Tensor = torch._C._acc.create_empty_tensor(
            tuple(content.shape), content.dtype
        )
        storage = tensor.untyped_storage()
        self._held[storage._cdata] = (content, storage)
        return tensor


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME
