"""Where a module computes: on the CPU, as on devices, or on a GPU, in a simulation.

A GPU is what PyTorch calls the accelerator of the machine: CUDA, ROCm, XPU or Apple's MPS.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.utils.rnn import PackedSequence

from papaya.errors import OperatorError

CPU: Final = torch.device("cpu")
# A packed sequence is a named tuple, but keeps the lengths of its sequences on the CPU.
_WITH_TO: Final[tuple[Any, ...]] = (torch.Tensor, PackedSequence)


def gpu() -> torch.device:
    """The GPU that PyTorch uses on this machine. Raises OperatorError if there is none."""
    if not has_gpu():
        raise OperatorError(
            f"PyTorch {torch.__version__} finds no GPU on this machine",
            hint="choose --steps auto, or install a build of PyTorch for your GPU",
        )
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def has_gpu() -> bool:
    return torch.accelerator.is_available()


def moved(value: Any, processor: torch.device) -> Any:
    """The same value with its tensors on this processor, also those in tuples, lists and dicts.

    Objects of other classes stay as they are: their tensors are not looked for. For the CPU nothing
    is moved, because batches are made there.
    """
    if processor == CPU:
        return value
    if isinstance(value, _WITH_TO):
        return value.to(processor)
    if isinstance(value, dict):
        return {key: moved(each, processor) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple
        # The class may take arguments other than the fields.
        return type(value)._make(moved(each, processor) for each in value)
    if type(value) in (tuple, list):
        return type(value)(moved(each, processor) for each in value)
    return value
