"""A task as a model's owner writes it: one Python file that ends in `task = Task(...)`.

    from papaya.learning.task import AsyncFL, ClientSGD, Examples, Task

    task = Task(
        name="next-word",
        model=NextWord,                     # makes the torch module
        batch=to_tensors,                   # list of stored examples -> tuple of tensors
        loss=loss,                          # (module, *batch) -> mean loss, or a loss per example
        examples=Examples("text"),
        client=ClientSGD(rate=0.5),
        regime=AsyncFL(aggregation_goal=10),
        concurrency=24,
    )

A device never runs code that a server sends. The owner and every device have this file already; a
server names it by `module_hash`, and a device with a different file is not eligible, nor is one
whose model holds other frozen tensors, such as another base model. A task is one file: modules
beside it are not in the hash and cannot be imported.

Refused (OperatorError with file and line): a file that does not run, no task or two tasks, a model
that cannot be made or trained as float32, a loss that is not a scalar. Torch is imported only when
a file is loaded.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from msgspec import structs

from papaya.config import (
    Aggregation,
    AsyncFL,
    EvaluationPlan,
    MetricTarget,
    OptimizerConfig,
    Privacy,
    PrivateEvaluation,
    Requirements,
    SecureAggregation,
    Staleness,
    StopRule,
    SyncFL,
    TaskConfig,
    Weighting,
)
from papaya.errors import ConfigError, OperatorError, PapayaError
from papaya.learning.checkpoint_files import read_checkpoint, read_frozen
from papaya.learning.definition import ClientSGD, Examples, Metric, Task, module_hash
from papaya.learning.executorch.program_file import ProgramFile
from papaya.learning.notebook_identity import notebook_identity
from papaya.learning.parameters import Manifest, Vector, is_statistic
from papaya.learning.schedules import ConstantRate, CosineDecay, LinearDecay, StepDecay

__all__ = [
    "Aggregation",
    "AsyncFL",
    "ClientSGD",
    "ConstantRate",
    "CosineDecay",
    "EvaluationPlan",
    "Examples",
    "LinearDecay",
    "LoadedTask",
    "Metric",
    "MetricTarget",
    "OptimizerConfig",
    "Privacy",
    "PrivateEvaluation",
    "Requirements",
    "SecureAggregation",
    "Staleness",
    "StepDecay",
    "StopRule",
    "SyncFL",
    "Task",
    "Weighting",
    "load_task",
    "loaded_in_memory",
    "module_hash",
]

NO_FILE: Final = Path("<notebook>")
_MAX_FILE_BYTES: Final = 1 << 20
_SHOWN_BYTES: Final = 60  # of an example, in a hint


@dataclass(frozen=True)
class LoadedTask:
    """A task whose file has run and whose model was made and checked.

    `frozen` is the digest of what the model holds and does not train; `module_hash` contains it.
    """

    path: Path
    task: Task
    module_hash: str
    manifest: Manifest
    frozen: bytes = b""

    def config(self) -> TaskConfig:
        """The configuration that is submitted to a server, for devices with this file."""
        return self._config(self.module_hash, "torch")

    def config_for(self, program: ProgramFile) -> TaskConfig:
        """The same, for devices with a program that was compiled from this file."""
        if program.header.source != self.module_hash:
            raise OperatorError(
                f"the program was compiled from {program.header.source}, "
                f"{self.path} is {self.module_hash}",
                hint=f"compile it again: papaya task compile {self.path}",
            )
        return self._config(program.name, "executorch")

    def _config(self, module: str, engine: str) -> TaskConfig:
        averaged = 0
        if self.task.batch_norm == "averaged":
            shapes = dict(self.manifest.tensors)
            averaged = sum(math.prod(shapes[name]) for name in shapes if is_statistic(name))
        return self.task.config(self.manifest.length, module, engine, averaged)

    def initial_parameters(self, *, seed: int = 0, checkpoint: Path | None = None) -> Vector:
        """Version 0: the checkpoint's tensors, or the module's own initialisation by this seed."""
        if checkpoint is not None:
            return read_checkpoint(checkpoint, self.manifest)
        from papaya.learning.torch.module import initial_parameters  # imports torch

        return initial_parameters(self.task, self.manifest, seed)

    def frozen_file(self) -> bytes:
        """The frozen tensors that devices get in a file of their own; empty if there are none."""
        from papaya.learning.torch.frozen import frozen_bytes
        from papaya.learning.torch.module import make_module  # imports torch

        if self.task.frozen is None:
            return b""
        return frozen_bytes(make_module(self.task), read_frozen(Path(self.task.frozen)))

    def try_on(self, examples: Sequence[bytes], what: str) -> None:
        """Try `batch`, `loss` and `metrics`; ConfigError says where in the file they fail."""
        from papaya.learning.torch.module import tried_batch, try_loss, try_metrics  # imports torch

        try:
            batch = tried_batch(self.task, examples)
        except Exception as error:
            hint = (
                f"batch is called with a list of bytes; the first one is {_shortened(examples[0])}"
            )
            raise _located(self.path, error, f"{what}: batch", hint) from error
        try:
            try_loss(self.task, batch, len(examples))
        except Exception as error:
            made = ", ".join(map(_described, batch))
            hint = f"loss is called with the module and the tensors that batch returns: {made}"
            raise _located(self.path, error, f"{what}: loss", hint) from error
        try:
            try_metrics(self.task, batch, len(examples))
        except Exception as error:
            made = ", ".join(map(_described, batch))
            hint = f"metrics are called with the module and the tensors that batch returns: {made}"
            raise _located(self.path, error, f"{what}: metrics", hint) from error

    def try_loop(self, examples: Sequence[bytes], what: str) -> None:
        """Train on them if the task has a loop of its own; ConfigError says where it fails.

        This is not done when a file is loaded: it computes gradients, see
        papaya/device/fork_server.py.
        """
        from papaya.learning.torch.engine import TorchEngine  # imports torch

        if self.task.train is None or not examples:
            return
        try:
            TorchEngine(self).train(self.initial_parameters(), examples, seed=0)
        except Exception as error:
            raise self.loop_failed(error, what) from error

    def loop_failed(self, error: Exception, what: str) -> ConfigError:
        hint = "train is called with a LocalTraining (papaya/learning/torch/local_training.py)"
        return _located(self.path, error, f"{what}: train", hint, self.task.train)


def load_task(path: Path, frozen: Path | None = None) -> LoadedTask:
    """Run the owner's file in this process and check what it defines. Raises OperatorError.

    `frozen`: the file of frozen tensors that came with a bundle, instead of the one in the task.
    """
    source = _read(path)
    # The hash makes the module's name unique for files of the same name.
    module = ModuleType("papaya_task_" + module_hash(source).removeprefix("sha256:"))
    module.__file__ = str(path)
    _run(source, path, module)
    task = _the_task(path, module)
    if task.frozen is not None:
        task = structs.replace(task, frozen=str(frozen or path.parent / task.frozen))
    try:
        from papaya.learning.torch.module import checked_module
    except ImportError as error:
        raise OperatorError(
            f"{path} needs the torch engine: {error}", hint="pip install 'papaya-fl[torch]'"
        ) from error
    try:
        manifest, digest = checked_module(task)
        loaded = LoadedTask(path, task, module_hash(source, digest), manifest, digest)
        loaded.config()
    except Exception as error:
        raise _located(path, error) from error
    if task.sample:
        loaded.try_on(task.sample, "`sample`")
    return loaded


def loaded_in_memory(task: Task) -> LoadedTask:
    """A task that is defined in this process, such as in a notebook: it has no file, so no other
    process can load it. Its hash is of its code and of the values that the code uses.
    """
    from papaya.learning.torch.module import checked_module

    manifest, digest = checked_module(task)
    name = module_hash(notebook_identity(task), digest)
    loaded = LoadedTask(NO_FILE, task, name, manifest, digest)
    loaded.config()
    if task.sample:
        loaded.try_on(task.sample, "`sample`")
    return loaded


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            source = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise OperatorError(
            f"cannot read task file {path}: {error.strerror}", hint="check the path"
        ) from error
    if len(source) > _MAX_FILE_BYTES:
        raise OperatorError(
            f"task file {path} has more than {_MAX_FILE_BYTES} bytes",
            hint="a task file contains code; put weights into a checkpoint",
        )
    return source


def _run(source: bytes, path: Path, module: ModuleType) -> None:
    try:
        code = compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        what = getattr(error, "msg", None) or error
        raise OperatorError(
            f"{path}:{line}: syntax error: {what}", hint=f"try: python {path}"
        ) from error
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module.__name__, None)
        raise _located(path, error) from error


def _the_task(path: Path, module: ModuleType) -> Task:
    tasks = {name: value for name, value in vars(module).items() if isinstance(value, Task)}
    if "task" not in tasks:
        found = f", only {sorted(tasks)}" if tasks else ""
        raise OperatorError(
            f"{path} defines no `task`{found}", hint="end the file with: task = Task(...)"
        )
    if others := sorted(name for name, value in tasks.items() if value is not tasks["task"]):
        raise OperatorError(
            f"{path} defines more tasks than `task`: {others}",
            hint="write one file per task: devices identify a task by its file",
        )
    return tasks["task"]


def _shortened(example: bytes) -> str:
    more = "…" if len(example) > _SHOWN_BYTES else ""
    return f"{example[:_SHOWN_BYTES]!r}{more}"


def _described(value: object) -> str:
    """A tensor by its kind and shape: `torch.int64[1, 20]`."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if shape is None or dtype is None else f"{dtype}{list(shape)}"


def _located(
    path: Path,
    error: BaseException,
    tried: str | None = None,
    hint: str | None = None,
    function: object = None,
) -> ConfigError:
    """The error with the deepest line of the owner's file that was running, or else with the first
    line of the function.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    code = getattr(function, "__code__", None)
    if not lines and code is not None and code.co_filename == str(path):
        lines = [code.co_firstlineno]
    place = f"{path}:{lines[-1]}" if lines else str(path)
    while_trying = "" if tried is None else f" (while trying {tried})"
    if isinstance(error, PapayaError):
        return ConfigError(f"{place}: {error}{while_trying}", hint=error.hint)
    if isinstance(error, ImportError):
        hint = "a task is one file: move what it needs into it, or install the package"
    elif hint is None:
        hint = f"try: python {path}"
    return ConfigError(f"{place}: {type(error).__name__}: {error}{while_trying}", hint=hint)
