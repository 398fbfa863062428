"""The parts of `papaya demo`: its texts, what it counts, what it tells, whom it starts and ends."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
from contextlib import redirect_stderr
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from matplotlib.image import imread

from papaya.aggregator.masked_sum import MaskedSum
from papaya.cli.admin_client import AdminClient
from papaya.cli.demo import demo
from papaya.cli.demo.demo import TASK_FILE, deal_out, find_texts, write_task, write_trust
from papaya.cli.demo.processes import Processes, interrupted_by_signals
from papaya.cli.demo.show import (
    SOFTWARE,
    DemoRecorder,
    DemoSample,
    LineView,
    MaskedSample,
    Onlooker,
    Summary,
    bits_per_byte,
    draw,
    happening,
    perplexities,
    reading,
    summarize,
    telling,
    text_of,
    utilization,
    view_for,
)
from papaya.cli.main import main
from papaya.config import AsyncFL, EvaluationPlan, SecureAggregation, SyncFL, TaskConfig
from papaya.device import confinement
from papaya.device.texts import LIBRARY
from papaya.device.trust import read_policy
from papaya.errors import OperatorError, PapayaError
from papaya.learning.task import load_task
from papaya.messages.storage import PointRow
from papaya.secagg.words import WORD
from papaya.server.admin.views import TaskDetail, TaskView
from papaya.server.public_log import own_key

POINTS = (
    PointRow(0, 100.0, 0, 0, 0.0, 7.6, 2000.0),
    PointRow(1, 110.0, 10, 900, 1.0),
    PointRow(2, 112.0, 10, 900, 2.0, 6.9, 1000.0),
    PointRow(3, 114.0, 10, 900, 3.0, 4.6, 100.0),
)
SAMPLES = [
    DemoSample(1.0, 0, 0, 0, 0),
    DemoSample(11.0, 20, 12, 2, 1),
    DemoSample(13.0, 22, 25, 5, 2),
]


def a_detail(points: tuple[PointRow, ...] = POINTS) -> TaskDetail:
    evaluated = [point for point in points if point.loss is not None]
    config = TaskConfig(
        task="next-word",
        concurrency=24,
        model_length=8,
        regime=AsyncFL(aggregation_goal=10),
        secure_aggregation=SecureAggregation(),
        clip=2.0,
        evaluation=EvaluationPlan(clients=16),
    )
    view = TaskView(
        task="next-word",
        state="completed",
        why="",
        regime="AsyncFL",
        concurrency=24,
        aggregation_goal=10,
        version=points[-1].version,
        submitted=100.0,
        ended=145.0,
        evaluated=evaluated[-1].version,
        loss=evaluated[-1].loss,
        perplexity=evaluated[-1].perplexity,
    )
    return TaskDetail(
        task=view,
        config=config,
        manifest=(),
        points=points,
        versions_per_minute=1.0,
        warnings=(),
    )


def a_summary(points: tuple[PointRow, ...] = POINTS, sample: MaskedSample | None = None) -> Summary:
    files = (Path("runs/m.safetensors"), Path("runs/p.png"), Path("runs/m.csv"))
    return summarize(a_detail(points), list(points), SAMPLES, 48, files, sample)


# -- texts --------------------------------------------------------------------------------------


def test_texts_are_the_documentation_and_sources_drawn_by_the_seed() -> None:
    texts = find_texts(40, seed=1)
    assert len(set(texts)) == 40
    assert texts == find_texts(40, seed=1)
    assert texts != find_texts(40, seed=2)
    assert texts[0] == LIBRARY / "pydoc_data" / "topics.py"
    assert not any({"test", "site-packages", "encodings"} & {*text.parts} for text in texts)
    sizes = sorted(text.stat().st_size for text in texts)
    assert sizes[0] >= 4096
    assert sizes[-1] > 10 * sizes[len(sizes) // 2]  # a heavy tail


def test_a_library_with_too_few_texts_is_named(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("x = 1\n" * 1000)
    (tmp_path / "short.py").write_text("x = 1\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "long.py").write_text("x = 1\n" * 1000)
    assert find_texts(1, 1, tmp_path) == [tmp_path / "long.py"]
    with pytest.raises(OperatorError, match="has 1 texts") as caught:
        find_texts(2, 1, tmp_path)
    assert caught.value.hint == "--devices 1"


def test_each_device_gets_one_text(tmp_path: Path) -> None:
    texts = find_texts(7, seed=1)
    folders = [tmp_path / "a", tmp_path / "b"]
    assert deal_out(texts, folders) == [4, 3]
    copies = [path for folder in folders for path in sorted(folder.iterdir())]
    dealt = texts[::2] + texts[1::2]
    assert [copy.read_bytes() for copy in copies] == [text.read_bytes() for text in dealt]


# -- numbers ------------------------------------------------------------------------------------


def test_readings_are_of_one_task() -> None:
    metrics = (
        "# TYPE papaya_task_active_clients gauge\n"
        'papaya_task_active_clients{task="next-word-eval-0"} 3\n'
        'papaya_task_active_clients{task="next-word"} 23\n'
        'papaya_task_trips_total{task="next-word"} 1e3\n'
    )
    assert reading(metrics, "papaya_task_active_clients", "next-word") == 23
    assert reading(metrics, "papaya_task_trips_total", "next-word") == 1000
    assert reading(metrics, "papaya_task_trips_total", "other") == 0


def test_warm_up_is_left_out() -> None:
    assert utilization(SAMPLES, 24) == 21 / 24
    assert utilization(SAMPLES[:1], 24) == 0.0


def test_the_summary_is_what_was_measured() -> None:
    summary = a_summary()
    assert summary.perplexity == {0: 2000.0, 2: 1000.0, 3: 100.0}
    assert summary.has_learned
    assert (summary.version, summary.counted) == (3, 30)
    assert (summary.start_s, summary.seconds) == (10.0, 35.0)
    assert summary.looks == 2
    assert summary.trips == 30  # the last look at the aggregator was before version 3
    assert summary.mean_staleness == 2.0
    text = text_of(summary)
    assert len(text.splitlines()) <= 14
    assert "2,000 → 100" in text
    assert "88 % of the slots" in text
    assert "load_file('runs/m.safetensors')" in text
    assert "(noisy: each value is from 16 devices)" in text
    assert "demo --checkpoint runs/m.safetensors" in text  # a command that needs no server
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary


def test_the_result_says_how_long_a_slow_start_took() -> None:
    soon = a_summary()
    assert text_of(soon).splitlines()[0].endswith("35 s of training")
    slow = msgspec.structs.replace(soon, start_s=31.0)
    head = text_of(slow).splitlines()[0]
    assert head.endswith("35 s of training, after 31 s to the first version")


def test_the_time_of_training_counts_from_the_first_version() -> None:
    options = demo.DemoOptions(minutes=0.5)
    assert f"stop.training_hours={0.5 / 60}" in demo._settings(options, 10)
    running = msgspec.structs.replace(a_detail().task, state="running")
    detail = msgspec.structs.replace(a_detail(), task=running)
    assert demo._done(options, SAMPLES[:1], detail) == 0.0, "devices start"
    assert demo._done(options, SAMPLES, detail) == 2 / 30
    assert demo._done(options, SAMPLES, a_detail()) == 1.0, "it has ended"


def test_a_demo_may_take_its_time_for_the_first_version_and_again_after_it() -> None:
    clock, shown = [0.0], LineView(io.StringIO())
    client = cast(AdminClient, SimpleNamespace(download=lambda path, limit: (b"", "")))
    recorder = DemoRecorder(client, shown, 60.0, lambda: clock[0])

    def look(now: float, version: int) -> None:
        clock[0] = now
        task = msgspec.structs.replace(a_detail().task, state="running", version=version)
        recorder.update(msgspec.structs.replace(a_detail(), task=task))

    look(59.0, 0)
    look(60.0, 1)
    look(120.0, 5)
    assert [sample.version for sample in recorder.samples] == [0, 1, 5]
    with pytest.raises(PapayaError, match="version 6 and did not end in time"):
        look(120.1, 6)


def test_one_version_has_no_rate() -> None:
    text = text_of(a_summary(POINTS[:2]))
    assert re.search(r"versions +1$", text, re.MULTILINE)
    assert text.endswith("and 1 sum of 10 or more updates.")
    assert re.search(r"versions +3, 30 per minute$", text_of(a_summary()), re.MULTILINE)


def test_a_model_that_did_not_learn_is_called_so() -> None:
    worse = msgspec.structs.replace(POINTS[-1], perplexity=2001.0)
    assert not a_summary((*POINTS[:3], worse)).has_learned
    assert not a_summary(POINTS[:1]).has_learned


def test_the_picture_is_one(tmp_path: Path) -> None:
    curve = perplexities(100.0, POINTS)
    assert curve == [(0.0, 0, 2000.0), (12.0, 2, 1000.0), (14.0, 3, 100.0)]
    draw(tmp_path / "p.png", "AsyncFL", curve, SAMPLES, 24, 0.875, 16)
    assert imread(tmp_path / "p.png").ndim == 3


def test_a_log_has_a_line_for_each_evaluation() -> None:
    stream = io.StringIO()
    view = LineView(stream)
    for points in (POINTS[:1], POINTS[:1], POINTS[:2], POINTS[:3], POINTS):
        view.update(SAMPLES, a_detail(points))
    lines = stream.getvalue().splitlines()
    assert [line.split("perplexity ")[1].split(", ")[0] for line in lines] == [
        "2,000 at version 0", "1,000 at version 2", "100 at version 3",
    ]  # fmt: skip
    assert lines[-1].endswith("utilization 88 %, mean staleness 2.0")


def test_between_evaluations_a_log_says_what_happens() -> None:
    stream, clock = io.StringIO(), iter([100.0, 100.5, 101.0, 102.0, 102.6, 104.0, 105.0])
    view, detail = LineView(stream, lambda: next(clock)), a_detail(POINTS[:1])
    running = msgspec.structs.replace(detail.task, state="running", evaluated=None)
    running = msgspec.structs.replace(running, perplexity=None, loss=None)
    detail = msgspec.structs.replace(detail, task=running)
    with view:
        for active in (0, 0, 0, 0, 1, 24):
            view.update([DemoSample(1.0, active, 0, active // 3, 0)], detail)
    assert stream.getvalue().splitlines() == [
        "training",
        "   0 s  version 0: devices are starting",
        "   3 s  version 0: devices are starting",
        "   5 s  version 0: 24 devices active, 8 of 10 updates for the next version",
    ]


def test_what_takes_a_while_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    class Told(io.StringIO):
        """A stderr that lets a test wait for what is told."""

        said = Event()

        def write(self, text: str) -> int:
            if "so far" in text:
                self.said.set()
            return super().write(text)

    told = Told()
    with redirect_stderr(told), telling("the server starts", every_s=0.001):
        assert told.said.wait(120)
    assert re.match(r"the server starts\n  \d+ s so far\n", told.getvalue())
    with pytest.raises(OperatorError), telling("the server starts"):
        raise OperatorError("it does not")
    assert capsys.readouterr().err == "the server starts\n"


def test_the_end_is_told_while_it_lasts() -> None:
    assert happening(SAMPLES, a_detail()) == "evaluating the last version"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with view_for(lambda samples, detail: 0.5, stream) as view:
        view.update(SAMPLES, a_detail())
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    for words in ("AsyncFL, evaluating", "perplexity", "100", "█", "utilization", "88 %"):
        assert words in shown


# -- privacy ------------------------------------------------------------------------------------


def test_the_last_line_says_what_the_server_saw() -> None:
    *_, warning, last = text_of(a_summary(sample=MaskedSample(1, 40, 7.9994))).splitlines()
    assert warning == SOFTWARE
    assert "INSECURE" in warning
    assert last == (
        "The server saw 30 masked updates, which look like random bytes (entropy of one of them, "
        "read from the server's disk: 7.999 of 8 bits per byte), and 3 sums of 10 or more updates."
    )
    few = text_of(a_summary(sample=MaskedSample(3, 40, 7.5))).splitlines()[-1]
    assert "(entropy of a sum of 3, read from the server" in few
    never = text_of(a_summary()).splitlines()[-1]
    assert never.endswith("which look like random bytes, and 3 sums of 10 or more updates.")


def test_in_the_clear_it_saw_everything() -> None:
    text = text_of(msgspec.structs.replace(a_summary(), threshold=None))
    assert "INSECURE" not in text
    assert text.splitlines()[-1] == "The server saw 30 single updates in the clear."


def test_the_onlooker_takes_the_smallest_sum(tmp_path: Path) -> None:
    onlooker = Onlooker(tmp_path, "next-word")
    onlooker.look()
    assert onlooker.sample(1000) is None
    folder = tmp_path / "next-word" / "1"
    folder.mkdir(parents=True)
    noise = np.random.default_rng(1).integers(0, 1 << 32, 1000, WORD)
    for clients, vector in ((7, np.zeros(1000, WORD)), (2, noise), (3, np.ones(1000, WORD))):
        name = f"sum-12-{clients}-{clients:032x}"
        (folder / name).write_bytes(MaskedSum(vector, float(clients)).encode())
        onlooker.look()
    (folder / "version-12-ab").write_bytes(b"")
    onlooker.look()
    sample = onlooker.sample(1000)
    assert sample == MaskedSample(2, 4000, bits_per_byte(noise))
    assert sample.bits_per_byte > 7.9


def test_what_is_not_masked_is_not_noise() -> None:
    """Small numbers in fixed point, as an update in the clear would be: half the bytes tell."""
    update = np.random.default_rng(1).normal(0, 1 << 12, 10_000).astype(np.int32)
    assert bits_per_byte(update.view(WORD)) < 6
    assert bits_per_byte(np.zeros(10, WORD)) == 0


@pytest.mark.parametrize("regime", [AsyncFL(aggregation_goal=3), SyncFL(over_selection=0.5)])
@pytest.mark.parametrize("is_clear", [False, True])
def test_the_copy_of_the_task_has_the_settings_of_the_run(
    regime: AsyncFL | SyncFL, is_clear: bool, tmp_path: Path
) -> None:
    path = tmp_path / "next_word.py"
    write_task(path, TASK_FILE, regime, 6, is_clear=is_clear)
    config = load_task(path).config()
    assert (config.task, config.regime, config.concurrency) == ("next-word", regime, 6)
    assert config.secure_aggregation == (None if is_clear else SecureAggregation())


def test_devices_believe_the_log_and_sums_of_the_goal(tmp_path: Path) -> None:
    """The key exists before the server has started its TSA: devices start before that."""
    write_trust(tmp_path / "trust.toml", tmp_path, "127.0.0.1:8750", 10)
    policy = read_policy(tmp_path / "trust.toml")
    assert policy.log_key == (tmp_path / "log.key.pub").read_text().strip()
    assert policy.log_key == str(own_key(tmp_path).verifier)
    assert policy.log_url == "http://127.0.0.1:8750/v1/log"
    assert policy.accepts("software")
    assert policy.minimum_threshold == 10


# -- processes ----------------------------------------------------------------------------------


def test_a_server_is_started_checked_and_ended(tmp_path: Path) -> None:
    free = "127.0.0.1:0"
    with Processes(tmp_path) as processes:
        addresses = processes.start_server(
            "server", "--data", str(tmp_path / "data"), "--devices", free, "--admin", free
        )
        assert sorted(addresses) == ["admin", "devices"]
        processes.check()
        [process] = processes._running.values()
    assert process.returncode == 0
    processes.stop()  # once more does nothing
    told = (tmp_path / "server.log").read_text().splitlines()
    assert "stopping" in told, "it waits for no upload"
    assert told[-1] == "stopped"


def test_a_server_ends_in_order_although_others_have_to_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed leaves its TSA running."""
    monkeypatch.setattr("papaya.cli.demo.processes._STOP_S", 0.05)
    sent: list[tuple[str, signal.Signals]] = []

    class Stubborn:
        """Ends with SIGKILL only. Its name is its process id."""

        def __init__(self, name: str) -> None:
            self.pid = name
            self.is_over = False

        def poll(self) -> int | None:
            return 0 if self.is_over else None

        def wait(self, timeout: float | None = None) -> int:
            if not self.is_over:
                assert timeout is not None, "it would wait for ever"
                raise subprocess.TimeoutExpired(self.pid, timeout)
            return 0

    def kill(pid: str, number: signal.Signals) -> None:
        sent.append((pid, number))
        processes._running[pid].is_over |= number == signal.SIGKILL

    monkeypatch.setattr(os, "killpg", kill)
    processes: Any = Processes(tmp_path)
    processes._running = {name: Stubborn(name) for name in ("server", "one", "two")}
    processes.stop()
    assert sent == [
        ("one", signal.SIGTERM),
        ("two", signal.SIGTERM),
        ("one", signal.SIGKILL),
        ("two", signal.SIGKILL),
        ("server", signal.SIGTERM),
        ("server", signal.SIGKILL),
    ]


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        with pytest.raises(OperatorError, match="0 is below 1") as caught:
            processes.run("simulation", "simulate", "--concurrency", "0")
        assert str(tmp_path / "simulation.log") in caught.value.hint
        with pytest.raises(OperatorError, match="server ended with status 2"):
            processes.start_server("server", "--devices", "nowhere")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_as_a_person_does(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        signal.raise_signal(number)
    assert signal.getsignal(number) == before


# -- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem", "hint"),
    [
        (["--concurrency", "50"], "--devices 48 is less than --concurrency 50", "--devices 100"),
        (["--sync", "--goal", "25"], "--goal 25 is more than the 24 clients", "--goal 24"),
        (["--devices", "100000"], "texts of 4096 bytes", "--devices "),
        (["--checkpoint", "none.safetensors"], "no file none.safetensors", "--checkpoint"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    arguments: list[str],
    problem: str,
    hint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--output", str(tmp_path / "new"), *arguments]) == 2
    error, _, advice = capsys.readouterr().err.splitlines()
    assert problem in error
    assert hint in advice
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "runs/demo-async"),
        (["--sync"], "runs/demo-sync"),
        (["--clear"], "runs/demo-async-clear"),
        (["--sync", "--output", "mine"], "mine"),
    ],
)
def test_each_kind_of_run_has_a_folder_of_its_own(
    arguments: list[str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[demo.DemoOptions] = []

    def run(options: demo.DemoOptions) -> int:
        found.append(options)
        return 0

    monkeypatch.setattr(demo, "run", run)
    assert main(["demo", *arguments]) == 0
    assert demo.output_of(found[0]) == Path(folder)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(confinement, "missing", lambda: None)
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_demo_says_so_and_uses_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo.usable_engine(None) == "torch"
    told = capsys.readouterr().err
    assert "needs a C++ compiler" in told
    assert "using --engine torch" in told
    assert demo.usable_engine("torch") == "torch"
    with pytest.raises(OperatorError, match=r"needs a C\+\+ compiler") as refused:
        demo.usable_engine("executorch")
    assert refused.value.hint == "papaya demo --engine torch"


def test_a_machine_that_cannot_confine_jobs_uses_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(confinement, "missing", lambda: "there is no Landlock")
    assert demo.usable_engine(None) == "torch"
    assert "there is no Landlock: using --engine torch" in capsys.readouterr().err
