"""Options of the data and of the simulated fleet, for `papaya simulate` and `papaya sweep`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from papaya.cli.output import FormatOptions, note, positive, whole
from papaya.errors import OperatorError
from papaya.sim.device_traces import TraceFile, availabilities, capacities
from papaya.sim.population import DEFAULT, PopulationConfig, with_traces

if TYPE_CHECKING:
    from papaya.study.workloads.registry import Steps, WorkloadSpec

_SETTINGS = tuple(
    field.name
    for field in structs.fields(PopulationConfig)
    if isinstance(field.default, int | float) and field.name != "size"
)


@dataclass(frozen=True, kw_only=True)
class PopulationOptions(FormatOptions):
    population: int = DEFAULT.size
    device: Sequence[tuple[str, float]] = ()
    capacity_trace: Path | None = None
    availability_trace: Path | None = None

    def population_config(self) -> PopulationConfig:
        """Settings that are given come after traces, so they hold."""
        config = structs.replace(DEFAULT, size=self.population)
        left_out: dict[Path, int] = {}
        if self.capacity_trace is not None:
            file = TraceFile.of(self.capacity_trace)
            config = with_traces(config, capacity=file)
            left_out[self.capacity_trace] = capacities(file).left_out
        if self.availability_trace is not None:
            file = TraceFile.of(self.availability_trace)
            config = with_traces(config, availability=file)
            left_out[self.availability_trace] = availabilities(file).left_out
        for path, count in left_out.items():
            if count:
                note(f"warning: left out of {path}: {count:,} entries without usable values")
        return structs.replace(config, **dict(self.device))


@dataclass(frozen=True, kw_only=True)
class DataOptions(PopulationOptions):
    data: str | None = None
    partition: str | None = None
    seconds_per_example: float | None = None
    judges: int | None = None
    held_out: int | None = None
    ray: str | None = None
    steps: Steps = "auto"
    set: Sequence[str] = ()

    def workload_spec(self, name: str, updates: int | None) -> WorkloadSpec:
        """Of a built-in workload, or of a task file with the given data.

        `updates`: how many clients train, in all runs together, if it is known.
        """
        from papaya.study.data.opening import parse_partition
        from papaya.study.workloads.registry import (
            BUILT_IN,
            HELD_OUT,
            MOST_JUDGES,
            WorkloadSpec,
            chosen_steps,
            eager_because_of_ray,
        )

        for setting, value in self.device:
            if self.data is not None and setting.startswith("examples_"):
                raise OperatorError(
                    f"--device {setting}={value:g} has no effect: clients have the examples of "
                    "--data",
                    hint="leave it out, or use a table with --partition sizes:…",
                )
        told = eager_because_of_ray(self.steps, updates, self.ray)
        if told is not None and name not in BUILT_IN:
            note(told)
        return WorkloadSpec(
            name,
            self.data,
            self.seconds_per_example,
            None if self.partition is None else parse_partition(self.partition),
            self.judges or MOST_JUDGES,
            chosen_steps(self.steps, updates, self.ray),
            tuple(self.set),
            self.held_out or HELD_OUT,
        )


def add_population(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--population", type=whole(1), metavar="N", help="number of devices in the fleet"
    )
    listed = ", ".join(f"{name}={getattr(DEFAULT, name):g}" for name in _SETTINGS)
    group.add_argument(
        "--device",
        action="append",
        type=_setting,
        metavar="NAME=VALUE",
        help=f"a setting of the population of devices; may be repeated (default: {listed})",
    )
    group.add_argument(
        "--capacity-trace",
        type=Path,
        metavar="FILE",
        help="measured speeds of devices, in FedScale's format, instead of log-normal ones",
    )
    group.add_argument(
        "--availability-trace",
        type=Path,
        metavar="FILE",
        help="when devices are available, in FedScale's format",
    )


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in _SETTINGS:
        close = get_close_matches(name, _SETTINGS, n=1)
        meant = f"did you mean {close[0]}?" if close else f"names are {', '.join(_SETTINGS)}"
        raise argparse.ArgumentTypeError(f"unknown setting of a device: {name!r}; {meant}")
    try:
        number = float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form NAME=NUMBER") from None
    return name, int(number) if name == "examples_cap" and number == int(number) else number


def add_data(group: argparse._ArgumentGroup) -> None:
    """Describe the data of a task file."""
    group.add_argument(
        "--data",
        metavar="DATA",
        help="examples of the clients: leaf:FOLDER (JSON files of LEAF), text:FOLDER "
        "(one file per client), stdlib (the source code of Python's standard "
        "library), or a table: csv:FILE, parquet:FILE, hf:FOLDER (a dataset of Hugging Face that "
        "save_to_disk wrote)",
    )
    group.add_argument(
        "--partition",
        metavar="KIND:SETTINGS",
        help="which row of a table belongs to which client: column:NAME, "
        "dirichlet:clients=N,alpha=A,label=NAME, shards:clients=N,per_client=S,label=NAME, or "
        "sizes:clients=N,distribution=lognormal|zipf|equal,spread=X; all but column take seed=S "
        "(default: none)",
    )
    group.add_argument(
        "--judges",
        type=whole(1),
        metavar="N",
        help="number of clients on whose held-out examples versions are evaluated (default: 400)",
    )
    group.add_argument(
        "--held-out",
        type=whole(1),
        metavar="N",
        help="evaluate versions on at most N held-out examples per client; this does not change "
        "the weight of a client (default: 32)",
    )
    group.add_argument(
        "--seconds-per-example",
        type=positive,
        metavar="S",
        help="seconds per example on a median device (default: chosen so that training "
        "takes as long as in the built-in population)",
    )
    group.add_argument(
        "--steps",
        choices=("auto", "eager", "compiled", "gpu"),
        help="how clients train: with PyTorch's operators, with compiled code (faster, needs a C++ "
        "compiler, rounds differently), with PyTorch's operators on a GPU (for large models), or "
        "auto: compiled from 20,000 client updates on (for all runs of a sweep together), if the "
        "task can be compiled; else eager",
    )


def add_set(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--set",
        action="append",
        metavar="FIELD=VALUE",
        help="change one setting of the task file, such as optimizer.kind=fedadam, clip=2 or "
        "client.batch_size=16; may be repeated. Other options, such as --concurrency, override it",
    )


def add_ray(group: argparse._ArgumentGroup | argparse.ArgumentParser, what: str) -> None:
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=f"{what} on a Ray cluster: host:port, auto for one that runs on this machine, or "
        "local to start one (default: on this machine, without Ray)",
    )
