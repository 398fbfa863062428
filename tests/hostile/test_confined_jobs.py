"""Code of a task that attacks the device it trains on: the kernel refuses all of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec import structs

from papaya.bundle import archive
from papaya.bundle.errors import BundleError
from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import BlobRef
from papaya.device import confinement
from papaya.device.bundles import Bundle, BundleStore
from papaya.device.executor import Job, JobFailed, JobResult, TaskFile
from papaya.device.owners import OwnerPolicy
from papaya.device.sandbox import Sandbox
from papaya.device.training import ExecutorTrainer
from papaya.errors import OperatorError
from papaya.learning.client_training import StepDone, unwatched
from papaya.learning.definition import ClientSGD
from papaya.learning.parameters import encode
from tests.unit.bundle.builders import KEY, NOW, a_lease, a_manifest, public

pytestmark = pytest.mark.skipif(
    confinement.missing() is not None, reason=f"cannot confine: {confinement.missing()}"
)

# A task whose examples are Python expressions. The result of one is in the error.
SOURCE = """
import ctypes, mmap, os, signal, socket, subprocess, sys, threading, time
import torch
from papaya.learning.task import ClientSGD, Examples, Task

libc = ctypes.CDLL(None, use_errno=True)

def call(*arguments):
    if libc.syscall(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return "done"

def own_memory(marker):
    "How often it holds these bytes; the marker comes reversed, so that it is not its own finding."
    found, marker = 0, marker[::-1].encode()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps.read().splitlines():
            span, rights, *_ = line.split()
            low, high = (int(place, 16) for place in span.split("-"))
            if not rights.startswith("rw"):
                continue
            try:
                memory.seek(low)
                found += memory.read(high - low).count(marker)
            except (OSError, ValueError):
                pass
    return found - 1  # this function's own copy

class Number(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(2))

def batch(examples):
    for example in examples:
        if example != b"train":
            raise ValueError(f"result: {eval(example)}")
    return (torch.ones(len(examples)),)

task = Task(
    name="number", model=Number, batch=batch,
    loss=lambda module, ones: (module.value.sum() * ones).mean(),
    examples=Examples("numbers"), client=ClientSGD(rate=1.0), concurrency=10,
)
"""


class Attacker:
    def __init__(self, runner: asyncio.Runner, folder: Path, *, confined: bool = True) -> None:
        self._runner = runner
        self.file = folder / "attack.py"
        self.file.write_text(SOURCE)
        self.sandbox = Sandbox([self.file], confined=confined)
        runner.run(self.sandbox.start())

    def train(self, *examples: str) -> bytes:
        parameters = encode(np.zeros(2, np.float32), {})
        job = Job("train", str(self.file), parameters, tuple(e.encode() for e in examples))
        return self._runner.run(self.sandbox.run(job, 300.0)).update

    def result(self, expression: str) -> str:
        with pytest.raises(JobFailed) as raised:
            self.train(expression)
        return raised.value.reason

    def close(self) -> None:
        self._runner.run(self.sandbox.close())


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacker]:
    with asyncio.Runner() as runner:
        found = Attacker(runner, tmp_path_factory.mktemp("attack"))
        assert found.sandbox.unconfined == ""
        yield found
        assert found.train("train") == np.array([-1, -1], np.float32).tobytes()
        found.close()


def test_a_confined_job_trains(attacker: Attacker) -> None:
    assert attacker.train("train") == np.array([-1, -1], np.float32).tobytes()
    assert "result: 3" in attacker.result("1 + 2")


@pytest.mark.parametrize(
    "expression",
    [
        # the network, and other processes over sockets
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socketpair()",
        # files of the user
        "open('/etc/passwd').read()",
        "os.listdir('/')",
        "os.listdir(os.path.expanduser('~'))",
        "open('/proc/self/environ').read()",
        "open('/proc/self/mem', 'rb')",
        "os.listdir('/proc')",
        # changes to the disk
        "open('/tmp/papaya-escape', 'w')",
        "open(__file__, 'a')",
        "open('/dev/null', 'w')",
        "os.mkdir('/tmp/papaya-escape')",
        "os.unlink(__file__)",
        "os.rename(__file__, __file__ + '2')",
        "os.symlink('/etc', '/tmp/papaya-escape')",
        "os.chmod(__file__, 0o777)",
        "os.truncate(__file__, 0)",
        # processes and programs
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "subprocess.run(['true'])",
        "os.kill(os.getppid(), 0)",
        "os.kill(1, 9)",
        "os.pidfd_open(os.getppid())",
        "os.setpriority(os.PRIO_PROCESS, 0, 19)",
    ],
)
def test_an_attempt_to_leave_fails(attacker: Attacker, expression: str) -> None:
    reason = attacker.result(expression)
    assert "Operation not permitted" in reason or "Permission denied" in reason


def test_a_thread_bomb_is_refused_at_its_first_thread(attacker: Attacker) -> None:
    """Neither the filter nor a limit for the user could count the threads of one job."""
    bomb = "[threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(100000)]"
    assert "can't start new thread" in attacker.result(bomb)
    assert "result: 1" in attacker.result("threading.active_count()")


def test_a_fork_bomb_is_refused_at_its_first_process(attacker: Attacker) -> None:
    bomb = "[os.fork() for _ in range(100000)]"
    assert "Operation not permitted" in attacker.result(bomb)


@pytest.mark.parametrize("limit", ["CPU", "FSIZE", "AS"])
def test_a_job_cannot_change_its_limits(attacker: Attacker, limit: str) -> None:
    resource = "__import__('resource')"
    change = f"{resource}.setrlimit({resource}.RLIMIT_{limit}, (10**6, 10**6))"
    assert "not allowed to raise maximum limit" in attacker.result(change)


@pytest.mark.parametrize(
    "number",
    [
        101,  # ptrace
        *(155, 161, 165, 166, 272, 308),  # pivot_root, chroot, mount, umount, unshare, setns
        *(175, 246, 248, 250, 298, 321),  # modules, kexec, keys, perf, bpf
        *(303, 304, 310, 311, 312),  # file handles, memory of others, kcmp
        *(319, 322, 323, 425, 428, 434, 442),  # memfd, execveat, userfaultfd, io_uring, mounts
        *(57, 58, 59, 62, 129, 200, 297, 424),  # fork, vfork, execve, signals
        0x40000000 | 41,  # socket by the numbers of x32
    ],
)
def test_a_dangerous_system_call_is_refused(attacker: Attacker, number: int) -> None:
    assert "Operation not permitted" in attacker.result(f"call({number}, 0, 0, 0, 0, 0, 0)")


def test_new_processes_are_refused_however_they_are_asked_for(attacker: Attacker) -> None:
    thread = "0x10f00"  # memory, files and signal handlers are shared
    for attempt in ("56, signal.SIGCHLD", f"56, {thread}", "435, 0"):
        assert "Operation not permitted" in attacker.result(f"call({attempt}, 0, 0, 0, 0)")


def test_a_pipe_cannot_be_made_to_signal_another_process(attacker: Attacker) -> None:
    """With F_SETOWN and F_SETSIG, a write would send SIGKILL to any process of the user."""
    for command in (8, 10, 15):  # F_SETOWN, F_SETSIG, F_SETOWN_EX
        change = f"__import__('fcntl').fcntl(os.pipe()[0], {command}, {os.getpid()})"
        assert "Operation not permitted" in attacker.result(change)
    assert "result:" in attacker.result("__import__('fcntl').fcntl(os.pipe()[0], 3)")


def test_a_listening_device_hears_nothing(attacker: Attacker) -> None:
    """The attempt is made against an open port, so that only the confinement stands in its way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "not permitted" in attacker.result(
            f"socket.create_connection(('127.0.0.1', {port}))"
        )
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_examples_of_another_task_cannot_be_read(attacker: Attacker, tmp_path: Path) -> None:
    store = tmp_path / "device.db"
    store.write_bytes(b"examples")
    assert "Permission denied" in attacker.result(f"open({str(store)!r}, 'rb').read()")
    # The attempt would succeed without the confinement.
    with asyncio.Runner() as runner:
        free = Attacker(runner, tmp_path, confined=False)
        assert free.sandbox.unconfined != ""
        assert "examples" in free.result(f"open({str(store)!r}, 'rb').read()")
        free.close()


def test_a_job_finds_nothing_of_earlier_jobs_in_its_memory(tmp_path: Path) -> None:
    """The fork-server is the parent of all jobs: what it had in memory, each of them would have."""
    marker = "".join(f"{number:02x}" for number in os.urandom(16))
    with asyncio.Runner() as runner:
        free = Attacker(runner, tmp_path, confined=False)  # so that it can read its memory
        assert f"result: {marker}" in free.result(f"{marker!r}")
        assert "result: 0" in free.result(f"own_memory({marker[::-1]!r})")
        assert "result: 0" not in free.result(f"(own_memory({marker[::-1]!r}), {marker!r})")
        free.close()


# -- bundles ------------------------------------------------------------------------------------


def bundle_at(folder: Path, source: str) -> tuple[str, TaskFile]:
    """The program of a bundle as a device has unpacked it, and its run."""
    folder.mkdir()
    (folder / "task.py").write_text(source)
    (folder / "helper.py").write_text("answer = 42\n")
    manifest = a_manifest(layout=(("value", (2,)),), clip=None)
    path, terms = str(folder / "task.py"), Bundle(manifest, 0.0, folder).terms
    return folder.name, TaskFile(
        path, manifest.task, "", terms, manifest.examples, manifest.encode()
    )


def memory_of(pid: int) -> bytes:
    """Everything in the writable memory of a process."""
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            low, high = (int(place, 16) for place in span.split("-"))
            if rights.startswith("rw"):
                memory.seek(low)
                with contextlib.suppress(OSError, ValueError):  # a region of the kernel
                    found.append(memory.read(high - low))
    return b"".join(found)


def test_a_bundle_shares_no_memory_with_task_files_or_other_owners(tmp_path: Path) -> None:
    """A job inherits what its fork-server has in memory."""
    folder, marker = tmp_path / "one", f"marker-{os.urandom(8).hex()}"
    task_file = tmp_path / "own.py"
    task_file.write_text("import colorsys\n" + SOURCE)
    one, file = bundle_at(folder, f"import wave\nMARKER = {marker!r}\n" + SOURCE)
    named = structs.replace(a_manifest(layout=(("value", (2,)),)), task=marker)
    other, second = bundle_at(tmp_path / "other", SOURCE)
    sandbox = Sandbox([task_file])
    imported = b"[name for name in ('colorsys', 'wave') if name in sys.modules]"
    parameters = encode(np.zeros(2, np.float32), {})

    async def result(name: str, example: bytes) -> str:
        with pytest.raises(JobFailed) as raised:
            await sandbox.run(Job("train", name, parameters, (example,)), 300.0)
        return raised.value.reason

    async def attack() -> None:
        await sandbox.start()
        sandbox.add_bundle(one, structs.replace(file, manifest=named.encode()))
        sandbox.add_bundle(other, second)
        try:
            assert f"result: {marker}" in await result(one, f"MARKER or {marker!r}".encode())
            assert "result: ['wave']" in await result(one, imported)
            assert "result: []" in await result(other, imported)
            assert "result: ['colorsys']" in await result(str(task_file), imported)
            parent = (await result(other, b"os.getppid()")).rpartition(" ")[2]
            assert marker.encode() not in memory_of(int(parent))
            assert b"papaya.learning.torch.engine" in memory_of(int(parent))
        finally:
            await sandbox.close()

    asyncio.run(attack())


def test_a_long_job_of_a_bundle_reports_its_progress(tmp_path: Path) -> None:
    run, file = bundle_at(tmp_path / "run", SOURCE)
    manifest = a_manifest(layout=(("value", (2,)),), clip=None)
    single = structs.replace(manifest, client=ClientSGD(rate=0.1, batch_size=1, epochs=2))
    sandbox = Sandbox([], report_interval_s=0.0)
    sandbox.add_bundle(run, structs.replace(file, manifest=single.encode()))
    steps: list[tuple[int, int]] = []
    trained(sandbox, run, b"train", b"train", step_done=lambda *step: steps.append(step))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_policy_for_an_owner_limits_the_memory_of_its_jobs(tmp_path: Path) -> None:
    """The code takes 300 MB when it is loaded; the device's own limit is 1024."""
    packed = archive.pack({"task.py": f"{SOURCE}\nbytearray(300 << 20)\n".encode()})
    program = BlobRef(archive.digest(packed), len(packed))
    manifest = a_manifest(layout=(("value", (2,)),), clip=None, program=program)
    head = BundleHead(manifest.sign(KEY), a_lease(manifest), "program").encode()

    class Source:
        async def blob(self, key: str, limit: int) -> bytes:
            return head

        async def file(self, key: str, limit: int, path: Path) -> None:
            path.write_bytes(packed)

    async def accept(limit_mb: int | None) -> None:
        policy = OwnerPolicy(
            key=public(KEY).hex(),
            collections=("*",),
            engines=("torch",),
            max_memory_mb=limit_mb,
        )
        store = BundleStore(tmp_path / str(limit_mb), {policy.pin.owner: policy})
        version = sandbox.engine_version
        trainer = ExecutorTrainer(sandbox, lambda: NOW, Random(1), None, "torch", version)
        key = f"{Bundle(manifest, 0.0, Path()).run}/0/bundle-3-{'0' * 32}"
        try:
            await store.fetch(key, Source(), trainer.add_bundle, NOW)
        finally:
            store.close()

    async def scenario() -> None:
        await sandbox.start()
        try:
            await accept(None)
            await accept(700)
            with pytest.raises(BundleError, match="MemoryError"):
                await accept(150)
        finally:
            await sandbox.close()

    sandbox = Sandbox([])
    asyncio.run(scenario())


def trained(
    sandbox: Sandbox, run: str, *examples: bytes, step_done: StepDone = unwatched
) -> JobResult:
    async def train() -> JobResult:
        await sandbox.start()
        try:
            parameters = encode(np.zeros(2, np.float32), {})
            return await sandbox.run(Job("train", run, parameters, examples), 300.0, step_done)
        finally:
            await sandbox.close()

    return asyncio.run(train())


def test_the_code_of_a_bundle_is_first_read_in_the_confined_job(tmp_path: Path) -> None:
    """The attack is at the top level, which runs when the file is loaded."""
    attempt = (
        "try:\n    import socket\n    socket.socket()\n    at_import = 'open'\n"
        "except OSError:\n    at_import = 'refused'\n"
        "from helper import answer\n"
    )
    run, file = bundle_at(tmp_path / "run", attempt + SOURCE)
    sandbox = Sandbox([])
    sandbox.add_bundle(run, file)
    with pytest.raises(JobFailed, match=re.escape("result: ('refused', 42)")):
        trained(sandbox, run, b"(at_import, answer)")


def test_the_manifest_replaces_the_settings_in_the_file(tmp_path: Path) -> None:
    """A new rate reaches devices as a new manifest, with the same program."""
    run, file = bundle_at(tmp_path / "run", SOURCE)
    sandbox = Sandbox([])
    sandbox.add_bundle(run, file)
    # The file says rate=1.0, the manifest 0.1.
    assert trained(sandbox, run, b"train").update == np.array([-0.1, -0.1], np.float32).tobytes()


def test_the_program_of_one_owner_cannot_read_that_of_another(tmp_path: Path) -> None:
    one, file = bundle_at(tmp_path / "one", SOURCE)
    _, other = bundle_at(tmp_path / "other", SOURCE)
    sandbox = Sandbox([])
    sandbox.add_bundle(one, file)
    with pytest.raises(JobFailed, match="Permission denied"):
        trained(sandbox, one, f"open({other.path!r}).read()".encode())


def test_a_program_with_another_model_than_the_signed_one_is_refused(tmp_path: Path) -> None:
    run, file = bundle_at(tmp_path / "run", SOURCE.replace("torch.zeros(2)", "torch.zeros(3)"))
    sandbox = Sandbox([])
    sandbox.add_bundle(run, file)
    with pytest.raises(JobFailed, match="does not have the layout in the manifest"):
        trained(sandbox, run, b"train")


def test_a_program_with_other_frozen_tensors_than_the_signed_ones_is_refused(
    tmp_path: Path,
) -> None:
    held = "self.value = torch.nn.Parameter(torch.zeros(2))"
    changed = SOURCE.replace(held, f"{held}; self.register_buffer('base', torch.ones(3))")
    run, file = bundle_at(tmp_path / "run", changed)
    sandbox = Sandbox([])
    sandbox.add_bundle(run, file)
    with pytest.raises(JobFailed, match="does not have the frozen tensors in the manifest"):
        trained(sandbox, run, b"train")


def test_code_of_a_bundle_never_runs_unconfined(tmp_path: Path) -> None:
    run, file = bundle_at(tmp_path / "run", SOURCE)
    sandbox = Sandbox([], confined=False)

    async def start() -> None:
        await sandbox.start()
        try:
            with pytest.raises(OperatorError, match="does not run the code of bundles"):
                sandbox.add_bundle(run, file)
        finally:
            await sandbox.close()

    asyncio.run(start())
