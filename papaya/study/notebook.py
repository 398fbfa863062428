"""The interface for notebooks and scripts: `papaya.simulate` and `papaya.sweep`.

    import papaya

    run = papaya.simulate("my_task.py", clients="leaf:data/train", updates=2000)
    run.history         # a DataFrame, a row for each evaluated version
    run.model           # a state dict
    run.plot()

    found = papaya.sweep("my_task.py", clients=frame, partition="column:user",
                         vary={"client_rate": (0.1, 0.3)}, seeds=3)
    found.table         # a DataFrame, a row for each setting, the best first

`task` is a task file, a `Task` that is defined in the notebook, or the name of a built-in workload.
A Task without a file cannot be loaded by other processes, so it trains in this one, and its runs
cannot be repeated from their output folder.

`clients` is the data: words as for `--data`; a DataFrame or a dataset of Hugging Face or torch with
a `partition`; a mapping from the names of clients to lists of examples (bytes), or just the lists;
or a `Source`. `population` is a `PopulationConfig`, or the number of devices. `steps` says whether
clients train with PyTorch's operators (`eager`, or on a GPU: `gpu`) or with compiled code
(`compiled`); `auto` compiles long runs and sweeps, as `--steps` does.
"""

from __future__ import annotations

import math
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import structs

from papaya.config.checks import require, require_count, require_number
from papaya.errors import OperatorError
from papaya.learning.notebook_identity import notebook_identity
from papaya.learning.task import NO_FILE, LoadedTask, Task, load_task, loaded_in_memory
from papaya.progress import Progress, elapsed
from papaya.sim.population import DEFAULT, PopulationConfig
from papaya.study.data.opening import open_source, parse_partition, save_source
from papaya.study.data.partition import Partition
from papaya.study.data.source import Memory, Source
from papaya.study.data.tables import table_source
from papaya.study.lab import LabStep
from papaya.study.run import RunResult, most_updates
from papaya.study.run_warnings import (
    after_sweep,
    before_run,
    before_sweep,
    ended_early,
)
from papaya.study.simulation import (
    INSTALL_PANDAS,
    SimulatedRun,
    TextTable,
    forget,
    kept_of,
    run_of,
    simulate_run,
)
from papaya.study.sweep import (
    Plan,
    Regime,
    ResultRow,
    SweptValue,
    learned_otherwise,
    rows_of,
    updates_together,
    varied_in,
)
from papaya.study.sweep import sweep as run_sweep
from papaya.study.trace import MOST_HOURS
from papaya.study.workloads.registry import (
    BUILT_IN,
    HELD_OUT,
    MOST_JUDGES,
    Prepared,
    Steps,
    WorkloadSpec,
    chosen_steps,
    eager_because_of_ray,
    own_data,
    prepare,
    with_source,
)

if TYPE_CHECKING:
    import pandas

    from papaya.sim.plots import Picture

TaskLike: TypeAlias = str | Path | Task


def simulate(
    task: TaskLike,
    clients: object = None,
    *,
    partition: Partition | str | None = None,
    updates: int | None = None,
    hours: float | None = None,
    regime: Regime | None = None,
    concurrency: int | None = None,
    goal: int | None = None,
    over_selection: float | None = None,
    client_rate: float | None = None,
    server_rate: float | None = None,
    evaluations: int = 20,
    judges: int = MOST_JUDGES,
    held_out: int = HELD_OUT,
    seed: int = 1,
    population: PopulationConfig | int = DEFAULT,
    seconds_per_example: float | None = None,
    steps: Steps = "auto",
    processes: int = 1,
    ray: str | None = None,
    output: Path | str | None = None,
    progress: bool = True,
) -> SimulatedRun:
    """Train a model on a simulated fleet. What is not given is as the task says. The run ends after
    `updates` client updates or `hours` of virtual time; without both, after 5,000 updates.

    With `output`, everything is written there, and a call that was interrupted resumes. Clients
    train in so many `processes`, or on the Ray cluster with the address `ray`. Processes above 1
    import the program again: a script keeps its own work under `if __name__ == "__main__"`.
    """
    setting = {
        "concurrency": concurrency,
        "K": goal,
        "over_selection": over_selection,
        "client_rate": client_rate,
        "server_rate": server_rate,
    }
    _check_numbers(
        {
            "updates": updates,
            "evaluations": evaluations,
            "judges": judges,
            "held_out": held_out,
            "processes": processes,
        }
        | {"concurrency": concurrency, "goal": goal},
        {"hours": hours, "seed": seed, "seconds_per_example": seconds_per_example, **setting},
    )
    steps = _chosen_steps(task, steps, updates, ray, progress)
    prepared = _prepared(
        task, clients, partition, seconds_per_example, judges, held_out, population, steps, progress
    )
    run = run_of(
        prepared,
        regime,
        {name: float(value) for name, value in setting.items() if value is not None},
        seed=seed,
        updates=most_updates(updates, hours),
        hours=MOST_HOURS if hours is None else hours,
        evaluations=evaluations,
    )
    resume = None
    if output is not None and _can_be_resumed(task):
        resume = Path(output) / "resume"
    _warn([*before_run(prepared.task, run), *_without_pandas()])
    try:
        with _telling(progress) as tell:
            simulated = simulate_run(
                run, prepared, processes=processes, ray=ray, resume=resume, tell=tell
            )
    except KeyboardInterrupt:
        if resume is not None:
            sys.stderr.write(kept_of(run, resume, "call") + "\n")
        raise
    if output is not None:
        simulated.save(output)
    if resume is not None:
        forget(run, resume)
    if (early := ended_early(simulated.result)) is not None:
        _warn([early])
    return simulated


def sweep(
    task: TaskLike,
    clients: object = None,
    *,
    vary: Mapping[str, Iterable[SweptValue]],
    regimes: Sequence[Regime] = (),
    partition: Partition | str | None = None,
    seeds: int = 1,
    updates: int | None = None,
    hours: float | None = None,
    target: float | None = None,
    evaluations: int = 50,
    judges: int = MOST_JUDGES,
    held_out: int = HELD_OUT,
    population: PopulationConfig | int = DEFAULT,
    seconds_per_example: float | None = None,
    steps: Steps = "auto",
    jobs: int = 1,
    ray: str | None = None,
    output: Path | str | None = None,
    progress: bool = True,
) -> SweepResult:
    """Train with every combination of the given values. With `output`, finished runs are kept
    there and not repeated.

    `jobs` above 1 are processes that import the program again: a script keeps its own work under
    `if __name__ == "__main__"`. `ray` is the address of a Ray cluster that does the work instead.
    """
    _check_numbers(
        {
            "updates": updates,
            "evaluations": evaluations,
            "judges": judges,
            "held_out": held_out,
            "seeds": seeds,
        }
        | {"jobs": jobs},
        {"hours": hours, "target": target, "seconds_per_example": seconds_per_example},
    )
    values = _swept(vary)
    together = updates_together(values, regimes, seeds, updates, hours)
    steps = _chosen_steps(task, steps, together, ray, progress)
    prepared = _prepared(
        task, clients, partition, seconds_per_example, judges, held_out, population, steps, progress
    )
    if isinstance(task, Task) and (jobs > 1 or ray is not None):
        raise OperatorError(
            "other processes cannot load a Task that is defined in a notebook",
            hint="write the task to a file, or use jobs=1",
        )
    _warn([*before_sweep(prepared.task, vary), *_without_pandas()])
    with _folder(output) as folder, _telling(progress) as tell:
        spec = _for_processes(prepared, folder) if jobs > 1 else prepared.spec
        plan = Plan(
            workload=spec,
            vary=values,
            regimes=tuple(regimes),
            seeds=tuple(range(1, seeds + 1)),
            updates=most_updates(updates, hours),
            hours=MOST_HOURS if hours is None else hours,
            target=target,
            evaluations=evaluations,
            population=_population(population),
        )
        otherwise = learned_otherwise(plan, prepared, folder, ray)
        if progress and otherwise is not None:
            sys.stderr.write(otherwise + "\n")
        outcomes = run_sweep(plan, folder, jobs, lambda step: tell(*_shown(step)), prepared, ray)
    _warn(after_sweep(outcomes))
    return SweepResult(prepared.task.task, tuple(outcomes), ("regime", *vary))


@dataclass(frozen=True, eq=False)
class SweepResult:
    """The outcomes of a sweep, in the order of the plan."""

    name: str
    outcomes: tuple[RunResult, ...]
    asked: tuple[str, ...]

    @cached_property
    def rows(self) -> list[ResultRow]:
        """One for each setting, the best first."""
        return rows_of(self.outcomes, self._varied)

    @cached_property
    def _varied(self) -> list[str]:
        return varied_in(rows_of(self.outcomes, self.asked), self.asked)

    @cached_property
    def table(self) -> pandas.DataFrame:
        """A row for each setting, the best first: means over the seeds; `*_spread` are sample
        standard deviations over the seeds, NaN with one seed. The first columns are what was varied
        and the loss. The task's metrics are `metrics.NAME`. Losses and metrics are NaN if a seed
        diverged.
        """
        names = [name for name in ResultRow.__struct_fields__ if name not in _NOT_COLUMNS]
        found = [
            {
                **row.setting,
                "seeds": len(row.outcomes),
                **{name: _known(getattr(row, name)) for name in names},
                **_metrics(row),
                **(dict.fromkeys((*_LOSSES, *_metrics(row)), math.nan) if row.diverged else {}),
            }
            for row in self.rows
        ]
        ordered = tuple(dict.fromkeys([*self._varied, "loss", *found[0]]))
        rows = [tuple(values[name] for name in ordered) for values in found]
        return TextTable(ordered, rows).frame()

    def plot(self) -> Picture:
        """The best curves, and the outcome by each varied value; a notebook shows it."""
        from papaya.study.learning_plots import sweep_picture

        return sweep_picture(self.rows, self._varied, f"{self.name}: the best settings")


_NOT_COLUMNS = ("label", "setting", "outcomes", "metrics", "metrics_spread")
_LOSSES = ("loss", "loss_spread", "p75", "p99")


def _metrics(row: ResultRow) -> dict[str, float]:
    found = {f"metrics.{name}": value for name, value in row.metrics.items()}
    spreads = row.metrics_spread.items()
    return found | {f"metrics_spread.{name}": _known(value) for name, value in spreads}


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _without_pandas() -> list[str]:
    """Told before the run: the error of a DataFrame comes after it."""
    if find_spec("pandas") is not None:
        return []
    missing = "pandas is not installed, so there are no DataFrames (history, clients, table)"
    return [f"{missing}; results can be saved without it; {INSTALL_PANDAS}"]


def _warn(texts: Iterable[str]) -> None:
    """Python warnings, which name the line that called `simulate` or `sweep`."""
    for text in texts:
        warnings.warn(text, stacklevel=3)


# -- what is given -------------------------------------------------------------------------------


def _can_be_resumed(task: TaskLike) -> bool:
    """False if each call would see a different task: a checkpoint could never be used."""
    return not isinstance(task, Task) or notebook_identity(task) == notebook_identity(task)


def _chosen_steps(
    task: TaskLike, steps: Steps, updates: int | None, ray: str | None, progress: bool
) -> Steps:
    told = eager_because_of_ray(steps, updates, ray)
    if progress and told is not None and (isinstance(task, Task) or str(task) not in BUILT_IN):
        sys.stderr.write(told + "\n")
    return chosen_steps(steps, updates, ray)


def _prepared(
    task: TaskLike,
    clients: object,
    partition: Partition | str | None,
    seconds_per_example: float | None,
    judges: int,
    held_out: int,
    population: PopulationConfig | int,
    steps: Steps,
    progress: bool,
) -> Prepared:
    """The task with its data. With `progress`, a line on stderr describes them."""
    if isinstance(partition, str):
        partition = parse_partition(partition)
    data = clients if isinstance(clients, str) else None
    name = str(NO_FILE if isinstance(task, Task) else task)
    spec = WorkloadSpec(
        name, data, seconds_per_example, partition, judges, steps, held_out=held_out
    )
    fleet = _population(population)
    if name in BUILT_IN and clients is not None:
        raise own_data(name)
    with elapsed(spec.preparation) if progress else nullcontext():
        if name in BUILT_IN or (clients is None and not isinstance(task, Task)):
            prepared = prepare(spec, fleet)
        else:
            loaded = loaded_in_memory(task) if isinstance(task, Task) else load_task(Path(task))
            prepared = with_source(spec, loaded, _source(clients, loaded, partition), fleet)
    if progress:
        sys.stderr.write(prepared.about + "\n")
    return prepared


def _source(clients: object, loaded: LoadedTask, partition: Partition | None) -> Source:
    if isinstance(clients, str):
        return open_source(clients, loaded, partition)
    if clients is None or isinstance(clients, int):
        raise OperatorError(
            f"clients={clients!r} is not data to learn from",
            hint="give a DataFrame with a partition, lists of examples, or words like "
            "'leaf:FOLDER'; concurrency= is how many train at a time",
        )
    if partition is not None:
        return table_source(clients, partition)
    if hasattr(clients, "volumes") and hasattr(clients, "held_out"):
        return clients  # type: ignore[return-value]
    if isinstance(clients, Mapping) and _are_examples(clients.values()):
        return Memory.named("clients", ((str(name), own) for name, own in clients.items()))
    if isinstance(clients, Sequence) and _are_examples(clients):
        return Memory("clients", clients)
    _refuse_other_examples(clients)
    raise OperatorError(
        f"a {type(clients).__name__} does not say which example belongs to which client",
        hint="add partition='column:NAME', or give a list of examples (bytes) for each client",
    )


def _are_examples(clients: Any) -> bool:
    return all(
        isinstance(own, Sequence) and all(isinstance(example, bytes) for example in own)
        for own in clients
    )


def _refuse_other_examples(clients: object) -> None:
    """Lists of examples that are not bytes."""
    lists = clients.values() if isinstance(clients, Mapping) else clients
    if not isinstance(lists, Iterable):
        return
    for own in lists:
        for example in own if isinstance(own, list | tuple) else ():
            if not isinstance(example, bytes):
                kind = type(example).__name__
                raise OperatorError(
                    f"clients has an example of type {kind}: {reprlib.repr(example)}; examples are "
                    "bytes, as devices store them",
                    hint="encode it: example.encode()"
                    if isinstance(example, str)
                    else "encode it as the task's batch reads it, such as json.dumps(…).encode()",
                )


def _check_numbers(counts: Mapping[str, int | None], others: Mapping[str, float | None]) -> None:
    for name, count in counts.items():
        if count is not None:
            require_count(name, count)
            require(count == int(count), name, count, "must be a whole number", f"round {name}")
    for name, value in others.items():
        if value is not None:
            require_number(name, value)


def _swept(vary: Mapping[str, Any]) -> dict[str, tuple[SweptValue, ...]]:
    """Checks the values, and converts NumPy's numbers to Python's."""
    swept: dict[str, tuple[SweptValue, ...]] = {}
    for name, values in vary.items():
        is_list = isinstance(values, Iterable) and not isinstance(values, str)
        several = tuple(values) if is_list else ()
        holds = is_list and all(isinstance(value, str | Real) for value in several)
        remedy = f'write vary={{"{name}": (1, 2)}}'
        require(holds, f"vary[{name!r}]", values, "must be a list of numbers or names", remedy)
        swept[name] = tuple(v if isinstance(v, str | int) else float(v) for v in several)
    return swept


def _population(population: PopulationConfig | int) -> PopulationConfig:
    if isinstance(population, int):
        return structs.replace(DEFAULT, size=population)
    return population


def _for_processes(prepared: Prepared, folder: Path) -> WorkloadSpec:
    """Words from which another process can open the same data."""
    if prepared.spec.data is not None or prepared.source is None:
        return prepared.spec
    if not isinstance(prepared.source, Memory):
        raise OperatorError(
            "a source of your own cannot be sent to other processes", hint="use jobs=1"
        )
    path = folder / f"{prepared.source.digest}.clients"
    save_source(prepared.source, path)
    return structs.replace(prepared.spec, data=f"saved:{path}", partition=None)


@contextmanager
def _folder(output: Path | str | None) -> Iterator[Path]:
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
        yield Path(output)
        return
    with TemporaryDirectory(prefix="papaya-") as folder:
        yield Path(folder)


@contextmanager
def _telling(progress: bool) -> Iterator[Callable[[str, float, str], None]]:
    if not progress:
        yield lambda name, done, words: None
        return
    with Progress() as shown:
        yield shown.update


def _shown(step: LabStep) -> tuple[str, float, str]:
    return step.kind, step.share, f"{step.done:,} of {step.total:,}"
