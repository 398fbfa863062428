"""Where experiments get their runs from: recorded once, learnt along many times, kept on disk.

A `Scene` is a run of the machines, a `Trial` is learning along it. Both are functions of what they
say, so their files are named by a digest of it: experiments share them, and a reproduction that was
interrupted goes on where it was.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, structs

from papaya import __version__
from papaya.config import AsyncFL, SyncFL, TaskConfig
from papaya.sim.cluster import ClusterConfig
from papaya.sim.jobs import Map, mapping, write_whole
from papaya.sim.population import DEFAULT, STRESS
from papaya.sim.replay import Curve, Rates, learn
from papaya.sim.report import Report
from papaya.sim.trace import Trace, record
from papaya.sim.workloads.base import Workload
from papaya.sim.workloads.embedding import EmbeddingWorkload
from papaya.sim.workloads.language import Language, LanguageConfig
from papaya.sim.workloads.lstm import Lstm, Walks
from papaya.sim.workloads.lstm_trainers import LstmSizes

POPULATIONS: Final = {"default": DEFAULT, "stress": STRESS}
_MODEL_LENGTH: Final = 4  # of what is uploaded while a trace is recorded
_DRAIN_S: Final = 300.0  # longer than a timeout: whoever was assigned in the window has ended
_WARM_UP_S: Final = 600.0
SUPPLY: Final = 3.0  # a fleet this large has more than enough devices for a round to start
_NO_END_HOURS: Final = 10_000.0

LANGUAGE: Final = LanguageConfig()
LSTM: Final = LstmSizes()

Model = Literal["embedding", "lstm"]


class Scene(Struct, frozen=True, kw_only=True):
    """A run of the machines until so many versions, or for so many hours after the warm-up."""

    regime: AsyncFL | SyncFL
    concurrency: int
    seed: int
    versions: int | None = None
    hours: float | None = None
    population: Literal["default", "stress"] = "default"

    @property
    def cluster(self) -> ClusterConfig:
        task = TaskConfig(
            task="experiment",
            concurrency=self.concurrency,
            model_length=_MODEL_LENGTH,
            regime=self.regime,
        )
        population = POPULATIONS[self.population]
        return ClusterConfig(tasks=(task,), population=population, supply=SUPPLY)

    @property
    def goal(self) -> int:
        return self.cluster.tasks[0].aggregation_goal

    def versions_of(self, updates: int | None) -> int | None:
        """How many versions hold so many updates."""
        return None if updates is None else math.ceil(updates / self.goal)

    @property
    def effort(self) -> float:
        """About how long recording takes, to begin with the longest."""
        if self.versions is not None:
            return float(self.versions * self.goal)
        assert self.hours is not None
        return self.hours * self.concurrency * 50.0


class Trial(Struct, frozen=True, kw_only=True):
    """Learning along a scene, until `target` (a loss) is reached and kept or the scene ends."""

    scene: Scene
    rates: Rates
    target: float | None = None
    model: Model = "embedding"
    evaluations: int = 200
    until: int | None = None


class Recording:
    """A scene that was recorded. The trace is read when it is asked for."""

    def __init__(self, scene: Scene, stem: Path) -> None:
        self.scene = scene
        self._stem = stem

    @cached_property
    def trace(self) -> Trace:
        return Trace.load(self._stem.with_suffix(".npz"))

    @cached_property
    def report(self) -> Report:
        return msgspec.json.decode(self._stem.with_suffix(".json").read_bytes(), type=Report)


class Lab(AbstractContextManager["Lab"]):
    """`tell(kind, done, total)` hears of progress. With several jobs, the processes live until the
    lab is closed: `with Lab(…) as lab`.
    """

    def __init__(
        self, folder: Path, jobs: int, tell: Callable[[str, int, int], None] = lambda *_: None
    ) -> None:
        self.folder = folder
        self._jobs = jobs
        self._tell = tell
        self._processes = ExitStack()
        for part in ("scenes", "trials"):
            (folder / part).mkdir(parents=True, exist_ok=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._processes.__exit__(kind, error, trace)

    def record(self, scenes: Iterable[Scene]) -> dict[Scene, Recording]:
        wanted = list(dict.fromkeys(scenes))
        stems = {scene: self.folder / "scenes" / _digest(scene) for scene in wanted}
        missing = [s for s in wanted if not stems[s].with_suffix(".npz").exists()]
        missing.sort(key=lambda scene: -scene.effort)
        self._each("recording", partial(_record, self.folder), missing)
        return {scene: Recording(scene, stem) for scene, stem in stems.items()}

    def learn(self, trials: Iterable[Trial]) -> dict[Trial, Curve]:
        wanted = list(dict.fromkeys(trials))
        self.record(trial.scene for trial in wanted)
        missing = [trial for trial in wanted if self._curve(trial) is None]
        missing.sort(key=lambda trial: -trial.scene.effort)
        self._each("learning", partial(_learn, self.folder), missing)
        found = {trial: self._curve(trial) for trial in wanted}
        return {trial: curve for trial, curve in found.items() if curve is not None}

    def _curve(self, trial: Trial) -> Curve | None:
        """None as well for a file that is damaged: it is made again."""
        try:
            return msgspec.json.decode(_trial_path(self.folder, trial).read_bytes(), type=Curve)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _each(self, kind: str, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        if not items:
            return
        self._tell(kind, 0, len(items))
        for done, _ in enumerate(self._mapped(work, items), start=1):
            self._tell(kind, done, len(items))

    @cached_property
    def _mapped(self) -> Map:
        return self._processes.enter_context(mapping(self._jobs))


def _record(folder: Path, scene: Scene) -> None:
    warmed = None if scene.hours is None else scene.hours + _WARM_UP_S / 3600
    trace, report = record(
        scene.cluster,
        scene.seed,
        versions=scene.versions,
        hours=_NO_END_HOURS if warmed is None else warmed,
        drain_s=0.0 if warmed is None else _DRAIN_S,
        warm_up_s=_WARM_UP_S,
    )
    stem = folder / "scenes" / _digest(scene)
    encoded = msgspec.json.encode(report)
    write_whole(stem.with_suffix(".json"), lambda path: path.write_bytes(encoded))
    write_whole(stem.with_suffix(".npz"), trace.save)


def _learn(folder: Path, trial: Trial) -> None:
    trace = _trace(folder / "scenes" / f"{_digest(trial.scene)}.npz")
    workload = _workload(trial.model, trial.scene.population)
    curve = learn(
        trace,
        workload,
        trial.rates,
        target=trial.target,
        evaluations=trial.evaluations,
        until=trial.until,
    )
    encoded = msgspec.json.encode(curve)
    path = _trial_path(folder, trial)
    write_whole(path, lambda partly: partly.write_bytes(encoded))


def _trial_path(folder: Path, trial: Trial) -> Path:
    return folder / "trials" / f"{_digest(trial)}.json"


@lru_cache(maxsize=2)
def _trace(path: Path) -> Trace:
    return Trace.load(path)


@lru_cache(maxsize=2)
def _workload(model: Model, population: str) -> Workload:
    devices = POPULATIONS[population]
    if model == "embedding":
        return EmbeddingWorkload(devices, Language(LANGUAGE))
    language = Language(structs.replace(LANGUAGE, vocabulary=LSTM.vocabulary))
    return Lstm(Walks(language, LSTM.steps, devices), LSTM)


def _digest(value: Scene | Trial) -> str:
    """Of all that decides the outcome, but for the program itself, which its version stands for."""
    scene = value if isinstance(value, Scene) else value.scene
    decides: list[object] = [__version__, value, scene.cluster]
    if isinstance(value, Trial):
        decides += [LANGUAGE, LSTM] if value.model == "lstm" else [LANGUAGE]
    encoded = msgspec.json.encode(decides, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:24]
