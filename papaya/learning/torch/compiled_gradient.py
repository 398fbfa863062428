"""The gradient of a task's loss as machine code, for any number of examples in a batch.

The owner's `loss` is traced once with an unknown batch size: forward and backward together become
one graph over the flat vector of parameters, without Python or autograd between its operators.
Inductor compiles it to a shared library (`g++` or `$CXX` is needed), which is kept in the user's
cache under a digest of the graph, the version of torch, the compiler, its settings and the
instruction set, so that it is compiled once for a model. No model is recognised: whatever can be
traced is compiled. The library is linked with a small runtime (gradient_runtime.py), or with torch
if it calls functions that the runtime lacks.

    (parameters, frozen tensors …, batch …)  ->  (loss, gradient)

Reproducible: the same library gives the same bits for the same inputs, whatever else is trained in
the same run. Against eager PyTorch it rounds differently: a gradient agrees to `TOLERANCE` of its
norm, which is checked for two batch sizes before a library is used.

Refused (CannotCompile, with the reason): random operators such as dropout, which draw other numbers
in compiled code; Python that depends on values or on the batch size; tensors that the loss changes;
batches that are not tensors with one row for each example; a graph that would compile for many
minutes, as recurrent layers over long sequences have; no compiler.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call

from papaya.errors import CannotCompile, PapayaError
from papaya.learning.definition import Task
from papaya.learning.torch.fast_operators import FAST_OPERATORS
from papaya.learning.torch.gradient_runtime import (
    DTYPES,
    RuntimeGradient,
    built_runtime,
    is_enough,
    linked_with,
    machine_digest,
    make_private,
)
from papaya.learning.torch.module import Batch, batch_loss, make_module, no_files_left, read_batch
from papaya.learning.torch.parts import parts_of

TOLERANCE: Final = 1e-4
"""The largest distance to eager PyTorch's gradient, relative to its norm."""

_MOST_NODES: Final = 6000  # of a graph: about five minutes of compilation
_LEAST_EXAMPLES: Final = 2  # torch's symbolic sizes start at two
_SETTINGS: Final = {
    "cpp.threads": 1,
    "compile_threads": 1,
    # Compiling the headers ahead takes longer than the first library, and leaves 150 MB in /tmp.
    "aot_inductor.precompile_headers": False,
}
_SMALL: Final = 1e-12


Form: TypeAlias = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class Library(NamedTuple):
    """A compiled gradient on disk. Other processes load it without tracing again.

    `form`: dtype and shape of the tensors of a batch, apart from the number of examples.
    `is_partial`: whether some parameters never get a gradient.
    `least_examples`: of a batch.
    `runtime`: what the library is linked with (gradient_runtime.py); None if that is torch.
    """

    path: Path
    form: Form
    is_partial: bool
    least_examples: int = _LEAST_EXAMPLES
    runtime: Path | None = None


class CompiledGradient:
    """A loaded library, for a module whose frozen tensors it uses."""

    def __init__(self, library: Library, module: torch.nn.Module) -> None:
        self.library = library
        self._frozen = [value.detach().contiguous() for value in _frozen(module).values()]
        self.runtime: RuntimeGradient | None = None
        if library.runtime is not None:
            self.runtime = RuntimeGradient(library.path, library.runtime, self._frozen)
            return
        import torch._inductor

        with _quiet():
            self._run = torch._inductor.aoti_load_package(str(library.path)).loader.run

    def takes(self, batch: Batch) -> bool:
        """Whether this is a batch as the library was compiled for."""
        if _form(batch) != self.library.form:
            return False
        return min(map(len, batch)) >= self.library.least_examples

    def __call__(self, parameters: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss and its gradient, both without a graph."""
        if self.runtime is not None:
            return self.runtime.gradient(parameters, batch)
        loss, gradient = self._run([parameters, *self._frozen, *batch])
        return loss, gradient


def compile_gradient(task: Task, examples: Sequence[bytes], folder: Path) -> Library:
    """Trace, compile if `folder` has no such library yet, and check it. Raises CannotCompile.

    `examples`: a few of the task's, at least two; they tell the shapes, and the check uses them.
    """
    if len(examples) < _LEAST_EXAMPLES:
        raise CannotCompile(f"tracing needs {_LEAST_EXAMPLES} examples, found {len(examples)}")
    if task.train is not None:
        raise CannotCompile("the task has a training loop of its own")
    if task.client.precision:
        raise CannotCompile(
            f"clients train with {task.client.precision}, but compiled steps use float32"
        )
    module = make_module(task).train()
    parts = parts_of(task, module)
    if parts.personal or len(parts.shared_parameters) < len(parts.shared):
        raise CannotCompile("the model has personal tensors or running statistics")
    batch = tuple(
        value.contiguous() if isinstance(value, Tensor) else value
        for value in read_batch(task, examples)
    )
    if (form := _form(batch)) is None or any(len(value) != len(examples) for value in batch):
        raise CannotCompile("batch returns something else than tensors with a row per example")
    traced = trace_gradient(task, module, batch)
    library = _library(traced, folder, form)
    compiled = CompiledGradient(library, module)
    for size in (len(examples), _LEAST_EXAMPLES):
        if not (error := _error(compiled, task, module, batch, size)) <= TOLERANCE:
            raise CannotCompile(f"a gradient of {size} examples is off by {error:.1e} of its norm")
    with suppress(CannotCompile):
        if _error(compiled, task, module, batch, 1) <= TOLERANCE:
            return library._replace(least_examples=1)
    return library


# -- tracing ------------------------------------------------------------------------------------


class _Loss(torch.nn.Module):
    """The owner's loss as a module, so that `functional_call` can give it other parameters."""

    def __init__(self, task: Task, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self._task = task

    def forward(self, *batch: Tensor) -> Tensor:
        return batch_loss(self._task, self.module, batch, batch[0].shape[0])


def _frozen(module: torch.nn.Module) -> dict[str, Tensor]:
    """What the gradient is not taken of: inputs too, so that a base model is in no library."""
    parameters = ((n, value) for n, value in module.named_parameters() if not value.requires_grad)
    return dict(parameters) | dict(module.named_buffers())


@dataclass(frozen=True)
class TracedGradient:
    """A graph of (loss, gradient) and the inputs that it was traced with."""

    graph: torch.fx.GraphModule
    inputs: tuple[Tensor, ...]
    batched: int  # how many of the inputs, the last ones, have a row for each example
    is_partial: bool

    @property
    def digest(self) -> str:
        hasher = hashlib.sha256()
        about = (machine_digest(), sorted(_SETTINGS.items()))
        hasher.update(f"{about}\n{self.graph.code}".encode())
        first = len(self.inputs) - self.batched
        for number, value in enumerate(self.inputs):
            shape = list(value.shape[number >= first :])
            hasher.update(f"{value.dtype} {shape}\n".encode())
        for name, value in _constants(self.graph):
            hasher.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
            hasher.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return hasher.hexdigest()[:32]


def trace_gradient(task: Task, module: torch.nn.Module, batch: Batch) -> TracedGradient:
    """The graph for any number of examples from two on. Raises CannotCompile."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention import SDPBackend, sdpa_kernel

    loss = _Loss(task, module)
    frozen = {f"module.{name}": value for name, value in _frozen(module).items()}
    shared = parts_of(task, module).shared
    names = [f"module.{name}" for name in shared]
    shapes = [value.shape for value in shared.values()]
    is_partial = False

    def gradient(parameters: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal is_partial
        parts = torch.split(parameters, [shape.numel() for shape in shapes])
        views = zip(parts, shapes, strict=True)
        with torch.enable_grad():
            values = [part.view(shape).detach().requires_grad_() for part, shape in views]
            given = dict(zip(names, values, strict=True))
            given |= dict(zip(frozen, rest[: len(frozen)], strict=True))
            found = functional_call(loss, given, rest[len(frozen) :])
            gradients = torch.autograd.grad(found, values, allow_unused=True)
        is_partial = any(each is None for each in gradients)
        return found.detach(), flat_gradient(values, gradients)

    inputs = (
        _flat(shared.values()),
        *(value.detach().contiguous() for value in frozen.values()),
        *batch,
    )
    symbolic, mode = _symbolic(inputs, len(batch))
    try:
        # Without oneDNN, torch traces recurrent layers step by step and does not look at sizes.
        # Attention in its parts is fused with what surrounds it.
        with (
            _quiet(),
            mode,
            enable_python_dispatcher(),
            torch.backends.mkldnn.flags(enabled=False),
            sdpa_kernel(SDPBackend.MATH),
        ):
            graph = make_fx(
                gradient, decomposition_table=FAST_OPERATORS, _allow_non_fake_inputs=True
            )(*symbolic)
    except PapayaError:
        raise
    except Exception as error:
        raise CannotCompile(f"the loss cannot be traced: {_first_line(error)}") from error
    graph.graph.eliminate_dead_code()
    graph.recompile()
    _require_pure(graph)
    if conditions := _conditions(mode.shape_env):
        raise CannotCompile(f"the loss depends on the batch size: {', '.join(conditions[:3])}")
    return TracedGradient(graph, inputs, len(batch), is_partial)


def _symbolic(inputs: tuple[Tensor, ...], batched: int) -> tuple[list[Any], Any]:
    """The inputs without values; the last `batched` have an unknown number of rows."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    found = []
    for number, value in enumerate(inputs):
        if number < len(inputs) - batched:
            found.append(mode.from_tensor(value, static_shapes=True))
            continue
        sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (value.dim() - 1)]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        found.append(mode.from_tensor(value, symbolic_context=context))
    return found, mode


def _conditions(env: Any) -> list[str]:
    """What the trace assumes about the number of examples."""
    return [str(guard.expr) for guard in env.guards if not _is_same_size(guard.expr)]


def _is_same_size(condition: Any) -> bool:
    """Whether it only says that the tensors of a batch have equally many rows."""
    [rows, *others] = sorted(condition.free_symbols, key=str)
    return str(condition.subs(dict.fromkeys(others, rows))) == "True"


def _require_pure(graph: torch.fx.GraphModule) -> None:
    nodes = list(graph.graph.nodes)
    if len(nodes) > _MOST_NODES:
        raise CannotCompile(
            f"the graph has {len(nodes):,} operators, more than {_MOST_NODES:,}: it would compile "
            "for many minutes"
        )
    for node in nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise CannotCompile(f"{node.target} draws random numbers")
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and _source(value).op != "call_function":
                raise CannotCompile(f"{node.target} changes a tensor of the model or the batch")


def _source(node: Any) -> Any:
    """The node whose memory this one shows, through views."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        first = node.target._schema.arguments[:1]
        if not first or first[0].alias_info is None:
            break
        node = node.args[0]
    return node


def _constants(graph: torch.fx.GraphModule) -> Iterator[tuple[str, Tensor]]:
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            yield str(node.target), getattr(graph, str(node.target))


# -- compilation --------------------------------------------------------------------------------


def _library(traced: TracedGradient, folder: Path, form: Form) -> Library:
    """Linked with the runtime, or with torch if that is not enough."""
    make_private(folder)
    plain, torchs = folder / f"{traced.digest}.so", folder / f"{traced.digest}.pt2"
    if not torchs.exists() and _suits_runtime(traced):
        with suppress(CannotCompile):
            runtime = built_runtime(folder)
            if not plain.exists():
                _compile_plain(traced, runtime, plain)
            if plain.exists():
                return Library(plain, form, traced.is_partial, runtime=runtime)
    if not torchs.exists():
        with _compiled(traced, folder, {}) as package:
            os.replace(package.path, torchs)
    return Library(torchs, form, traced.is_partial)


def _suits_runtime(traced: TracedGradient) -> bool:
    """Whether its tensors are of types that the runtime takes, and products and results float32."""
    if any(value.dtype not in DTYPES for value in traced.inputs):
        return False
    products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    nodes = [node for node in traced.graph.graph.nodes if node.target in products]
    results: Any = traced.graph.graph.output_node().args[0]
    nodes += results
    return all(node.meta["val"].dtype is torch.float32 for node in nodes)


def _compile_plain(traced: TracedGradient, runtime: Path, target: Path) -> None:
    """Write the library, unless it calls functions that the runtime lacks."""
    with (
        linked_with(runtime) as settings,
        _compiled(traced, target.parent, settings) as package,
    ):
        if is_enough(package.read(".wrapper.cpp").decode()):
            package.keep(".wrapper.so", target)


@dataclass(frozen=True)
class _Package:
    """What Inductor has compiled: a zip file of code and libraries."""

    path: Path

    def read(self, suffix: str) -> bytes:
        """The file of this kind."""
        with zipfile.ZipFile(self.path) as files:
            [name] = [name for name in files.namelist() if name.endswith(suffix)]
            return files.read(name)

    def keep(self, suffix: str, target: Path) -> None:
        """Write the file of this kind to a folder that other processes look into."""
        made = self.path.with_name(target.name)
        made.write_bytes(self.read(suffix))
        os.replace(made, target)


@contextmanager
def _compiled(traced: TracedGradient, folder: Path, settings: dict[str, Any]) -> Iterator[_Package]:
    import torch._inductor
    import torch._inductor.config

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph = traced.graph

        def forward(self, *inputs: Tensor) -> Any:
            return self.graph(*inputs)

    rows = torch.export.Dim("rows", min=_LEAST_EXAMPLES)
    first = len(traced.inputs) - traced.batched
    shapes = tuple({0: rows} if n >= first else None for n in range(len(traced.inputs)))
    try:
        with (
            _quiet(),
            no_files_left(),
            tempfile.TemporaryDirectory(dir=folder) as place,
            torch._inductor.config.patch(_SETTINGS | settings),
        ):
            program = torch.export.export(Graph(), traced.inputs, dynamic_shapes=(shapes,))
            made = torch._inductor.aoti_compile_and_package(
                program, package_path=str(Path(place) / "gradient.pt2")
            )
            yield _Package(Path(made))
    except PapayaError:
        raise
    except Exception as error:  # whatever a compiler of any graph may raise
        raise CannotCompile(f"compilation failed: {_first_line(error)}") from error


def _error(
    compiled: CompiledGradient, task: Task, module: torch.nn.Module, batch: Batch, size: int
) -> float:
    """The distance to eager PyTorch for the first examples of a batch, relative to the gradient."""
    values = parts_of(task, module).shared_parameters
    rows = tuple(value[:size] for value in batch)
    with torch.enable_grad():
        loss = batch_loss(task, module, rows, size)
        gradients = torch.autograd.grad(loss, values, allow_unused=True)
    expected = flat_gradient(values, gradients)
    try:
        _, found = compiled(_flat(values), rows)
    except RuntimeError as problem:
        raise CannotCompile(f"a gradient of {size} examples: {_first_line(problem)}") from problem
    return float((found - expected).norm() / (expected.norm() + _SMALL))


def flat_gradient(values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """One vector, with zeros where there is no gradient."""
    pairs = zip(values, gradients, strict=True)
    return _flat([torch.zeros_like(v) if g is None else g for v, g in pairs])


def _flat(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in values])


def _form(batch: Batch) -> Form | None:
    """None if not all are tensors with rows."""
    if not all(isinstance(value, Tensor) and value.dim() for value in batch):
        return None
    return tuple((value.dtype, tuple(value.shape[1:])) for value in batch)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Tracing and compiling warn about torch's own internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
