"""`papaya client`: options reach the devices, events come out, errors help."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest

from papaya.cli.client import client, setup
from papaya.cli.client.client import Printer
from papaya.cli.client.setup import examples_of, files_in, import_examples
from papaya.client.work import Ending
from papaya.device.bundles import BundleStore
from papaya.device.device import Device
from papaya.device.events import NotEligible, StepsTrained, UploadRerouted, VisitEnded
from papaya.device.example_store import ExampleStore
from papaya.device.executor import Job, JobResult, TaskFile, UnfitExample
from papaya.device.owners import OwnerPolicy
from papaya.device.training import ExecutorTrainer, ProtocolTrainer
from papaya.device.use_policy import UsePolicy
from papaya.errors import OperatorError, PapayaError
from papaya.http.routes import Routes
from papaya.learning import parameters
from papaya.learning.client_training import StepDone, unwatched
from papaya.learning.definition import Examples, TaskTerms
from papaya.messages.participation import Completed, Report
from papaya.messages.selection import CheckIn
from papaya.selector.selector import _REVOKED as REVOKED
from tests.unit.attestation.builders import a_policy
from tests.unit.device.fake_selector import FakeSelector, answer, joined, raw, serving

ASSUMED = ["--assume", "idle,charging,unmetered", "--participation-floor", "0", "--pause", "0"]
WAITING = [*ASSUMED, "--protocol-only", "0.01"]
TASK = """
from papaya.learning.task import *
import torch

def batch(examples):
    return (torch.tensor([[float(len(e))] for e in examples]),)

task = Task(
    name="lengths",
    model=lambda: torch.nn.Linear(1, 1),
    loss=lambda module, x: (module(x) - x).square().mean(),
    batch=batch,
    examples=Examples("words"),
    client=ClientSGD(rate=0.01),
    concurrency=2,
)
"""


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    client.add_to(parser.add_subparsers())
    options = parser.parse_args(["client", *arguments])
    return int(options.run(options))


@contextmanager
def a_server() -> Iterator[FakeSelector]:
    """On a loop of its own: `run` has one itself."""
    ready: list[FakeSelector] = []
    started, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with serving() as fake:
            fake.joined = joined(participation_gap_s=0.0)
            fake.replace["complete"] = answer(Completed())
            ready.append(fake)
            started.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(300)
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(300)
        loop.close()


def test_devices_visit_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    with a_server() as fake:
        options = ["--devices", "3", "--visits", "2", "--store", str(tmp_path / "stores")]
        more = ["--token-file", str(token), "--labels", "b, a"]
        assert run("--server", fake.url, *WAITING, *options, *more) == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == sorted(
        f"device-{number} counted next-word" for number in (1, 1, 2, 2, 3, 3)
    )
    assert "6 visits: 6 counted" in err
    assert fake.seen.count("complete") == 6
    assert sorted(path.name for path in (tmp_path / "stores").iterdir()) == [
        f"device-{number}.db" for number in (1, 2, 3)
    ]
    hello = fake.messages[0]
    assert isinstance(hello, CheckIn)
    assert hello.capabilities.labels == ("a", "b")
    assert hello.capabilities.memory_mb.bit_count() == 1
    assert fake.headers[0]["Authorization"] == "Bearer 0123456789abcdef"
    assert "0123456789abcdef" not in out + err


def test_events_as_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with a_server() as fake:
        options = ["--visits", "1", "--store", str(tmp_path / "device.db"), "--format", "json"]
        assert run("--server", fake.url, *WAITING, *options) == 0
    events = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    stages = [event["stage"] for event in events if event["event"] == "StageReached"]
    assert stages[:4] == ["checking in", "joining", "downloading", "training"]
    assert events[-1]["event"] == "Ended"
    assert (events[-1]["device"], events[-1]["ending"]) == ("device-1", "counted")


def test_a_task_is_trained_on_imported_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, texts, stores = tmp_path / "my_task.py", tmp_path / "texts", tmp_path / "stores"
    task.write_text(TASK)
    texts.mkdir()
    (texts / "1.txt").write_text("one\ntwo\nthree\nfour\nfive\nsix\nseven\n")
    (texts / "2.txt").write_text("eight\nnine\nten\n")
    blob = parameters.encode(np.zeros(2, np.float32), {"task": "lengths", "version": "7"})
    with a_server() as fake:
        key = f"lengths/1/version-7-{sha256(blob).hexdigest()[:32]}"
        fake.replace["parameters"] = raw(blob)
        fake.joined = joined(task="lengths", parameters=key, model_length=2, update_length=2)
        arguments = ["--server", fake.url, *ASSUMED, "--task", str(task), "--devices", "2"]
        imports = ["--import", f"words={texts}", "--store", str(stores)]
        assert run(*arguments, *imports, "--visits", "1") == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["device-1 counted lengths", "device-2 counted lengths"]
    assert "imported 10 new examples from 2 files into collection words" in err
    [module] = {m.capabilities.modules for m in fake.messages if isinstance(m, CheckIn)}
    assert module == (f"sha256:{sha256(task.read_bytes()).hexdigest()[:32]}",)
    for number, count in ((1, 7), (2, 3)):
        with ExampleStore(stores / f"device-{number}.db") as store:
            counts = store.counts("words", 0.0)
            assert sum(counts.values()) == count
            assert store.collections["words"].tasks == ("lengths",)
        trained_on = [m.examples for m in fake.messages if isinstance(m, Report)]
        assert counts["train"] in trained_on


def test_an_unreachable_server_is_named_once_with_a_hint(tmp_path: Path) -> None:
    """In a process of its own, which SIGTERM ends well."""
    program = (
        "import argparse; from papaya.cli.client import client; p = argparse.ArgumentParser(); "
        "client.add_to(p.add_subparsers()); o = p.parse_args(); raise SystemExit(o.run(o))"
    )
    arguments = ["client", "--server", "http://127.0.0.1:9", *WAITING]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments, "--store", str(tmp_path / "d.db")],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(3)]
        process.terminate()
        rest = process.stderr.read()
        assert process.wait(300) == 0
    assert lines[0] == "1 device for any task\n"
    assert "http://127.0.0.1:9 does not answer" in lines[1]
    assert "papaya serve" in lines[2]
    assert "does not answer" not in rest


def test_what_was_done_until_an_interruption_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while it starts or ends, when no device can be asked to leave."""

    async def interrupted(options: argparse.Namespace, printer: Printer) -> None:
        printer.on_event(VisitEnded("device-1", 0.0, "counted", "", "next-word"))
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(*WAITING, "--store", str(tmp_path / "device.db"))
    assert "1 visit: 1 counted" in capsys.readouterr().err


def test_an_unknown_field_of_a_policy_on_trust_names_the_table_of_fields(tmp_path: Path) -> None:
    policy = tmp_path / "trust.toml"
    policy.write_text('log_keys = "x"\n')
    with pytest.raises(OperatorError, match="log_keys") as caught:
        run(*WAITING, "--trust", str(policy), "--store", str(tmp_path / "device.db"))
    page = caught.value.hint.split()[0]
    assert "| `log_key` |" in Path(page).read_text()


def test_a_file_for_the_other_engine_is_refused(tmp_path: Path) -> None:
    source, program = tmp_path / "lengths.py", tmp_path / "lengths.program"
    source.write_text(TASK)
    program.write_bytes(b"papaya-program-1")
    store = ["--store", str(tmp_path / "device.db")]
    with pytest.raises(OperatorError, match="is a program, which needs another engine") as refused:
        run("--task", str(program), *store)
    assert refused.value.hint == f"papaya client --engine executorch --task {program}"
    with pytest.raises(OperatorError, match="is not a program") as refused:
        run("--engine", "executorch", "--task", str(source), *store)
    assert refused.value.hint == f"papaya task compile {source}, or --engine torch"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "no task file"),
        (["--task", "no_such_file.py"], "no task file no_such_file.py"),
        (["--protocol-only", "1", "--server", "nowhere"], "is not an address"),
        (["--protocol-only", "1", "--server", ""], "no server"),
        (["--protocol-only", "1", "--assume", "rich"], "'rich'"),
        (["--protocol-only", "1", "--policies", "none.toml"], "cannot read the policies none.toml"),
        (["--protocol-only", "1", "--token-file", "none"], "cannot read none"),
        (["--protocol-only", "1", "--ca", "none.pem"], "none.pem"),
        (["--protocol-only", "1", "--participation-floor", "-1"], "participation_floor_s"),
        (["--protocol-only", "1", "--pause", "-1"], "pause_s"),
        (["--protocol-only", "1", "--import", "a=none.txt"], "cannot read none.txt"),
        (["--protocol-only", "1", "--blobs-url", "cdn"], "is not an address"),
    ],
)
def test_what_cannot_work_is_an_error_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PapayaError, match=problem) as caught:
        run(*arguments)
    assert caught.value.hint


def test_a_store_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OperatorError, match="cannot create the store"):
        run("--protocol-only", "1", "--devices", "2", "--store", str(tmp_path / "file"))


def test_one_token_for_all_or_one_for_each(tmp_path: Path) -> None:
    files = ["--token-file", "a", "--token-file", "b"]
    with pytest.raises(OperatorError, match="2 token files"):
        run("--protocol-only", "1", "--devices", "3", "--store", str(tmp_path), *files)


def test_to_start_again_imports_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("one\ntwo\n")
    (texts / "b.txt").write_text("three\n")
    policies = {"words": UsePolicy(tasks=("next-word",))}
    trainer = ProtocolTrainer(lambda session, length: b"", lambda: 0.0)
    for told in (
        "imported 3 new examples from 2 files",
        "2 files for collection words: already imported",
    ):
        with (
            ExampleStore(tmp_path / "1.db", policies) as one,
            ExampleStore(tmp_path / "2.db", policies) as two,
        ):
            devices = cast(list[Device], [SimpleNamespace(store=one), SimpleNamespace(store=two)])
            asyncio.run(import_examples([("words", texts)], devices, [], trainer, [], None, 0.0))
            assert [sum(store.counts("words", 0.0).values()) for store in (one, two)] == [2, 1]
        assert told in capsys.readouterr().err


class CheckingExecutor:
    """One task file, which cannot use the example b"bad"."""

    def __init__(self) -> None:
        terms = TaskTerms(False, 3, 1500, 50, None, None)
        self.tasks = (TaskFile("opened.py", "opened", "sha256:ab", terms, Examples("numbers")),)

    def add_bundle(self, name: str, file: TaskFile) -> None:
        raise NotImplementedError

    def remove_bundle(self, name: str) -> None:
        raise NotImplementedError

    async def run(self, job: Job, timeout_s: float, step_done: StepDone = unwatched) -> JobResult:
        assert job.kind == "check"
        if b"bad" not in job.examples:
            return JobResult(b"", len(job.examples))
        unfit = UnfitExample(job.examples.index(b"bad"), "not a number")
        return JobResult(msgspec.msgpack.encode(unfit), 0)


def imported(
    store: ExampleStore, collection: str, path: Path, bundles: BundleStore | None = None
) -> None:
    trainer = ExecutorTrainer(CheckingExecutor(), lambda: 0.0, Random(1))
    devices = cast(list[Device], [SimpleNamespace(store=store)])
    wanted = [(collection, path)]
    asyncio.run(import_examples(wanted, devices, [], trainer, trainer.tasks, bundles, 0.0))


def test_a_line_that_a_task_cannot_use_is_reported_with_its_number(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("1\n2\n")
    (texts / "b.txt").write_text("3\n\n \nbad\n")
    with ExampleStore(tmp_path / "device.db") as store:
        with pytest.raises(OperatorError) as told:
            imported(store, "numbers", texts)
        problem = f"{texts / 'b.txt'}:4: task opened cannot use this example: not a number"
        assert str(told.value) == problem
        assert "nothing was imported into numbers" in told.value.hint
        assert store.counts("numbers", 0.0)["train"] == 0
        # Another collection is none of this task's business.
        imported(store, "other", texts)


@pytest.mark.parametrize(
    ("collection", "policy", "owned", "warning"),
    [
        ("numbers", ("opened",), "mail", ""),
        ("letters", ("*",), "letters", ""),
        ("letters", ("*",), "mail", "may use collection letters: opened uses numbers"),
        ("numbers", ("other",), "mail", "numbers: its policy allows none of opened"),
    ],
)
def test_examples_that_no_task_uses_are_imported_with_a_warning(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    collection: str,
    policy: tuple[str, ...],
    owned: str,
    warning: str,
) -> None:
    (tmp_path / "lines.txt").write_text("1\n2\n")
    owner = OwnerPolicy(key="0" * 64, collections=(owned,))
    bundles = BundleStore(tmp_path / "bundles", {"owner": owner})
    with ExampleStore(tmp_path / "device.db", {collection: UsePolicy(tasks=policy)}) as store:
        imported(store, collection, tmp_path / "lines.txt", bundles)
    bundles.close()
    shown = capsys.readouterr().err
    assert "imported 2 new examples" in shown
    assert ("warning: no task of this device" in shown, warning in shown) == (bool(warning), True)


def test_the_progress_of_a_long_training_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Printer("text").on_event(StepsTrained("phone", 0.0, "next-word", 1200, 5000))
    assert capsys.readouterr().err == "phone: next-word: 1,200 of 5,000 steps\n"


def test_lines_are_examples_and_folders_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/2.txt").write_text("three\n")
    (tmp_path / "a.txt").write_text("one\n\n  \ntwo\n")
    (tmp_path / "b/module.pyc").write_bytes(b"a\0b")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("hidden\n")
    files = files_in(tmp_path)
    assert [file.name for file in files] == ["a.txt", "2.txt"]
    trainer = ProtocolTrainer(lambda session, length: b"", lambda: 0.0)
    found = asyncio.run(examples_of(files, [], trainer))
    assert found == [[b"one", b"two"], [b"three"]]
    (tmp_path / "empty").mkdir()
    with pytest.raises(OperatorError, match="no texts"):
        files_in(tmp_path / "empty")


def test_a_refused_or_ineligible_device_is_told_once_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printer = Printer("text")
    for _ in range(2):
        printer.on_event(VisitEnded("phone", 0.0, "refused", "the token is not valid", None, ""))
        printer.on_event(NotEligible("phone", 0.0, ("not idle",)))
    err = capsys.readouterr().err
    assert err.count("--token-file") == 1
    assert err.count("--assume idle,charging,unmetered") == 1


def test_a_revoked_device_is_sent_to_the_operator(capsys: pytest.CaptureFixture[str]) -> None:
    Printer("text").on_event(VisitEnded("phone", 0.0, "refused", REVOKED.reason, None, ""))
    told = capsys.readouterr().err
    assert f"hint: {REVOKED.hint}\n" in told
    assert "--token-file" not in told


def test_a_refusal_by_another_listener_of_the_server_is_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Such as its admin API, which has no path for devices."""
    reason = str(Routes([]).missing("/"))
    Printer("text").on_event(VisitEnded("phone", 0.0, "refused", reason, None, ""))
    told = capsys.readouterr().err
    assert "devices use port 8750 by default" in told
    assert "--token-file" not in told


def test_why_direct_uploads_fail_is_told_once_for_each_reason_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printer = Printer("text")
    for number, reason in enumerate(("unanswered", "unanswered", "not_allowed")):
        where, hint = f"https://\x1baggregator-{number}", "check the firewall"
        printer.on_event(UploadRerouted("process", 0.0, where, reason, f"it is {reason}", hint))
    printer.summarize()
    *told, _, summary = capsys.readouterr().err.splitlines()
    assert told == [
        r"no direct upload to https://\x1baggregator-0: it is unanswered; using the selectors",
        "hint: check the firewall",
        r"no direct upload to https://\x1baggregator-2: it is not_allowed; using the selectors",
    ]
    assert summary == "3 direct uploads went on through a selector: 2 unanswered, 1 not allowed"


def test_the_end_of_a_visit_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer("text")
    for ending, reason, task, detail in (
        ("counted", "", "next-word", ""),
        ("rejected", "no compatible task needs clients now", None, ""),
        ("aborted", "task_over", "next-word-eval-60", ""),
        ("aborted", "round_over", "next-word", ""),
        ("aborted", "stale", "next-word", ""),
        ("failed", "out_of_memory", "next-word", "memory: it took 2 GB"),
        ("stopped", "stopped", "next-word", "the device was told to stop"),
    ):
        printer.on_event(VisitEnded("phone", 0.0, cast(Ending, ending), reason, task, detail))
    memory = "training exceeded the device's memory limit"
    assert capsys.readouterr().out.splitlines() == [
        "phone counted next-word",
        "phone rejected (no compatible task needs clients now)",
        "phone not_needed next-word-eval-60 (the task ended)",
        "phone not_needed next-word (the round ended before the update was sent)",
        "phone aborted next-word (trained from a version that is too old)",
        f"phone failed next-word ({memory}; memory: it took 2 GB)",
        "phone stopped next-word (the device was told to stop)",
    ]
    printer.summarize()
    told = capsys.readouterr().err
    assert "7 visits: " in told
    assert "2 not_needed" in told


@pytest.mark.parametrize("explains", [True, False])
def test_the_full_text_of_a_failure_is_printed_on_request(
    capsys: pytest.CaptureFixture[str], explains: bool
) -> None:
    failed = VisitEnded(
        "phone", 0.0, "failed", "training_failed", "t", "refused: KeyError", "Traceback\n  line 3"
    )
    Printer("text", explains=explains).on_event(failed)
    out = capsys.readouterr().out
    assert "the code of the task failed; refused: KeyError" in out
    assert ("Traceback\n  line 3\n" in out) is explains
    Printer("json", explains=explains).on_event(failed)
    printed = msgspec.json.decode(capsys.readouterr().out)
    assert printed["explanation"] == ("Traceback\n  line 3" if explains else "")


def test_policies_are_declared_anew(tmp_path: Path) -> None:
    """How an owner allows one more task to use a collection, or takes a permission back."""
    store, policies = tmp_path / "device.db", tmp_path / "policies.toml"
    arguments = ["--visits", "1", "--store", str(store), "--policies", str(policies)]
    for tasks in (["next-word"], ["next-word", "renamed"], []):
        policies.write_text(f"[collections.text]\ntasks = {tasks}\n")
        with a_server() as fake:
            assert run("--server", fake.url, *WAITING, *arguments) == 0
        with ExampleStore(store) as found:
            assert found.collections["text"].tasks == tuple(tasks)


def test_the_authority_of_the_command_line_is_also_that_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is often on the same host as the selectors, behind the same private authority."""
    given: list[Path | None] = []

    def trust_in(
        path: Path | None, store: Path, now: object, certificates: Path | None = None
    ) -> None:
        given.append(certificates)
        raise OperatorError("far enough", hint="it was only asked for its arguments")

    monkeypatch.setattr(setup, "trust_in", trust_in)
    authority = tmp_path / "ca.pem"
    with pytest.raises(OperatorError, match="far enough"):
        run("--store", str(tmp_path / "d.db"), "--ca", str(authority), *WAITING)
    assert given == [authority]


def test_a_policy_is_used_with_the_authority_that_was_given(tmp_path: Path) -> None:
    policy = tmp_path / "trust.toml"
    policy.write_text(f"log_key = '{a_policy().log_key}'\nlog_url = 'https://127.0.0.1:1'\n")
    store = tmp_path / "d.db"
    assert setup.trust_in(policy, store, lambda: 0.0) is not None
    (tmp_path / "ca.pem").write_text("not PEM")
    with pytest.raises(OperatorError, match=r"ca\.pem"):
        setup.trust_in(policy, store, lambda: 0.0, tmp_path / "ca.pem")
