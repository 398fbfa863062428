"""Workloads by name: the built-in ones, and a task file of the user's own with its data.

A `WorkloadSpec` is a few words, so that another process can make the same workload from it; what it
stands for is opened by `prepare`:

    embedding | bigram                       the synthetic language (language.py)
    my_task.py with data leaf:FOLDER, …      a task file (papaya/study/data/opening.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import numpy as np
from msgspec import Struct, structs

from papaya.config import OptimizerConfig, TaskConfig
from papaya.config.checks import require, require_choice, require_count
from papaya.errors import CannotCompile, ConfigError, Diverged, OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.entry_points import load_used
from papaya.learning.parameters import Manifest
from papaya.learning.settings import GivenSettings, changed, with_client
from papaya.learning.task import NO_FILE, LoadedTask, load_task, module_hash
from papaya.sim.draws import Ints, splitmix64_words
from papaya.sim.population import DEFAULT, PopulationConfig, client_of
from papaya.study.data.opening import open_source
from papaya.study.data.partition import Partition
from papaya.study.data.source import Source, described, population_of
from papaya.study.replay import Rates
from papaya.study.run import Run
from papaya.study.workloads.base import Clients, Workload
from papaya.study.workloads.language import (
    BigramWorkload,
    EmbeddingWorkload,
    LanguageWorkload,
)
from papaya.study.workloads.shipped_task import ShippedTask

if TYPE_CHECKING:
    from papaya.study.workloads.torch_workers import Way

BUILT_IN: Final[dict[str, type[LanguageWorkload]]] = {
    "embedding": EmbeddingWorkload,
    "bigram": BigramWorkload,
}
_RATES: Final = Rates(
    client=ClientSGD(rate=1.0),
    optimizer=OptimizerConfig(kind="fedadam", rate=0.01, beta1=0.0, epsilon=1e-5),
)
_CONCURRENCY: Final = 130
MOST_JUDGES: Final = 400
WORTH_COMPILING: Final = 20_000  # client updates
HELD_OUT: Final = 32  # examples per client, which do not change the client's weight
_TRACED_EXAMPLES: Final = 8
_JUDGE: Final = 131  # apart from the quantities of `Population` and of other workloads


Steps: TypeAlias = Literal["eager", "compiled", "gpu", "auto"]
"""How the clients of a task file train: by PyTorch's operators, by compiled code
(papaya/learning/torch/compiled_gradient.py), by PyTorch's operators on a GPU, or by compiled code
if this task can be compiled."""

KINDS_OF_STEPS: Final[tuple[Steps, ...]] = ("eager", "compiled", "gpu")


@runtime_checkable
class SupportsClose(Protocol):
    """A workload that has processes."""

    def close(self, *, at_once: bool = False) -> None: ...


class WorkloadSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """`name` of a built-in workload or path of a task file, with its `data` and with `settings`
    that replace those in the file, each FIELD=VALUE (papaya/learning/settings.py).

    Versions are judged on at most `judges` clients, and on at most `held_out` examples of each.

    How long an example takes on a phone is of the population, not of the data: see
    `population_of` in papaya/study/data/source.py.
    """

    name: str
    data: str | None = None
    seconds_per_example: float | None = None
    partition: Partition | None = None
    judges: int = MOST_JUDGES
    steps: Steps = "eager"
    settings: tuple[str, ...] = ()
    held_out: int = HELD_OUT

    def __post_init__(self) -> None:
        require_choice("steps", self.steps, get_args(Steps))
        require_count("held_out", self.held_out)

    @property
    def is_built_in(self) -> bool:
        return self.name in BUILT_IN

    @property
    def preparation(self) -> str:
        """What `prepare` does, for people who wait for it."""
        compiles = self.steps in ("compiled", "auto") and not self.is_built_in
        compiling = ", compiling its steps" if compiles else ""
        return f"preparing {self.name}{compiling}"


def chosen_steps(steps: Steps, updates: int | None, ray: str | None) -> Steps:
    """What `auto` means for `updates` client updates, of a run or of all runs of a sweep. None: no
    number was given. Then a run ends after some hours or after the default number, which is too
    small to be worth it.

    Few updates take less time with eager steps than a compilation does. Compiled steps are code
    for this machine and not for a cluster.
    """
    is_worth_it = updates is not None and updates >= WORTH_COMPILING and ray is None
    return "eager" if steps == "auto" and not is_worth_it else steps


def steps_of(digest: str) -> Steps:
    """With which steps clients train, from the digest of a workload."""
    return next((kind for kind in KINDS_OF_STEPS if digest.endswith(f"/{kind}")), "eager")


def with_steps(digest: str, steps: Steps) -> str:
    """The digest of the same workload whose clients train with these steps."""
    plain = digest.removesuffix("/" + steps_of(digest))
    return plain if steps == "eager" else f"{plain}/{steps}"


def eager_because_of_ray(steps: Steps, updates: int | None, ray: str | None) -> str | None:
    """A message if `auto` would compile without Ray, because numbers would differ; else None."""
    if chosen_steps(steps, updates, ray) == chosen_steps(steps, updates, None):
        return None
    return (
        "using eager steps, because compiled steps are code for this machine and not for a Ray "
        "cluster. Without Ray, --steps auto would compile, and compiled steps round differently. "
        "To get the same numbers there, choose eager steps (--steps eager)"
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A workload that is ready to run, with its own task and rates.

    `digest` names model and data by their content, unless they are our own code.
    `make(seed, processes, ray)` makes the workload. `manifest` names the tensors of its parameters.
    `source` is the data of a task file, `loaded` the file, `task_source` its content.
    """

    spec: WorkloadSpec
    digest: str
    task: TaskConfig
    rates: Rates
    population: PopulationConfig
    make: Callable[[int, int, str | None], Workload]
    about: str
    manifest: Manifest
    source: Source | None = None
    loaded: LoadedTask | None = None
    task_source: bytes | None = None

    def shipped(self) -> ShippedWorkload:
        """For machines that have neither the task file nor the data."""
        task = None if self.loaded is None else ShippedTask.of(self.loaded)
        return ShippedWorkload(self.digest, self.spec, self.population, task, self.source)

    @contextmanager
    def opened(self, seed: int, processes: int = 1, ray: str | None = None) -> Iterator[Workload]:
        """The workload; its processes end with the context. `ray` is the address of a cluster."""
        workload, is_over = self.make(seed, processes, ray), False
        try:
            yield workload
            is_over = True
        finally:
            if isinstance(workload, SupportsClose):
                workload.close(at_once=not is_over)


@dataclass(frozen=True, eq=False)
class ShippedWorkload:
    """Makes the workload of a run anywhere. `population` is the one with the data's volumes."""

    digest: str
    spec: WorkloadSpec
    population: PopulationConfig
    task: ShippedTask | None
    source: Source | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShippedWorkload) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __call__(self, run: Run, folder: Path) -> Workload:
        return _shipped(self, run.recording_plan.seed)


@lru_cache(maxsize=2)
def _shipped(shipped: ShippedWorkload, seed: int) -> Workload:
    if shipped.task is None or shipped.source is None:
        return _built_in(shipped.spec, shipped.population).make(seed, 1, None)
    loaded = shipped.task.load()
    return with_source(shipped.spec, loaded, shipped.source, shipped.population).make(seed, 1, None)


def prepare(spec: WorkloadSpec, population: PopulationConfig = DEFAULT) -> Prepared:
    """Load the file and the data; OperatorError says what is wrong with them."""
    if not spec.is_built_in and not spec.name.endswith(".py") and not Path(spec.name).is_file():
        close = get_close_matches(spec.name, BUILT_IN, n=1)
        raise OperatorError(
            f"unknown workload {spec.name!r}: use {', '.join(BUILT_IN)} or a .py file",
            hint=f"did you mean {close[0]}?" if close else "my_task.py --data leaf:FOLDER",
        )
    return _built_in(spec, population) if spec.is_built_in else _own(spec, population)


def _built_in(spec: WorkloadSpec, population: PopulationConfig) -> Prepared:
    if spec.data is not None or spec.partition is not None:
        raise own_data(spec.name)
    for field, value, is_default in (
        ("judges", spec.judges, spec.judges == MOST_JUDGES),
        ("held_out", spec.held_out, spec.held_out == HELD_OUT),
        ("seconds_per_example", spec.seconds_per_example, spec.seconds_per_example is None),
        ("steps", spec.steps, spec.steps not in ("compiled", "gpu")),
    ):
        remedy = "leave it out, or use a task file"
        require(is_default, field, value, f"has no effect on {spec.name}", remedy)
    if spec.settings:
        raise OperatorError(
            f"--set {spec.settings[0]}: {spec.name} has no task file",
            hint="leave --set out, or use a task file",
        )
    kind = BUILT_IN[spec.name]
    workload = kind(population)

    def make(seed: int, processes: int, ray: str | None) -> Workload:
        return kind(population, seed=seed)

    return Prepared(
        spec=spec,
        digest=spec.name,  # all else about it is code
        task=TaskConfig(
            task=spec.name,
            concurrency=_CONCURRENCY,
            model_length=workload.length,
            optimizer=_RATES.optimizer,
            perplexity=True,
        ),
        rates=_RATES,
        population=population,
        make=make,
        about=f"{spec.name}: {workload.length:,} parameters, a synthetic language",
        manifest=Manifest.of({"parameters": workload.initial(0)}),
    )


def own_data(name: str) -> OperatorError:
    return OperatorError(
        f"{name} has its own data", hint="leave out the data and the partition, or use a task file"
    )


def _own(spec: WorkloadSpec, population: PopulationConfig) -> Prepared:
    if spec.data is None:
        names = ", ".join(BUILT_IN)
        raise OperatorError(
            f"{spec.name} needs data to learn from",
            hint="add --data leaf:FOLDER, text:FOLDER, csv:FILE or stdlib; built-in workloads "
            f"need no data: {names}",
        )
    loaded = load_task(Path(spec.name))
    return with_source(spec, loaded, open_source(spec.data, loaded, spec.partition), population)


def with_source(
    spec: WorkloadSpec, loaded: LoadedTask, source: Source, population: PopulationConfig = DEFAULT
) -> Prepared:
    """A task file and examples from anywhere."""
    task_source = _content(loaded)
    given = GivenSettings.of(spec.settings)
    loaded = with_client(loaded, given.client)
    # Before anything is recorded: what fails on an example fails at once.
    loaded.try_on(source.training(0)[:1], f"the first example of client 0 of {source.name}")
    try:
        loaded.try_loop(source.training(0), f"the examples of client 0 of {source.name}")
    except ConfigError as error:
        if not isinstance(error.__cause__, Diverged):  # a run may have other rates
            raise
    way, kind, about_steps = _way(spec.steps, loaded, source)
    task = changed(loaded.config(), None, given.task)
    load_used(task)
    most = min(task.max_examples, loaded.task.examples.limit or task.max_examples)
    return Prepared(
        spec=spec,
        digest=with_steps(f"{loaded.module_hash}/{source.digest}/{_judging(spec)}", kind),
        task=task,
        rates=Rates(
            client=loaded.task.client,
            optimizer=task.optimizer,
            clip=task.clip,
            staleness=task.staleness,
            weighting=task.weighting,
            aggregation=task.aggregation,
            privacy=task.privacy,
            upload_bits=task.upload_bits,
            masked=task.is_secure,
        ),
        population=_transferring(
            population_of(source, most, population, spec.seconds_per_example), task
        ),
        make=partial(_torch, loaded, source, spec, way),
        about=f"{task.task}: {task.model_length:,} parameters; {described(source)}; {about_steps}",
        manifest=loaded.manifest,
        source=source,
        loaded=loaded,
        task_source=task_source,
    )


def _judging(spec: WorkloadSpec) -> str:
    """How versions are judged, as part of a digest."""
    return f"{spec.judges}" if spec.held_out == HELD_OUT else f"{spec.judges}x{spec.held_out}"


def _content(loaded: LoadedTask) -> bytes | None:
    """The content of the task file as it was loaded; None for a task without a file."""
    if loaded.path == NO_FILE:
        return None
    with suppress(OSError):
        content = loaded.path.read_bytes()
        if module_hash(content, loaded.frozen) == loaded.module_hash:
            return content
    raise OperatorError(
        f"{loaded.path} changed while it was prepared", hint="run the command again"
    )


def _transferring(population: PopulationConfig, task: TaskConfig) -> PopulationConfig:
    """Measured connections download and upload this model."""
    if population.capacity_trace is None or population.transfer_kbit:
        return population
    return structs.replace(population, transfer_kbit=2 * 32 * task.model_length / 1000)


def _way(steps: Steps, loaded: LoadedTask, source: Source) -> tuple[Way, Steps, str]:
    """How clients train, its name, and what to tell about it."""
    from papaya.learning.torch.processor import CPU, gpu, has_gpu  # imports torch

    if steps == "gpu":
        processor = gpu()
        return processor, "gpu", f"eager steps on a GPU ({processor.type})"
    unused = "; --steps gpu would use the GPU of this machine" if has_gpu() else ""
    if steps == "eager":
        return CPU, "eager", f"eager steps{unused}"
    from papaya.learning.executorch.shim import cache_folder
    from papaya.learning.torch.compiled_gradient import compile_gradient

    clients = (source.training(client) for client in range(len(source.volumes)))
    examples = list(islice(chain.from_iterable(clients), _TRACED_EXAMPLES))
    folder = cache_folder() / "gradients"
    try:
        library = compile_gradient(loaded.task, examples, folder)
        by_torch = "" if library.runtime else ", run by torch"
        return library, "compiled", f"compiled steps{by_torch}{unused}"
    except CannotCompile as error:
        if steps == "compiled":
            raise
        return CPU, "eager", f"eager steps, because {error}{unused}"


def _torch(
    loaded: LoadedTask,
    source: Source,
    spec: WorkloadSpec,
    way: Way,
    seed: int,
    processes: int,
    ray: str | None,
) -> Workload:
    from papaya.learning.torch.compiled_gradient import Library  # imports torch
    from papaya.learning.torch.processor import CPU
    from papaya.study.workloads.torch_task import TorchWorkload

    if ray is not None and isinstance(way, Library):
        raise CannotCompile("compiled steps are code for this machine, not for a Ray cluster")
    if ray is not None and way != CPU:
        raise OperatorError(
            "--steps gpu uses the GPU of this machine, not those of a Ray cluster",
            hint="use --steps eager, or leave --ray out",
        )
    clients = len(source.volumes)

    def examples_of(device: int, count: int) -> list[bytes]:
        return source.training(client_of(device, clients))[:count]

    def judged_on(device: int) -> list[bytes]:
        return source.held_out(client_of(device, clients))[: spec.held_out]

    return TorchWorkload(
        loaded,
        examples_of,
        judges(source, seed, spec.judges),
        judged_on=judged_on,
        client_of=lambda device: client_of(device, clients),
        seed=seed,
        processes=processes,
        ray=ray,
        way=way,
    )


def judges(source: Source, seed: int, most: int = MOST_JUDGES) -> Clients:
    """A sample of the clients that have held-out examples, drawn by the seed."""
    able = np.array([c for c in range(len(source.volumes)) if source.held_out(c)], np.int64)
    if not len(able):
        raise OperatorError(
            f"{source.name}: no client has an example for validation",
            hint="a tenth of all examples are for validation: use a larger data set",
        )
    order = np.argsort(splitmix64_words(np.uint64(_JUDGE + seed), able.astype(np.uint64)))
    chosen: Ints = np.sort(able[order[:most]])
    return Clients(chosen, np.zeros_like(chosen), source.volumes[chosen])
