"""Trainers: which task file, which examples, and nothing that the device does not know."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from papaya.bundle.errors import BundleError
from papaya.client.work import Finish, Trained
from papaya.device.bundles import Bundle
from papaya.device.events import Event, VisitEnded
from papaya.device.example_store import ExampleStore, UseRefused, split_of
from papaya.device.executor import GivenUp, Job, JobFailed, JobResult, TaskFile
from papaya.device.process import memory_mb
from papaya.device.training import ExecutorTrainer, ProtocolTrainer, TrainingRequest
from papaya.device.trust import Trust
from papaya.device.use_policy import UsePolicy
from papaya.errors import ConfigError, OperatorError
from papaya.learning.client_training import StepDone, unwatched
from papaya.learning.definition import Examples, TaskTerms
from papaya.learning.evaluation import admit_evaluation
from papaya.learning.parameters import FLOAT32
from tests.unit.attestation.builders import a_policy
from tests.unit.bundle.builders import a_manifest
from tests.unit.device.fake_selector import PARAMETERS, UPDATE, device, process, serving

POLICY = UsePolicy(tasks=("next-word",), max_age_s=100.0)
EXAMPLES = [f"example {number}".encode() for number in range(40)]
TRAIN = [example for example in EXAMPLES if split_of(example, POLICY) == "train"]
VALIDATION = [example for example in EXAMPLES if split_of(example, POLICY) == "validation"]


class FakeExecutor:
    def __init__(self, file: TaskFile, failure: JobFailed | None = None) -> None:
        self.tasks: tuple[TaskFile, ...] = (file,)
        self.jobs: list[tuple[Job, float]] = []
        self._failure = failure

    def add_bundle(self, name: str, file: TaskFile) -> None:
        raise NotImplementedError

    def remove_bundle(self, name: str) -> None:
        raise NotImplementedError

    async def run(self, job: Job, timeout_s: float, step_done: StepDone = unwatched) -> JobResult:
        self.jobs.append((job, timeout_s))
        if self._failure is not None:
            raise self._failure
        return JobResult(UPDATE, len(job.examples))


def task_file(task: str = "next-word", examples: Examples | None = None) -> TaskFile:
    asked = examples or Examples("text", newest_first=False)
    return TaskFile(
        "my_task.py", task, "sha256:ab", TaskTerms(False, 3, 1500, 50, None, None), asked
    )


def assignment(evaluates: bool = False, model_length: int = 3) -> TrainingRequest:
    task = "next-word-check" if evaluates else "next-word"
    return TrainingRequest(
        task, "next-word", "s", PARAMETERS, model_length, 3, evaluates, False, 30.0
    )


def trained(executor: FakeExecutor, work: TrainingRequest, now: float = 0.0) -> Trained:
    with ExampleStore(":memory:", {"text": POLICY}) as store:
        store.add("text", EXAMPLES, 0.0)
        trainer = ExecutorTrainer(executor, lambda: now, Random(1))
        return asyncio.run(trainer.train(work, store))


def test_training_reads_the_train_examples_that_the_task_asks_for() -> None:
    executor = FakeExecutor(task_file())
    assert trained(executor, assignment()) == Trained(UPDATE, len(TRAIN))
    [(job, timeout_s)] = executor.jobs
    assert (job.kind, job.task_file, timeout_s) == ("train", "my_task.py", 30.0)
    assert job.parameters == PARAMETERS
    assert job.examples == tuple(TRAIN)
    assert job.volume == len(TRAIN)


def test_an_evaluation_reads_held_out_examples_of_the_task_that_it_evaluates() -> None:
    executor = FakeExecutor(task_file())
    trained(executor, assignment(evaluates=True))
    [(job, _)] = executor.jobs
    assert (job.kind, job.examples) == ("evaluate", tuple(VALIDATION))
    assert job.volume == len(TRAIN)


def test_the_task_files_limit_and_order_hold() -> None:
    executor = FakeExecutor(task_file(examples=Examples("text", 3, newest_first=True)))
    trained(executor, assignment())
    assert executor.jobs[0][0].examples == tuple(TRAIN[:-4:-1])


def test_no_examples_no_training() -> None:
    executor = FakeExecutor(task_file())
    with pytest.raises(OperatorError, match="no train examples"):
        trained(executor, assignment(), now=100.0)
    assert executor.jobs == []


def test_a_task_that_the_owner_does_not_allow_gets_no_example() -> None:
    executor = FakeExecutor(task_file("another"))
    work = TrainingRequest("another", "another", "s", PARAMETERS, 3, 3, False, False, 30.0)
    with pytest.raises(UseRefused):
        trained(executor, work)
    assert executor.jobs == []


def test_a_model_of_another_length_is_not_trained() -> None:
    executor = FakeExecutor(task_file())
    with pytest.raises(GivenUp, match="has 4 parameters"):
        trained(executor, assignment(model_length=4))
    assert executor.jobs == []


def test_a_task_may_go_by_another_name_if_the_device_is_told() -> None:
    executor = FakeExecutor(task_file())
    trainer = ExecutorTrainer(executor, lambda: 0.0, Random(1), {"words-2": "next-word"})
    assert trainer.tasks == ("next-word", "words-2")
    assert not trainer.knows("words-3")
    work = TrainingRequest("words-2", "words-2", "s", PARAMETERS, 3, 3, False, False, 30.0)
    with ExampleStore(":memory:", {"text": POLICY}) as store:
        store.add("text", EXAMPLES, 0.0)
        with pytest.raises(UseRefused):  # the examples' owner has to allow it by that name
            asyncio.run(trainer.train(work, store))
        store.declare({"text": UsePolicy(tasks=("words-*",))})
        assert asyncio.run(trainer.train(work, store)).examples == len(TRAIN)


def test_an_alias_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no task file for 'words'"):
        ExecutorTrainer(FakeExecutor(task_file()), lambda: 0.0, Random(1), {"a": "words"})


def test_a_failed_job_is_the_owners_to_read() -> None:
    executor = FakeExecutor(task_file(), JobFailed("memory", "it took 2 GB"))
    with pytest.raises(OperatorError, match="memory: it took 2 GB"):
        trained(executor, assignment())


def test_a_device_declares_its_files_and_leaves_a_task_that_it_does_not_know() -> None:
    async def scenario() -> None:
        async with serving() as fake, process() as host:
            events: list[Event] = []
            executor = FakeExecutor(task_file("another"))
            trainer = ExecutorTrainer(executor, host.now, Random(1))
            with device(host, fake.url, trainer=trainer, notify=events.append) as phone:
                assert await phone.visit() == Finish("failed", "no_program")
            [ended] = [event for event in events if isinstance(event, VisitEnded)]
            assert "--alias next-word=another" in ended.detail
            assert fake.messages[0].capabilities.modules == ("sha256:ab",)  # type: ignore[attr-defined]
            assert fake.seen == ["check-in", "join", "leave"]

    asyncio.run(scenario())


class BundleExecutor(FakeExecutor):
    """Remembers which revisions were trained. The trial of one of them does not end by itself."""

    def __init__(self, slow: bytes) -> None:
        super().__init__(task_file())
        self.bundled: dict[str, TaskFile] = {}
        self.trained: list[bytes] = []
        self.problem: JobFailed | None = None
        self.trying, self.go_on = asyncio.Event(), asyncio.Event()
        self._slow = slow

    def add_bundle(self, name: str, file: TaskFile) -> None:
        self.bundled[name] = file

    def remove_bundle(self, name: str) -> None:
        del self.bundled[name]

    async def run(self, job: Job, timeout_s: float, step_done: StepDone = unwatched) -> JobResult:
        manifest = self.bundled[job.task_file].manifest
        if job.kind == "train":
            self.trained.append(manifest)
        elif manifest == self._slow:
            self.trying.set()
            await self.go_on.wait()
            if self.problem is not None:
                raise self.problem
        return JobResult(UPDATE, 1)


def revision(number: int) -> Bundle:
    manifest = a_manifest(revision=number, examples=Examples("text"), layout=(("w", (3,)),))
    return Bundle(manifest, math.inf, Path("program"))


@pytest.mark.parametrize("ending", ["accepted", "cancelled", "refused"])
def test_a_revision_is_trained_only_after_its_trial(ending: str) -> None:
    """Another visit has joined under the revision before it, and reports that one."""

    async def scenario() -> None:
        old, new = revision(3), revision(4)
        executor = BundleExecutor(slow=new.manifest.encode())
        trainer = ExecutorTrainer(executor, lambda: 0.0, Random(1), engine_version="9")
        work = structs.replace(assignment(), task=old.run, program=old.run)
        await trainer.add_bundle(old)
        trial = asyncio.create_task(trainer.add_bundle(new))
        await executor.trying.wait()
        with ExampleStore(":memory:", {"text": UsePolicy(tasks=("*",))}) as store:
            store.add("text", EXAMPLES, 0.0)
            await trainer.train(work, store)
            if ending == "cancelled":
                trial.cancel()
            elif ending == "refused":
                executor.problem = JobFailed("crashed", "it cannot be loaded")
            executor.go_on.set()
            [outcome] = await asyncio.gather(trial, return_exceptions=True)
            assert (outcome is None) == (ending == "accepted")
            await trainer.train(work, store)
        last = new if ending == "accepted" else old
        assert executor.trained == [old.manifest.encode(), last.manifest.encode()]
        assert len(executor.bundled) == 1, "nothing keeps the other revision"

    asyncio.run(scenario())


def test_the_trial_finds_out_whether_a_bundle_keeps_tensors() -> None:
    """Its manifest does not say so, and a device may have to decline it before training."""

    class KeepingExecutor(BundleExecutor):
        async def run(
            self, job: Job, timeout_s: float, step_done: StepDone = unwatched
        ) -> JobResult:
            await super().run(job, timeout_s, step_done)
            return JobResult(b"", 0, keeps_tensors=True)

    async def scenario() -> None:
        bundle = revision(3)
        executor = KeepingExecutor(slow=b"")
        trainer = ExecutorTrainer(executor, lambda: 0.0, Random(1), engine_version="9")
        await trainer.add_bundle(bundle)
        accepted = trainer.terms(bundle.run)
        assert accepted == structs.replace(bundle.terms, keeps_tensors=True)
        # The lease was renewed, and now the program cannot be loaded.
        executor._slow, executor.problem = bundle.manifest.encode(), JobFailed("crashed", "no room")
        executor.go_on.set()
        with pytest.raises(BundleError, match="no room"):
            await trainer.add_bundle(bundle)
        assert len(executor.bundled) == 1, "the accepted program is still there"

    asyncio.run(scenario())


def test_a_bundle_is_not_to_blame_if_no_job_can_run() -> None:
    async def scenario() -> None:
        bundle = revision(3)
        executor = BundleExecutor(slow=bundle.manifest.encode())
        executor.problem = JobFailed("unavailable", "the training process ended")
        executor.go_on.set()
        trainer = ExecutorTrainer(executor, lambda: 0.0, Random(1), engine_version="9")
        with pytest.raises(GivenUp, match="digits: the training process ended"):
            await trainer.add_bundle(bundle)
        assert not trainer.knows(bundle.run)

    asyncio.run(scenario())


def test_a_revision_that_is_replaced_while_its_examples_are_read_is_not_trained() -> None:
    async def scenario() -> None:
        old, new = revision(3), revision(4)
        executor = BundleExecutor(slow=b"")
        trainer = ExecutorTrainer(executor, lambda: 0.0, Random(1), engine_version="9")
        loop = asyncio.get_running_loop()

        class SlowStore(ExampleStore):
            def query(self, *asked: Any) -> list[bytes]:
                asyncio.run_coroutine_threadsafe(trainer.add_bundle(new), loop).result()
                return super().query(*asked)

        await trainer.add_bundle(old)
        with SlowStore(":memory:", {"text": UsePolicy(tasks=("*",))}) as store:
            store.add("text", EXAMPLES, 0.0)
            with pytest.raises(GivenUp, match="replaced this revision") as given_up:
                await trainer.train(
                    structs.replace(assignment(), task=old.run, program=old.run), store
                )
        assert (given_up.value.code, executor.trained) == ("mismatch", [])

    asyncio.run(scenario())


def test_examples_are_measured_once_each_to_check_them_in_lots() -> None:
    """Measuring a lot again for each example takes minutes for a large import."""
    measured: list[bytes] = []

    class Example(bytes):
        def __len__(self) -> int:
            measured.append(self)
            return super().__len__()

    class Fitting(FakeExecutor):
        async def run(self, job: Job, *_: object) -> JobResult:
            return JobResult(b"", len(job.examples))

    trainer = ExecutorTrainer(Fitting(task_file()), lambda: 0.0, Random(1))
    examples = [Example(example) for example in EXAMPLES]
    assert asyncio.run(trainer.first_unfit("text", examples)) is None
    assert len(measured) == len(EXAMPLES)


@pytest.mark.parametrize("trusts", [False, True])
def test_a_check_in_says_whether_the_device_has_a_trust_policy(
    trusts: bool, tmp_path: Path
) -> None:
    """Otherwise the coordinator would assign it a task that it has to leave."""

    async def scenario() -> None:
        trust = (
            Trust(a_policy(log_url="http://127.0.0.1:1"), tmp_path / "checkpoint", lambda: 0.0)
            if trusts
            else None
        )
        async with serving() as fake, process(trust=trust) as host:
            with device(host, fake.url) as phone:
                await phone.visit()
            declared = fake.messages[0].capabilities  # type: ignore[attr-defined]
            assert declared.trust_policy is trusts

    asyncio.run(scenario())


def test_a_protocol_trainer_uploads_what_names_the_session() -> None:
    trainer = ProtocolTrainer(
        lambda session, length: session.encode() * length, lambda: 0.0, lambda: 9
    )
    with ExampleStore(":memory:") as store:
        assert asyncio.run(trainer.train(assignment(), store)) == Trained(b"sss", 9)
        evaluated = asyncio.run(trainer.train(assignment(evaluates=True), store))
    admit_evaluation([np.frombuffer(evaluated.update, FLOAT32)], max_examples=1)


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [
        ("MemTotal:       24682416 kB\nMemFree: 1 kB\n", 16384),
        ("MemFree: 1 kB\nMemTotal:  1048576 kB\n", 1024),
        ("MemTotal: 12 kB\n", 0),
        ("MemTotal: much\n", 0),
        ("", 0),
    ],
)
def test_memory_is_declared_coarsely(tmp_path: Path, text: str, megabytes: int) -> None:
    assert memory_mb(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(text)
    assert memory_mb(tmp_path) == megabytes
