"""Compiles a task for devices without torch: module and loss become one ExecuTorch program.

The program takes a weight for each example of a batch and the fields of the examples, and returns
the weighted sums of their losses and metrics and the gradients of the losses. Parameters are not
part of it. The batch size is fixed; a smaller batch is padded with examples of weight 0.

`torch.export.experimental` is private and ExecuTorch's training support is immature: all use of
both is in this file, and the versions are pinned. A program is accepted only after ten steps in
which it trained the same update as eager PyTorch, some of them with padding, and if it measures the
same metrics.

Refused (OperatorError): a task without fields, without `sample` or without one loss and one number
of each metric for each example; operators that are known to be wrong or missing, with the layer and
a remedy; parameters without a gradient; a program that trains another update or measures other
metrics.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch
from msgspec import structs
from torch.fx import Graph, Node

from papaya import __version__
from papaya.errors import OperatorError
from papaya.learning.definition import ClientSGD, TaskTerms
from papaya.learning.evaluation import summarize
from papaya.learning.executorch.engine import ExecuTorchEngine
from papaya.learning.executorch.program_file import (
    EXECUTORCH_VERSION,
    ProgramHeader,
    decode_program,
    encode_program,
)
from papaya.learning.executorch.shim import executorch_package
from papaya.learning.frozen_file import decode_frozen
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.task import LoadedTask
from papaya.learning.torch import faster_graph
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.frozen import frozen_bytes
from papaya.learning.torch.module import (
    checked_loss,
    checked_module,
    make_module,
    no_files_left,
    tried_batch,
)
from papaya.learning.torch.parts import parts_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

TORCH_VERSION: Final = "2.13.0"
"""The version whose private API this file uses."""

STEPS: Final = 10
TOLERANCE: Final = 1e-5
"""Per tensor: the norm of the difference of two updates, by the norm of the update."""

METRIC_TOLERANCE: Final = 1e-4
"""Of the range of a metric."""

_ROUNDING: Final = 2.0**-24  # of float32
_STEP_SIZE: Final = 0.01  # of the norm of the parameters, in the comparison
_EXTERNAL: Final = "frozen"  # how the exporter marks tensors that are not in the program
_RANDOM: Final = ("draws random numbers, which devices without torch cannot", "remove it")
_POOLING: Final = "use a convolution with stride=2 instead"
_REFUSED: Final = {
    # https://github.com/pytorch/executorch/issues/21686
    "max_pool": ("has a wrong gradient in ExecuTorch", _POOLING),
    "adaptive_max_pool": ("has a wrong gradient in ExecuTorch", _POOLING),
    "avg_pool": ("has no gradient in ExecuTorch", _POOLING),
    "batch_norm": ("has no gradient in ExecuTorch", "use LayerNorm instead"),
    "group_norm": ("has no gradient in ExecuTorch", "use LayerNorm instead"),
    "scaled_dot_product_attention": (
        "has no gradient in ExecuTorch",
        "write it out: softmax(q @ k.transpose(-2, -1) / math.sqrt(width), -1) @ v",
    ),
    "pad": ("has no gradient in ExecuTorch", "use padding= of the convolution, or torch.cat"),
    "constant_pad": ("has no gradient in ExecuTorch", "use torch.cat with zeros"),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "bernoulli"), _RANDOM),
    **dict.fromkeys(("rand", "randn", "randint", "normal", "multinomial"), _RANDOM),
}
"""Beginnings of operator names, the digit of pooling left out: the problem and the remedy."""


def compile_task(loaded: LoadedTask, cache: Path | None = None, content: str = "") -> bytes:
    """The program file of a task. `cache` is a folder of earlier results, by content.

    `content` names the content of all files of a task that has several.
    """
    _require_versions()
    place = None if cache is None else cache / f"{_content_digest(loaded, content)}.program"
    if place is not None:
        with suppress(OSError, OperatorError):  # not there, or damaged
            data = place.read_bytes()
            decode_program(data)
            return data
    data = _compiled(loaded)
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(f".{os.getpid()}")
        part.write_bytes(data)
        part.replace(place)
    return data


def _require_versions() -> None:
    executorch_package()
    if torch.__version__.partition("+")[0] != TORCH_VERSION:
        raise OperatorError(
            f"torch is version {torch.__version__}; programs are compiled with {TORCH_VERSION}",
            hint=f"pip install torch=={TORCH_VERSION}",
        )


def _content_digest(loaded: LoadedTask, content: str) -> str:
    """Digest of everything that a program depends on, including what the file read at import."""
    task = loaded.task
    settings = (task.fields, task.client, task.examples, TaskTerms.of(loaded.config()))
    inputs = (
        *(loaded.module_hash, content, __version__, TORCH_VERSION, EXECUTORCH_VERSION),
        *(loaded.manifest, settings, tuple(task.sample)),
        *(Path(file).read_text() for file in (__file__, faster_graph.__file__)),
    )
    return hashlib.sha256(msgspec.json.encode(inputs)).hexdigest()[:32]


def _compiled(loaded: LoadedTask) -> bytes:
    task = loaded.task
    if task.train is not None:
        raise OperatorError(
            "the task has a training loop of its own, and devices without torch run no code of the "
            "task's owner",
            hint="leave train out, or train on devices with torch: --engine torch",
        )
    if task.fields is None:
        raise OperatorError(
            "batch is a function, and devices without torch run no code of the task's owner",
            hint="describe an example with fields: batch=(Numbers(3), …)",
        )
    if not task.sample:
        raise OperatorError(
            "there are no examples to compare the program with PyTorch on",
            hint="give the task a few stored examples: sample=[…]",
        )
    examples = list(islice(cycle(task.sample), task.client.batch_size))
    inputs = tried_batch(task, examples)
    _require_one_for_each_example(loaded, inputs, len(examples))
    with warnings.catch_warnings(), no_files_left():
        warnings.simplefilter("ignore")  # deprecations inside torch.export and executorch
        program, gradients, operators, frozen = _exported(loaded, inputs, len(examples))
    personal = _personal_tensors(loaded)
    tensors = program_tensors(loaded, (*frozen, *(name for name, _ in personal)))
    header = ProgramHeader(
        task=task.name,
        source=loaded.module_hash,
        executorch=EXECUTORCH_VERSION,
        terms=TaskTerms.of(loaded.config()),
        examples=task.examples,
        fields=task.fields,
        client=task.client,
        manifest=loaded.manifest,
        gradients=gradients,
        operators=operators,
        program_bytes=0,
        program_sha256="",
        frozen=frozen,
        frozen_sha256=hashlib.sha256(tensors).hexdigest() if tensors else "",
        personal=personal,
    )
    data = encode_program(header, program)
    _require_agreement(loaded, data, tensors)
    return data


def program_tensors(loaded: LoadedTask, names: Sequence[str]) -> bytes:
    """The file of the frozen tensors that a program's header names; empty if it names none."""
    return frozen_bytes(make_module(loaded.task), names) if names else b""


def _personal_tensors(loaded: LoadedTask) -> tuple[tuple[str, tuple[int, ...]], ...]:
    layout = parts_of(loaded.task, make_module(loaded.task)).personal_layout
    return () if layout is None else layout.tensors


def _require_one_for_each_example(loaded: LoadedTask, inputs: tuple[Any, ...], count: int) -> None:
    module, task = make_module(loaded.task), loaded.task
    names = [f"metric {bounds.name!r}" for bounds in task.metric_bounds]
    functions = zip(("loss", *names), (task.loss, *task.metric_functions), strict=True)
    for name, function in functions:
        with torch.random.fork_rng(devices=[]):
            found = function(module, *inputs)
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        if shape != [count]:
            number = "loss" if name == "loss" else "number"
            raise OperatorError(
                f"{name} returned a tensor of shape {shape} for {count} examples; the program "
                f"needs one {number} for each example",
                hint='return one loss for each example: cross_entropy(…, reduction="none")'
                if name == "loss"
                else "return one number for each example: (….argmax(-1) == targets).float()",
            )


class _Weighted(torch.nn.Module):
    """The weighted sums of the losses and the metrics. Parameters are named `module.…` in the
    program.
    """

    def __init__(self, loaded: LoadedTask) -> None:
        super().__init__()
        self.module = make_module(loaded.task).train()
        self._loss = loaded.task.loss
        self._metrics = loaded.task.metric_functions

    def forward(self, weights: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = (self._loss(self.module, *inputs) * weights).sum()
        metrics = (metric(self.module, *inputs).detach().float() for metric in self._metrics)
        return loss, *((values * weights).sum() for values in metrics)


def _exported(
    loaded: LoadedTask, inputs: tuple[Any, ...], count: int
) -> tuple[bytes, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The program, the parameters whose gradients it returns, the operators that it uses, and the
    frozen tensors that it needs beside it.
    """
    from executorch.exir import ExecutorchBackendConfig, to_edge
    from torch.export import export
    from torch.export.experimental import _export_forward_backward

    weights = torch.full((count,), 1 / count)
    traced = "the loss and the metrics" if loaded.task.metrics else "the loss"
    with _refusing(f"torch.export cannot trace {traced}"):
        forward = export(_Weighted(loaded), (weights, *inputs), strict=True)
    for node in forward.graph.nodes:
        _require_supported(node)
    with _refusing("ExecuTorch cannot train this model"):
        joint = _export_forward_backward(forward)
        _share_computations(joint)
        faster_graph.make_faster(joint)
        outputs = [spec.target for spec in joint.graph_signature.output_specs]
        gradients = tuple(name.removeprefix("module.") for name in outputs if name is not None)
        _require_gradients(loaded, gradients)
        frozen = _frozen_inputs(joint.graph_signature, gradients)
        settings = ExecutorchBackendConfig(
            external_constants=lambda node: _EXTERNAL if node.name in frozen else None,
            external_mutable_weights=True,
        )
        made = to_edge(joint).to_executorch(settings)
    plan = made.executorch_program.execution_plan[0]
    operators = (f"{op.name}.{op.overload}" if op.overload else op.name for op in plan.operators)
    kept = made._emitter_output.external_constant_map.get(_EXTERNAL, {})
    names = tuple(sorted(name.removeprefix("module.") for name in kept))
    return made.buffer, gradients, tuple(dict.fromkeys(operators)), names


def _frozen_inputs(signature: Any, gradients: Sequence[str]) -> frozenset[str]:
    """The nodes of parameters and buffers that are not trained."""
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    trained = {f"module.{name}" for name in gradients}
    return frozenset(node for node, name in named.items() if name not in trained)


def _share_computations(program: ExportedProgram) -> None:
    """Compute once what the loss and the metrics have in common: above all, the model's output.

    The graph must have no operators that change their inputs. One that would return the same node
    as two outputs is left as it is: the signature names each output.
    """
    from torch._functorch.compile_utils import fx_graph_cse

    shared = fx_graph_cse(program.graph)
    outputs = (_output_names(graph) for graph in (shared, program.graph))
    if next(outputs) == next(outputs):
        program.graph_module.graph = shared
        program.graph_module.recompile()


def _output_names(graph: Graph) -> list[str]:
    return [node.name for node in graph.output_node().all_input_nodes]


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn errors of the exporters into errors of the task."""
    try:
        yield
    except OperatorError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = " ".join(lines[:2]) or type(error).__name__
        raise OperatorError(
            f"{what}: {first}",
            hint="change the model or the loss, or train with task files: --engine torch",
        ) from error


def _require_supported(node: Node) -> None:
    if node.op != "call_function":
        return
    name = getattr(node.target, "_opname", "")
    found = next((key for key in _REFUSED if _is_called(name, key)), None)
    if found is not None:
        problem, remedy = _REFUSED[found]
        raise OperatorError(f"{_layer(node)}: {name} {problem}", hint=remedy)


def _is_called(name: str, key: str) -> bool:
    """Whether this is the operator, with or without dimensions: max_pool2d, max_pool2d_with_…"""
    rest = name.removeprefix("_").removeprefix("native_").removeprefix("cudnn_")
    return rest == key or (rest.startswith(key) and rest[len(key)] in "123_")


def _layer(node: Node) -> str:
    """The layer that a node belongs to, as the owner knows it."""
    stack = [entry for entry in (node.meta.get("nn_module_stack") or {}).values() if entry[0]]
    if not stack:
        return "the loss"
    path, kind = stack[-1]
    short = kind if isinstance(kind, str) else kind.__name__
    path = path.removeprefix("module").removeprefix(".")
    return f"{f'layer {path!r}' if path else 'the model'} ({short.rpartition('.')[2]})"


def _require_gradients(loaded: LoadedTask, gradients: tuple[str, ...]) -> None:
    names = [name for name, _ in (*loaded.manifest.tensors, *_personal_tensors(loaded))]
    if unused := [name for name in names if name not in gradients]:
        raise OperatorError(
            f"the loss does not depend on the parameters {', '.join(unused)}",
            hint="remove them, or set requires_grad = False",
        )


# --- Comparison with eager PyTorch ---------------------------------------------------------------


def _require_agreement(loaded: LoadedTask, data: bytes, tensors: bytes) -> None:
    """Train ten steps with both engines from the module's own initialisation, all parameters as if
    they were shared.
    """
    shared = structs.replace(loaded.task, personal=())
    loaded = replace(loaded, task=shared, manifest=checked_module(shared)[0])
    size = loaded.task.client.batch_size
    # A full batch and a smaller one, five times.
    examples = list(islice(cycle(loaded.task.sample), size + (size + 1) // 2))
    initial = loaded.initial_parameters()
    # The optimizer's steps are not part of the program: plain ones show its gradients best.
    client = ClientSGD(
        rate=_visible_rate(loaded, initial, examples[:size]),
        momentum=loaded.task.client.momentum,
        epochs=STEPS // 2,
        batch_size=size,
        max_examples=len(examples),
    )
    task = structs.replace(
        loaded.task, client=client, clip=None, privacy=None, secure_aggregation=None
    )
    file = decode_program(data)
    header = structs.replace(
        file.header,
        client=client,
        terms=structs.replace(file.header.terms, clip=None),
        manifest=loaded.manifest,
        personal=(),
    )
    found = decode_frozen(np.frombuffer(tensors, np.uint8)) if tensors else {}
    frozen = {name: tensor for name, tensor in found.items() if name in header.frozen}
    engine = ExecuTorchEngine(structs.replace(file, header=header), lambda: frozen)
    theirs, _ = TorchEngine(replace(loaded, task=task)).train(initial, examples, seed=0)
    ours, _ = engine.train(initial, examples, seed=0)
    compare_updates(loaded, initial, *(np.frombuffer(u, FLOAT32) for u in (ours, theirs)))
    _compare_metrics(loaded, engine, initial, examples)


def _compare_metrics(
    loaded: LoadedTask, engine: ExecuTorchEngine, initial: Vector, examples: list[bytes]
) -> None:
    """Refuse a program whose metrics differ from those of eager PyTorch."""
    bounds = loaded.task.metric_bounds
    theirs, ours = (
        summarize(
            np.frombuffer(each.evaluate(initial, examples, 0), FLOAT32), metrics=bounds
        ).all.metrics
        for each in (TorchEngine(loaded), engine)
    )
    for metric in bounds:
        difference = abs(ours[metric.name] - theirs[metric.name])
        if not difference <= METRIC_TOLERANCE * (metric.high - metric.low):
            raise OperatorError(
                f"metric {metric.name!r} is {ours[metric.name]:g} in the program and "
                f"{theirs[metric.name]:g} in PyTorch",
                hint="write the metric in another way, and please report it",
            )


def _visible_rate(loaded: LoadedTask, initial: Vector, batch: list[bytes]) -> float:
    """A rate at which rounding of the parameters does not hide their change."""
    module = make_module(loaded.task).train()
    values = [value for value in module.parameters() if value.requires_grad]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        gradients = torch.autograd.grad(checked_loss(loaded.task, module, batch), values)
    steepness = float(np.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)))
    if not 0 < steepness < np.inf:
        raise OperatorError(
            f"the gradient of the loss on the sample has norm {steepness}",
            hint="give the task a sample whose gradient is finite and not zero",
        )
    momentum = loaded.task.client.momentum
    return _STEP_SIZE * (1 - momentum) * max(1.0, float(np.linalg.norm(initial))) / steepness


def compare_updates(loaded: LoadedTask, initial: Vector, ours: Vector, theirs: Vector) -> None:
    """Refuse a program whose update differs from that of eager PyTorch, tensor by tensor."""
    unflatten = loaded.manifest.unflatten
    values, found, expected = unflatten(initial), unflatten(ours), unflatten(theirs)
    whole = float(np.linalg.norm(theirs))
    for name, value in values.items():
        change = float(np.linalg.norm(expected[name]))
        difference = float(np.linalg.norm(found[name] - expected[name]))
        # Each step rounds the parameters; an update that is zero but for rounding cannot agree.
        rounding = _ROUNDING * (STEPS * float(np.linalg.norm(value)) + whole)
        if change == 0:
            raise OperatorError(
                f"parameter {name!r} does not change on the sample, so its gradient in the program "
                "cannot be checked",
                hint=f"give the task more kinds of examples: sample=[…], or remove {name!r}",
            )
        if not difference <= TOLERANCE * change + rounding:
            raise OperatorError(
                f"parameter {name!r}: after {STEPS} steps the program's update differs from "
                f"PyTorch's by {difference / change:.2g} of its norm; the limit is {TOLERANCE:g}",
                hint="ExecuTorch computes a wrong gradient: change the layer, and please report it",
            )
