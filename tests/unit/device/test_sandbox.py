"""Jobs in child processes: whatever a job does, the host and the fork-server live on."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import pytest

from papaya.device import sandbox as sandbox_module
from papaya.device.executor import Job, JobFailed, JobResult
from papaya.device.sandbox import Sandbox, _ForkServer
from papaya.errors import OperatorError
from papaya.learning.client_training import unwatched
from papaya.learning.definition import Examples
from papaya.learning.evaluation import EVALUATION_LENGTH, summarize
from papaya.learning.parameters import encode

T = TypeVar("T")
# Jobs have a low priority: on a busy machine they wait long for a processor.
PATIENCE_S = 900.0

# A model of one number that moves by the sum of its examples, and examples that misbehave.
SOURCE = """
import os, signal, time
import torch
from papaya.learning.task import ClientSGD, Examples, Task

class Number(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(2))

def misbehave(example):
    what, _, where = example.partition(" ")
    if what in ("hang", "family"):  # and hold a pipe open, alone or with a child
        if what == "family":
            os.fork()
        pipe = open(where, "wb", buffering=0)
        pipe.write(b"x")
        while True:
            time.sleep(60)
    if what == "raise":
        raise ValueError("the owner's own mistake")
    if what == "exit":
        os._exit(3)
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "python-memory":
        bytearray(1 << 31)
    if what == "torch-memory":
        torch.zeros(1 << 29)
    if what == "spin":
        while True:
            pass
    if what == "flood":
        for number in range(3, 256):
            try:
                while True:
                    os.write(number, b"\\xff" * 65536)
            except OSError:
                pass
    if what == "reports":
        from papaya.device.frames import StepsDone, frame
        for number in range(3, 256):
            try:
                while True:
                    os.write(number, frame(StepsDone(1, 2)))
            except OSError:
                pass
    if what == "long-problem":
        from papaya.device.frames import JobProblem, frame
        for number in range(3, 256):
            try:
                os.write(number, frame(JobProblem("unavailable", "r" * 20_000, "t" * 20_000)))
            except OSError:
                pass
        time.sleep(60)
    if what == "garbage":
        for number in range(3, 256):
            try:
                os.write(number, (1).to_bytes(8, "little") + b"\\xc1")
            except OSError:
                pass
        time.sleep(60)
    if what == "write":
        with open(where, "wb") as file:
            file.write(b"x")
    if what == "descriptors":
        raise ValueError(str([fd for fd in range(256) if os.path.exists(f"/proc/self/fd/{fd}")]))
    if what == "environment":
        raise ValueError(str(sorted(name for name in os.environ if "PAPAYA" in name)))
    if what == "threads":
        raise ValueError(str((torch.get_num_threads(), len(os.listdir("/proc/self/task")))))
    return 1.0

def batch(examples):
    return (torch.tensor([misbehave(example.decode()) for example in examples]),)

task = Task(
    name="number", model=Number, batch=batch,
    loss=lambda module, ones: (module.value.sum() * ones).mean(),
    examples=Examples("numbers", limit=9), client=ClientSGD(rate=1.0, max_examples=5),
    concurrency=10,
)
"""


class Bench:
    """A sandbox, the loop that it lives in, and its one task file."""

    def __init__(self, runner: asyncio.Runner, folder: Path, **settings: Any) -> None:
        self.runner = runner
        self.file = folder / "number.py"
        self.file.write_text(SOURCE)
        self.sandbox = Sandbox([self.file], memory_mb=256, confined=False, **settings)

    def job(self, *examples: str, kind: Literal["train", "evaluate"] = "train") -> Job:
        parameters = encode(np.array([1, 2], np.float32), {})
        return Job(kind, str(self.file), parameters, tuple(e.encode() for e in examples), volume=3)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def run(self, *examples: str, timeout_s: float = PATIENCE_S) -> JobResult:
        return self.do(self.sandbox.run(self.job(*examples), timeout_s))

    def failure(self, *examples: str, timeout_s: float = PATIENCE_S) -> JobFailed:
        with pytest.raises(JobFailed) as raised:
            self.run(*examples, timeout_s=timeout_s)
        return raised.value

    @property
    def server_pid(self) -> int:
        assert self.sandbox._own._server is not None
        return self.sandbox._own._server._process.pid


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAPAYA_TOKEN", "secret")
        found = Bench(runner, tmp_path_factory.mktemp("sandbox"), max_parallel=2)
        runner.run(found.sandbox.start())
        yield found
        assert found.run("ok").examples == 1, "the sandbox has survived everything"
        runner.run(found.sandbox.close())


@pytest.fixture(autouse=True)
def the_fork_server_survives(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test that uses the shared sandbox leaves it with the fork-server that it had."""
    bench = request.getfixturevalue("bench") if "bench" in request.fixturenames else None
    before = bench.server_pid if bench else 0
    yield
    if bench:
        assert bench.run("ok").update == np.array([-1, -1], np.float32).tobytes()
        assert bench.server_pid == before


def test_the_host_learns_what_its_task_files_are_without_torch(bench: Bench) -> None:
    (found,) = bench.sandbox.tasks
    assert (found.task, found.model_length, found.max_examples) == ("number", 2, 5)
    assert found.examples == Examples("numbers", limit=9)
    assert found.module_hash.startswith("sha256:")


def test_a_job_trains_from_the_parameters_as_they_were_downloaded(bench: Bench) -> None:
    result = bench.run("a", "b", "c", "d", "e", "f", "g")
    assert result == JobResult(np.array([-1, -1], np.float32).tobytes(), 5)


def test_a_job_returns_what_the_device_keeps_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "personal.py"
    file.write_text(
        "import torch\n"
        "from papaya.learning.task import ClientSGD, Examples, Task\n"
        "import papaya.learning.device_state as kept\n"
        "def loss(module, flood):\n"
        "    if flood:\n"
        "        import papaya.learning.torch.engine as engine\n"
        "        engine.encode_state = lambda *_: bytes(kept.MAX_STATE_BYTES + 1)\n"
        "    return module.weight.sum() + module.bias.sum()\n"
        "task = Task(name='own', model=lambda: torch.nn.Linear(2, 1), loss=loss,\n"
        "    batch=lambda examples: (b'flood' in examples,), personal=['bias'],\n"
        "    examples=Examples('numbers'), client=ClientSGD(rate=1.0), concurrency=1)\n"
    )
    parameters = encode(np.zeros(2, np.float32), {})

    async def scenario() -> None:
        sandbox = Sandbox([file], memory_mb=512, confined=False)
        await sandbox.start()
        try:
            assert [task.terms.keeps_tensors for task in sandbox.tasks] == [True]
            trial = await sandbox.run(Job("try", str(file), b"", ()), PATIENCE_S)
            assert trial == JobResult(b"", 0, keeps_tensors=True)
            state, biases = b"", list[float]()
            for _ in range(3):
                job = Job("train", str(file), parameters, (b"x",), device_state=state)
                state = (await sandbox.run(job, PATIENCE_S)).device_state
                biases += np.frombuffer(state, np.float32, offset=16).tolist()
            assert np.diff(biases).tolist() == [-1.0, -1.0]
            with pytest.raises(JobFailed, match=r"too much to be kept|more data than a result"):
                await sandbox.run(Job("train", str(file), parameters, (b"flood",)), PATIENCE_S)
        finally:
            await sandbox.close()

    asyncio.run(scenario())


def test_a_job_evaluates_with_weight_one(bench: Bench) -> None:
    result = bench.do(bench.sandbox.run(bench.job("a", "b", kind="evaluate"), PATIENCE_S))
    assert (len(result.update), result.examples) == (4 * EVALUATION_LENGTH, 1)
    share = summarize(np.frombuffer(result.update, np.float32)).all
    assert (share.loss, share.examples, share.clients) == (3.0, 2, 1)


def test_jobs_run_side_by_side_and_beyond_the_limit_in_turn(bench: Bench) -> None:
    async def many() -> list[JobResult]:
        runs = (bench.sandbox.run(bench.job("x"), PATIENCE_S) for _ in range(9))
        return await asyncio.gather(*runs)

    assert [result.examples for result in bench.do(many())] == [1] * 9


@pytest.mark.parametrize(
    ("example", "kind", "reason"),
    [
        ("raise", "refused", "ValueError: the owner's own mistake"),
        ("exit", "crashed", "ended with status 3 and without a result"),
        ("crash", "crashed", "was killed by SIGSEGV"),
        ("python-memory", "memory", "MemoryError"),
        ("torch-memory", "memory", "allocate memory"),
        ("flood", "crashed", "wrote"),
        ("reports", "crashed", "reported its progress 10000 times"),
        ("garbage", "crashed", "invalid result"),
        ("descriptors", "refused", r"ValueError: \[0, 1, 2, \d+\]"),
        ("environment", "refused", r"ValueError: \[\]"),
        ("threads", "refused", r"ValueError: \(1, 1\)"),
    ],
)
def test_a_job_that_misbehaves_fails_alone(
    bench: Bench, example: str, kind: str, reason: str
) -> None:
    failure = bench.failure("fine", example)
    assert failure.kind == kind
    assert re.search(reason, failure.reason)


def test_the_host_limits_what_a_job_says_about_its_problem(bench: Bench) -> None:
    failure = bench.failure("long-problem")
    assert failure.kind == "crashed", "that no job can run is not for a job to say"
    assert (failure.reason, failure.traceback) == ("r" * 500, "t" * 8000)


def test_a_job_writes_no_files(bench: Bench, tmp_path: Path) -> None:
    assert "File too large" in bench.failure(f"write {tmp_path / 'file'}").reason


def test_a_job_that_takes_too_long_is_ended(bench: Bench) -> None:
    failure = bench.failure("spin", timeout_s=0.3)
    assert (failure.kind, failure.reason) == ("timeout", "training did not finish within 0.3 s")


def test_a_job_that_uses_too_much_processor_time_is_ended(bench: Bench) -> None:
    assert bench.sandbox._own._server is not None
    [file] = bench.sandbox.tasks
    with pytest.raises(JobFailed, match="CPU time limit"):
        bench.do(bench.sandbox._own._server.run(bench.job("spin"), file, 1, unwatched))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"task_file": "other.py"}, "other.py is not a task file of this device"),
        ({"parameters": b"garbage"}, "not a parameters file"),
        ({"parameters": encode(np.zeros(3, np.float32), {})}, "ProtocolError"),
        ({"examples": ()}, "there are no examples"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(
    bench: Bench, change: dict[str, Any], reason: str
) -> None:
    job = msgspec.structs.replace(bench.job("x"), **change)
    with pytest.raises(JobFailed, match=reason) as raised:
        bench.do(bench.sandbox.run(job, PATIENCE_S))
    assert raised.value.kind == "refused"


class Held:
    """A named pipe that a hanging job and its children hold open while they live."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"pipe-{len(list(folder.iterdir()))}"
        os.mkfifo(self.path)
        self._end = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def wait(self) -> bytes:
        """What the job wrote, once it did; nothing, once all of its processes are gone."""
        assert select.select([self._end], [], [], PATIENCE_S)[0], "nothing happened for minutes"
        return os.read(self._end, 1)

    async def until_running(self, processes: int = 2) -> None:
        for _ in range(processes):
            assert await asyncio.to_thread(self.wait) == b"x"

    def check_gone(self) -> None:
        assert self.wait() == b""
        os.close(self._end)


def test_a_cancelled_job_is_ended_with_all_that_it_started(bench: Bench, tmp_path: Path) -> None:
    held = Held(tmp_path)

    async def cancelled() -> None:
        running = asyncio.create_task(
            bench.sandbox.run(bench.job(f"family {held.path}"), PATIENCE_S)
        )
        await held.until_running()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    bench.do(cancelled())
    held.check_gone()


def test_waiting_for_a_free_place_counts_towards_the_timeout_except_for_a_trial(
    bench: Bench, tmp_path: Path
) -> None:
    both = [Held(tmp_path), Held(tmp_path)]

    async def crowded() -> None:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(bench.sandbox.run(bench.job(f"family {held.path}"), PATIENCE_S))
                for held in both
            ]
            for held in both:
                await held.until_running()
            with pytest.raises(JobFailed, match="no training slot was free"):
                await bench.sandbox.run(bench.job("x"), 0.1)
            trial = asyncio.create_task(
                bench.sandbox.run(Job("try", str(bench.file), b"", ()), timeout_s=0.0)
            )
            with pytest.raises(JobFailed, match="no training slot was free"):
                await bench.sandbox.run(bench.job("x"), 0.1)
            for task in running:
                task.cancel()
            with pytest.raises(JobFailed, match="did not finish within 0 s"):  # it had a slot
                await trial

    bench.do(crowded())
    for held in both:
        held.check_gone()


def test_a_fork_server_that_dies_takes_its_jobs_along_and_is_started_again(tmp_path: Path) -> None:
    held = Held(tmp_path)
    with asyncio.Runner() as runner:
        bench = Bench(runner, tmp_path, restart_interval_s=0.0)
        runner.run(bench.sandbox.start())

        async def killed() -> None:
            running = asyncio.create_task(
                bench.sandbox.run(bench.job(f"hang {held.path}"), PATIENCE_S)
            )
            await held.until_running(processes=1)
            os.kill(bench.server_pid, signal.SIGKILL)
            with pytest.raises(JobFailed, match="was killed by SIGKILL") as raised:
                await running
            assert raised.value.kind == "unavailable"

        runner.run(killed())
        held.check_gone()
        assert bench.run("ok").examples == 1

        bench.file.write_text(SOURCE + "# another file now")
        os.kill(bench.server_pid, signal.SIGKILL)
        failures = [bench.failure("ok"), bench.failure("ok")]
        assert "has changed" in failures[-1].reason
        runner.run(bench.sandbox.close())


def test_a_fork_server_is_started_for_all_jobs_and_not_again_too_often(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        bench = Bench(runner, tmp_path, restart_interval_s=1000.0)
        # The start goes on without the job that asked for it. Otherwise a device that imports its
        # engine slowly would begin again with every job.
        assert bench.failure("ok", timeout_s=0.01).kind == "timeout"
        assert bench.run("ok").examples == 1
        os.kill(bench.server_pid, signal.SIGKILL)
        failures = [bench.failure("ok", timeout_s=0.5), bench.failure("ok", timeout_s=0.5)]
        assert failures[-1].kind == "timeout"
        runner.run(bench.sandbox.close())
        assert bench.failure("ok").reason == "the sandbox is closed"


HOST = """
import asyncio, sys
from pathlib import Path
from papaya.device.executor import Job
from papaya.device.sandbox import Sandbox

async def main():
    sandbox = Sandbox([Path(sys.argv[1])], confined=False)
    await sandbox.start()
    parameters = bytes.fromhex(sys.argv[3])
    examples = (f"family {sys.argv[2]}".encode(),)
    await sandbox.run(Job("train", sys.argv[1], parameters, examples), float(sys.argv[4]))

asyncio.run(main())
"""


def test_nothing_outlives_a_host_that_is_killed(bench: Bench, tmp_path: Path) -> None:
    held = Held(tmp_path)
    parameters = bench.job("x").parameters.hex()
    arguments = [sys.executable, "-c", HOST, str(bench.file), str(held.path), parameters]
    arguments.append(str(PATIENCE_S))
    with subprocess.Popen(arguments) as host:
        bench.do(held.until_running())
        host.kill()
    held.check_gone()


def test_a_job_that_is_cancelled_twice_leaves_no_exception_behind(tmp_path: Path) -> None:
    """As when a device is told to stop. asyncio reports exceptions that nobody retrieved."""
    held = Held(tmp_path)
    with asyncio.Runner() as runner:
        bench = Bench(runner, tmp_path)
        problems: list[str] = []

        async def cancelled() -> None:
            asyncio.get_running_loop().set_exception_handler(
                lambda _, context: problems.append(context["message"])
            )
            running = asyncio.create_task(
                bench.sandbox.run(bench.job(f"hang {held.path}"), PATIENCE_S)
            )
            await held.until_running(processes=1)
            os.kill(bench.server_pid, signal.SIGSTOP)  # it cannot end the job
            for _ in range(2):
                running.cancel()
                await asyncio.wait([running], timeout=0.01)
            assert running.cancelled()
            os.kill(bench.server_pid, signal.SIGKILL)
            await bench.sandbox.close()

        runner.run(cancelled())
        gc.collect()
        assert problems == []
        held.check_gone()


def test_a_closed_sandbox_ends_its_jobs(tmp_path: Path) -> None:
    held = Held(tmp_path)
    with asyncio.Runner() as runner:
        bench = Bench(runner, tmp_path)

        async def closed() -> None:
            running = asyncio.create_task(
                bench.sandbox.run(bench.job(f"family {held.path}"), PATIENCE_S)
            )
            await held.until_running()
            await bench.sandbox.close()
            with pytest.raises(JobFailed, match="the training process ended"):
                await running

        runner.run(closed())
        held.check_gone()


def test_a_fork_server_that_is_not_ready_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may import for a long time before it notices that nobody needs it any more."""
    monkeypatch.setattr(sandbox_module, "_KILL_GRACE_S", 600.0)

    async def closed() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec("sleep", "600")
            async with asyncio.timeout(PATIENCE_S):
                await _ForkServer(process, ours).close()
        assert process.returncode == -signal.SIGKILL

    asyncio.run(closed())


@pytest.mark.parametrize(
    ("source", "complaint"), [("task = (", "bad.py:1: syntax error"), ("x = 1", "no `task`")]
)
def test_a_task_file_that_cannot_be_loaded_is_the_operators_business(
    tmp_path: Path, source: str, complaint: str
) -> None:
    async def start() -> None:
        sandbox = Sandbox([tmp_path / "bad.py"])
        try:
            await sandbox.start()
        finally:
            await sandbox.close()

    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(OperatorError, match=complaint) as raised:
        asyncio.run(start())
    assert raised.value.hint
