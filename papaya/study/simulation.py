"""One learning run and all that it leaves: history, model, metrics of clients, files.

    simulated = simulate_run(run, prepared)
    simulated.history             # a pandas DataFrame
    simulated.model               # a state dict of torch
    simulated.save(folder)        # report, curve, model, clients, plots, and the run itself

With a folder to resume in, the trace and checkpoints are kept there until the run is over: a run
that was killed continues when it is called again, and ends with the same numbers. Each run has a
subfolder of its own, so runs may share the folder.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    Protocol,
    TypeAlias,
    get_args,
    runtime_checkable,
)

import msgspec
import numpy as np
from msgspec import structs

from papaya.config.checks import require, require_choice
from papaya.errors import InvariantError, OperatorError
from papaya.learning.checkpoint_files import encode_named
from papaya.learning.parameters import FLOAT32, Manifest, Vector
from papaya.progress import plural
from papaya.sim.draws import Floats
from papaya.sim.jobs import write_whole
from papaya.sim.population import client_of
from papaya.sim.report import RunReport, regime_name
from papaya.study.checkpoint import Checkpoints
from papaya.study.data.opening import save_source
from papaya.study.data.source import Memory, Source
from papaya.study.followed_trace import FollowedTrace, can_follow, follow
from papaya.study.lab import Recording
from papaya.study.run import (
    RecordingPlan,
    Run,
    RunResult,
    clients_to_train,
    fleet_of,
    learn_run,
    record_plan,
    recordable,
)
from papaya.study.run_file import RunFile, RunSummary, summarized
from papaya.study.sweep import (
    OF_ONE_REGIME,
    Regime,
    regime_of,
    setting_of,
    with_rates,
    with_setting,
)
from papaya.study.trace import Trace
from papaya.study.workloads.base import Clients, Workload
from papaya.study.workloads.registry import Prepared, WorkloadSpec

if TYPE_CHECKING:
    import pandas
    import torch

    from papaya.sim.plots import Picture

TellStage: TypeAlias = Callable[[str, float, str], None]
"""Called with what is done, which part of it from 0 to 1, and words."""

Whole: TypeAlias = Callable[[], tuple[Trace, RunReport]]

INSTALL_PANDAS: Final = (
    "pip install 'papaya-fl[data]'; after make demo: .venv/bin/pip install 'papaya-fl[data]', or "
    "make install"
)
CHECKPOINT_S: Final = 30.0
_CHECKPOINT: Final = "learning.checkpoint"
_FOLLOWED_UPDATES: Final = 20_000
_FOLLOWED_BYTES: Final = 1 << 29
_FIELDS: Final = ("all", "p75", "p99", "all_by_clients")
_FILES: Final = ("report.json", "run.json", "curve.csv", "clients.csv", "model.safetensors")


@runtime_checkable
class SupportsClientResults(Protocol):
    """A workload that judges on clients: a row for each, its mean loss and its metrics."""

    held_out: Clients

    def client_results(self, parameters: Vector) -> Floats: ...


@dataclass(frozen=True, eq=False)
class TextTable:
    """Columns by name and rows of plain values; None is unknown."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def frame(self, save: Callable[[Path], object] | None = None) -> pandas.DataFrame:
        """As a DataFrame. Without pandas the results would be lost when a script ends with the
        error, so `save` first writes them into a new folder (default: this table).
        """
        try:
            import pandas
        except ImportError as error:
            folder = Path(mkdtemp(prefix="papaya-"))
            (save or self._save)(folder)
            raise OperatorError(
                f"a DataFrame needs pandas, which is not installed; the results are in {folder}",
                hint=INSTALL_PANDAS,
            ) from error
        return pandas.DataFrame(self.rows, columns=list(self.columns))

    def _save(self, folder: Path) -> None:
        self.write_csv(folder / "table.csv")

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows(self.rows)


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """What came of a run. `parameters` are those of the last version with a finite loss."""

    result: RunResult
    fleet: RunReport
    parameters: Vector
    clients_table: TextTable
    prepared: Prepared

    @cached_property
    def history(self) -> pandas.DataFrame:
        """A row for each evaluated version: time, counts, loss and metrics."""
        return history_table(self.result).frame(self.save)

    @cached_property
    def clients(self) -> pandas.DataFrame:
        """A row for each client of the data: how often it was counted, and its loss and metrics."""
        return self.clients_table.frame(self.save)

    @cached_property
    def model(self) -> dict[str, torch.Tensor]:
        """The trained tensors by name, for `module.load_state_dict(…, strict=False)`."""
        import torch

        tensors = self._manifest.unflatten(self.parameters)
        return {name: torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}

    @property
    def _manifest(self) -> Manifest:
        return self.prepared.manifest

    @property
    def summary(self) -> RunSummary:
        """The numbers that a repetition has to give again."""
        return summarized(self.result, encode_named(self._manifest, self.parameters))

    @property
    def loss(self) -> float:
        return self.result.end.all

    def __repr__(self) -> str:
        result = self.result
        ending = "" if result.curve.diverged is None else ", diverged"
        return (
            f"<SimulatedRun of {result.run.workload}: {result.updates:,} client updates, "
            f"{result.versions:,} server updates, loss {result.start.all:.4f} → "
            f"{self.loss:.4f}{ending}>"
        )

    def plot(self) -> Picture:
        """The loss over virtual time; a notebook shows it."""
        from papaya.study.learning_plots import curve_picture

        return curve_picture(self.result, self.title)

    @property
    def title(self) -> str:
        return f"{self.result.run.workload}: {regime_name(self.result.run.recording_plan.task)}"

    def save(self, folder: Path | str) -> list[Path]:
        """Write everything into a folder; `papaya simulate --rerun FOLDER/run.json` repeats it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        model = encode_named(self._manifest, self.parameters)
        record = RunFile.of(self.result, self._saved_spec(folder), self.summary)
        contents = {
            "report.json": msgspec.json.encode(
                {"learning": for_programs(self.result), "fleet": self.fleet}
            ),
            "run.json": record.encoded(),
            "model.safetensors": model,
        }
        for name, content in contents.items():
            _write(folder / name, content)
        written = [folder / name for name in _FILES]
        if (source := self.prepared.task_source) is not None:
            _write(folder / record.task_copy, source)
            written.append(folder / record.task_copy)
        write_whole(folder / "curve.csv", history_table(self.result).write_csv)
        write_whole(folder / "clients.csv", self.clients_table.write_csv)
        return [*written, *self._draw(folder)]

    def _saved_spec(self, folder: Path) -> WorkloadSpec:
        """Words that name the data; clients that came from no file are written to one."""
        spec, source = self.prepared.spec, self.prepared.source
        if spec.data is not None or not isinstance(source, Memory):
            return spec
        save_source(source, folder / "clients.data")
        return structs.replace(spec, data=f"saved:{folder / 'clients.data'}", partition=None)

    def _draw(self, folder: Path) -> list[Path]:
        from papaya.sim import plots
        from papaya.study import learning_plots
        from papaya.study.data.client_plots import draw_clients

        name = regime_name(self.result.run.recording_plan.task)
        learning_plots.draw_curve(self.result, folder / "curve.png", self.title)
        plots.draw({name: self.fleet}, folder / "plot.png", self.title)
        drawn = [folder / "curve.png", folder / "plot.png"]
        if (source := self.prepared.source) is not None:
            label = getattr(self.prepared.spec.partition, "label", "y")
            drawn.append(draw_clients(source, folder / "clients.png", label))
        return drawn


def for_programs(result: RunResult) -> dict[str, object]:
    """With the K and the rates that were used: the configuration has null where it has none."""
    found: dict[str, object] = msgspec.to_builtins(result)
    return {"setting": setting_of(result.run), **found}


def history_table(result: RunResult) -> TextTable:
    names = [f"{name}_{field}" for name in ("loss", *result.start.metrics) for field in _FIELDS]
    rows = []
    for point in result.curve.points:
        means = (point.quality, *point.quality.metrics.values())
        values = (getattr(mean, field) for mean in means for field in _FIELDS)
        rows.append((point.version, point.hours, point.updates, point.trips, *values))
    return TextTable(("version", "hours", "updates", "trips", *names), rows)


# -- running -------------------------------------------------------------------------------------


def run_of(
    prepared: Prepared,
    regime: Regime | None,
    setting: Mapping[str, float],
    *,
    seed: int,
    updates: int,
    hours: float,
    evaluations: int,
) -> Run:
    """The run of a workload with what is set (`VARIABLES` in sweep.py); the rest is its own."""
    chosen = regime or regime_of(prepared.task)
    require_choice("regime", chosen, get_args(Regime))
    for name, belongs_to in OF_ONE_REGIME.items():
        problem = f"has an effect only with the regime {belongs_to}"
        remedy = f"leave it out, or use the regime {belongs_to}"
        require(
            name not in setting or chosen == belongs_to, name, setting.get(name), problem, remedy
        )
    recording_plan = RecordingPlan(
        cluster=recordable(with_setting(prepared.task, chosen, setting), prepared.population),
        seed=seed,
        updates=updates,
        hours=hours,
    )
    return Run(
        recording_plan=recording_plan,
        workload=prepared.task.task,
        data=prepared.digest,
        rates=with_rates(prepared.rates, setting),
        updates=updates,
        evaluations=evaluations,
    )


def simulate_run(
    run: Run,
    prepared: Prepared,
    *,
    processes: int = 1,
    ray: str | None = None,
    resume: Path | None = None,
    checkpoint_s: float = CHECKPOINT_S,
    tell: TellStage = lambda name, done, words: None,
) -> SimulatedRun:
    """Record and learn. Clients train in so many processes, or on the Ray cluster `ray`. `resume`
    is a folder for the trace and checkpoints.
    """
    own = None if resume is None else _own_folder(run, resume)
    with _recorded(run, prepared, own, tell) as (trace, whole):
        return _learnt(run, prepared, trace, whole, processes, ray, own, checkpoint_s, tell)


def _learnt(
    run: Run,
    prepared: Prepared,
    recorded: Trace | FollowedTrace,
    whole: Whole,
    processes: int,
    ray: str | None,
    own: Path | None,
    checkpoint_s: float,
    tell: TellStage,
) -> SimulatedRun:
    kept: list[Vector] = []
    total = max(1, clients_to_train(run, recorded))

    def learns(trained: int, judged: int) -> None:
        evaluated = plural(judged, "version")
        words = f"{trained:,} of {total:,} clients trained, {evaluated} evaluated"
        tell("learning", min(1.0, trained / total), words)

    def resumes(trained: int, judged: int) -> None:
        words = f"resumes at {trained:,} of {total:,} clients trained"
        tell("learning", min(1.0, trained / total), words)

    checkpoints = None
    if own is not None:
        checkpoints = Checkpoints(own / _CHECKPOINT, checkpoint_s)
    with prepared.opened(run.recording_plan.seed, processes, ray) as workload:
        result = learn_run(
            run,
            recorded,
            None if isinstance(recorded, FollowedTrace) else fleet_of(whole()[1]),
            workload,
            learns,
            judged=lambda version, parameters: kept.__setitem__(slice(None), [parameters]),
            checkpoints=checkpoints,
            resumed=resumes,
        )
        [parameters] = kept
        trace, report = whole()
        table = clients_table(prepared.source, trace, result, workload, parameters)
    return SimulatedRun(result, report, parameters, table, prepared)


def _own_folder(run: Run, resume: Path) -> Path:
    return resume / run.digest


def kept_of(run: Run, resume: Path, again: Literal["command", "call"]) -> str:
    """What is left of an interrupted run, and what the same command or call does with it."""
    own = _own_folder(run, resume)
    if (own / _CHECKPOINT).exists():
        return f"the last checkpoint is kept: run the same {again} again to continue from there"
    if Recording(own, run.recording_plan).is_there:
        return (
            "only the recording of the fleet is kept, there is no checkpoint yet: the same "
            f"{again} starts to learn from the beginning"
        )
    return f"nothing is kept yet: the same {again} starts from the beginning"


def forget(run: Run, resume: Path) -> None:
    """Delete what this run has left to resume from."""
    shutil.rmtree(_own_folder(run, resume), ignore_errors=True)
    with suppress(OSError):  # other runs use the folder
        resume.rmdir()


@contextmanager
def _recorded(
    run: Run, prepared: Prepared, own: Path | None, tell: TellStage
) -> Iterator[tuple[Trace | FollowedTrace, Whole]]:
    """The recording, and who gives all of it. A long one goes on in another process meanwhile."""
    plan = run.recording_plan
    recording = None
    if own is not None:
        (own / "traces").mkdir(parents=True, exist_ok=True)
        recording = Recording(own, plan)
        if recording.is_there:
            kept = recording
            yield kept.trace, lambda: (kept.trace, kept.report)
            return

    def recorded(counted: int, now_s: float) -> None:
        words = f"{counted:,} client updates, {now_s / 3600:.1f} virtual hours"
        tell("fleet", min(1.0, plan.share(counted, now_s)), words)

    if _is_followed(plan, prepared):
        # Learning tells how far it is; it cannot be further than the recording.
        with follow(plan) as followed:
            yield followed, followed.whole
            if recording is not None:
                recording.write(*followed.whole())
        return
    found = record_plan(plan, lambda recorder: recorded(recorder.counted, recorder.engine.now))
    if recording is not None:
        recording.write(*found)
    yield found[0], lambda: found


def _is_followed(plan: RecordingPlan, prepared: Prepared) -> bool:
    """Whether another process is worth its start, and the versions in flight fit into memory."""
    versions = plan.task.max_staleness + 2
    kept_bytes = FLOAT32.itemsize * prepared.manifest.length * versions
    return can_follow(plan) and plan.updates >= _FOLLOWED_UPDATES and kept_bytes <= _FOLLOWED_BYTES


def clients_table(
    source: Source | None, trace: Trace, result: RunResult, workload: Workload, parameters: Vector
) -> TextTable:
    """A row for each client of a source. Only judged clients have a loss."""
    metrics = tuple(result.start.metrics)
    columns = ("client", "examples", "held_out", "updates", "loss", *metrics)
    if source is None or not isinstance(workload, SupportsClientResults):
        return TextTable(columns, [])
    count = len(source.volumes)
    counted = trace.clients.device[: int(trace.first[result.versions + 1])]
    updates = np.bincount(client_of(counted.astype(np.uint64), count).astype(np.int64))
    results: dict[int, Sequence[float]] = dict(
        zip(
            workload.held_out.device.tolist(),
            workload.client_results(parameters).tolist(),
            strict=True,
        )
    )
    unknown = (None,) * (1 + len(metrics))
    rows = [
        (
            source.names[client],
            int(source.volumes[client]),
            len(source.held_out(client)),
            int(updates[client]) if client < len(updates) else 0,
            *results.get(client, unknown),
        )
        for client in range(count)
    ]
    if sum(row[3] for row in rows) != len(counted):
        raise InvariantError(f"{len(counted)} updates are not those of {count} clients")
    return TextTable(columns, rows)


def _write(path: Path, content: bytes) -> None:
    write_whole(path, lambda partly: partly.write_bytes(content))
