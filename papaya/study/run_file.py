"""`run.json`: all that decides a run, and what came of it, so that it can be repeated.

It has the whole configuration with the seed, the digest of model and data, the versions of what
computed it, and a digest of the trained model. A repetition refuses another task file, other data
or other device traces, and says which versions differ.
"""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, structs

import papaya
from papaya.errors import OperatorError
from papaya.learning.task import NO_FILE
from papaya.sim.device_traces import TraceFile
from papaya.study.data.opening import read_source
from papaya.study.identity import code_digest
from papaya.study.run import Run, RunResult
from papaya.study.workloads.registry import Prepared, WorkloadSpec, prepare

_FORMAT: Final = 1
_PACKAGES: Final = ("numpy", "torch", "numba", "msgspec")


class RunSummary(Struct, frozen=True):
    """The numbers that a repetition has to give again."""

    loss: float
    versions: int
    updates: int
    model: str


class RunFile(Struct, frozen=True, kw_only=True):
    format: int = _FORMAT
    workload: WorkloadSpec
    run: Run
    result: RunSummary
    versions: dict[str, str]
    code: str
    task_copy: str = "task.py"

    @classmethod
    def of(cls, result: RunResult, workload: WorkloadSpec, summary: RunSummary) -> RunFile:
        return cls(
            workload=workload,
            run=result.run,
            result=summary,
            versions=versions(),
            code=code_digest(),
        )

    def encoded(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def summarized(result: RunResult, model: bytes) -> RunSummary:
    digest = hashlib.sha256(model).hexdigest()
    return RunSummary(result.end.all, result.versions, result.updates, digest)


def read_run_file(path: Path) -> RunFile:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=RunFile)
    except OSError as error:
        raise OperatorError(
            f"cannot read {path}: {error.strerror}",
            hint="use the run.json that papaya simulate wrote into its output folder",
        ) from error
    except msgspec.MsgspecError as error:
        raise OperatorError(
            f"{path} is not the file of a run: {error}",
            hint="use the run.json that papaya simulate wrote into its output folder",
        ) from error
    if found.format != _FORMAT:
        raise OperatorError(f"{path} has format {found.format}, this Papaya reads {_FORMAT}")
    return found


def prepared_again(
    path: Path, file: RunFile, task: str | None = None, data: str | None = None
) -> Prepared:
    """The workload of that run. `task` and `data` say where they are now, if not where they were.

    The copy of the task file beside `path` is used if the original is gone or has changed. Clients
    that the run saved are looked for beside `path` too.
    """
    spec = file.workload
    if spec.name == str(NO_FILE):
        raise OperatorError(
            f"the task of {path} was defined in a notebook and has no file",
            hint="write the task to a file and simulate that",
        )
    spec = structs.replace(spec, data=data or _data(path, file))
    if not spec.is_built_in:
        spec = structs.replace(spec, name=task or _task_file(path, file))
    prepared = prepare(spec, file.run.recording_plan.cluster.population)
    if prepared.digest != file.run.data:
        names = ("task file", "data", "number of judges or of held-out examples", "way of training")
        parts = (names, file.run.data.split("/"), prepared.digest.split("/"))
        differing = [name for name, old, new in zip_longest(*parts) if old != new]
        raise OperatorError(
            f"{path} was made with another {' and another '.join(differing)}",
            hint="name the right ones: papaya simulate TASK.py --data DATA --rerun FILE",
        )
    return prepared


def _task_file(path: Path, file: RunFile) -> str:
    copy, original = path.parent / file.task_copy, Path(file.workload.name)
    is_same = original.is_file() and copy.is_file() and (original.read_bytes() == copy.read_bytes())
    return str(original if is_same or not copy.is_file() else copy)


def _data(path: Path, file: RunFile) -> str | None:
    """Clients that came from no file are saved beside `path`; both may have been moved since."""
    kind, _, name = (file.workload.data or "").partition(":")
    if kind != "saved":
        return file.workload.data
    saved, beside = Path(name), path.parent / Path(name).name
    if not beside.is_file() or (saved.is_file() and saved.samefile(beside)):
        return file.workload.data
    # A later run may have saved other clients at the old place.
    is_used = not saved.is_file() or read_source(beside).digest in file.run.data.split("/")
    return f"saved:{beside}" if is_used else file.workload.data


def relocated(
    path: Path, file: RunFile, capacity: Path | None = None, availability: Path | None = None
) -> RunFile:
    """The same run with the present paths of its device traces. Raises OperatorError if a trace has
    changed or is missing, or if one is given that the run did not use.
    """
    plan = file.run.recording_plan
    population = plan.cluster.population
    given = {"capacity_trace": capacity, "availability_trace": availability}
    traces = {
        field: _same_trace(path, field, getattr(population, field), now)
        for field, now in given.items()
    }
    cluster = structs.replace(plan.cluster, population=structs.replace(population, **traces))
    run = structs.replace(file.run, recording_plan=structs.replace(plan, cluster=cluster))
    return structs.replace(file, run=run)


def _same_trace(
    path: Path, field: str, before: TraceFile | None, now: Path | None
) -> TraceFile | None:
    option = "--" + field.replace("_", "-")
    if before is None:
        if now is not None:
            raise OperatorError(
                f"the run of {path} has no {field}, but {option} {now} is given",
                hint=f"leave {option} out",
            )
        return None
    if now is None and not Path(before.path).is_file():
        raise OperatorError(
            f"the {field} of {path} is no longer at {before.path}",
            hint=f"say where it is: papaya simulate {option} FILE --rerun {path}",
        )
    found = TraceFile.of(now or Path(before.path))
    if found.digest != before.digest:
        raise OperatorError(
            f"not as in {path}: the {field} {found.path} has the digest {found.digest}, not "
            f"{before.digest}",
            hint=f"name the file with which the run was made: {option} FILE",
        )
    return found


def differences(file: RunFile, now: RunSummary) -> list[str]:
    """What a repetition gave otherwise; empty if it gave the same numbers."""
    return [
        f"{field}: {getattr(now, field)}, was {getattr(file.result, field)}"
        for field in file.result.__struct_fields__
        if getattr(now, field) != getattr(file.result, field)
    ]


def other_versions(file: RunFile) -> list[str]:
    """Versions and code that differ from those that made the file."""
    now = versions()
    names = sorted(now.keys() | file.versions.keys())
    found = [
        f"{name} {now.get(name, 'none')}, was {file.versions.get(name, 'none')}"
        for name in names
        if now.get(name) != file.versions.get(name)
    ]
    if code_digest() != file.code:
        found.append("the source code of Papaya")
    return found


def versions() -> dict[str, str]:
    found = {
        "papaya": papaya.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found
