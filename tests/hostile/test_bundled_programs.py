"""Bundles for devices without torch, from hostile servers and owners: a reason, and no harm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from papaya.bundle import archive
from papaya.bundle.errors import BundleError
from papaya.bundle.head import COMPILED_FILE, BundleHead
from papaya.bundle.manifest import BlobRef, TaskManifest
from papaya.device.bundles import Bundle, BundleStore
from papaya.device.example_store import ExampleStore
from papaya.device.owners import OwnerPolicy
from papaya.device.sandbox import Sandbox
from papaya.device.training import ExecutorTrainer, TrainingRequest
from papaya.device.use_policy import UsePolicy
from papaya.errors import OperatorError, PapayaError
from papaya.learning.definition import Examples
from papaya.learning.example_fields import Numbers
from papaya.learning.executorch.program_file import (
    EXECUTORCH_VERSION,
    ProgramHeader,
    encode_program,
)
from papaya.learning.frozen_file import FrozenTensor, decode_frozen, encode_frozen
from papaya.learning.parameters import FLOAT32, encode
from papaya.messages.base import BlobKey
from tests.confined import needs_confinement
from tests.unit.bundle.builders import KEY, NOW, a_lease, a_manifest, public
from tests.unit.learning.executorch.small_program import EXAMPLES, program_bytes, program_file

POLICY = OwnerPolicy(key=public(KEY).hex(), collections=("numbers",))
LIMIT_S = 300.0


def the_archive(program: bytes | None = None) -> bytes:
    return archive.pack({COMPILED_FILE: program_bytes() if program is None else program})


def signed(packed: bytes, **changes: Any) -> TaskManifest:
    """A manifest for the small program; whatever the archive holds, its owner has signed it."""
    header = program_file().header
    values: dict[str, Any] = {
        "engine": "executorch",
        "engine_version": EXECUTORCH_VERSION,
        "program": BlobRef(archive.digest(packed), len(packed)),
        "layout": header.manifest.tensors,
        "client": header.client,
        "examples": Examples("numbers"),
    }
    return a_manifest(**(values | changes))


# -- before anything reaches the runtime -------------------------------------------------------


class HostileServer:
    """Passes on what it likes under the keys that a device asks for."""

    def __init__(self, manifest: TaskManifest, packed: bytes) -> None:
        self.run = Bundle(manifest, 0.0, Path()).run
        self.program_key = f"{self.run}/0/program-0-{'a' * 32}"
        self.head_key = f"{self.run}/0/bundle-1-{'b' * 32}"
        self.frozen_key = (
            "" if manifest.frozen_blob is None else f"{self.run}/0/frozen-0-{'c' * 32}"
        )
        signed_head = (manifest.sign(KEY), a_lease(manifest), self.program_key, (), self.frozen_key)
        self.head = BundleHead(*signed_head).encode()
        self.program = packed
        self.frozen = b""

    async def blob(self, key: BlobKey, limit: int) -> bytes:
        assert key == self.head_key
        return self.head

    async def file(self, key: BlobKey, limit: int, path: Path) -> None:
        path.write_bytes(self.frozen if key == self.frozen_key else self.program)


def mutated(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    match rng.randrange(4):
        case 0:
            del changed[rng.randrange(len(changed)) :]
        case 1:
            start = rng.randrange(len(changed))
            changed[start : start + rng.randint(1, 40)] = rng.randbytes(rng.randint(0, 40))
        case _:
            for _ in range(rng.randint(1, 3)):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def test_thousands_of_mutated_bundles_are_refused_before_anything_runs_them(tmp_path: Path) -> None:
    """Whatever is accepted is exactly what the owner signed."""
    packed, rng = the_archive(), Random(7)
    manifest, accepted = signed(packed), 0
    policies = {POLICY.pin.owner: POLICY}

    async def accept(bundle: Bundle) -> None:
        nonlocal accepted
        accepted += 1
        assert bundle.manifest == manifest
        assert (bundle.program / COMPILED_FILE).read_bytes() == program_bytes()

    async def scenario() -> None:
        for number in range(3000):
            store = stores[number % 2]  # one has the program already, the other has nothing
            server = HostileServer(manifest, packed)
            if number % 10:
                server.head = mutated(server.head, rng)
            else:
                server.program = mutated(server.program, rng)
            try:
                await store.fetch(server.head_key, server, accept, NOW)
            except PapayaError:
                assert store.of_run(server.run) is None
            else:
                forget(store)

    def forget(store: BundleStore) -> None:
        store._ready.clear()

    stores = [BundleStore(tmp_path / name, policies) for name in ("full", "empty")]
    asyncio.run(stores[0].fetch(*_all_of(HostileServer(manifest, packed)), accept, NOW))
    forget(stores[0])
    asyncio.run(scenario())
    for store in stores:
        store.close()
    assert 1 <= accepted < 600, "a mutation of the program does not matter to who has it"
    assert sorted(p.name for p in (tmp_path / "full" / "blobs").iterdir()) == [
        manifest.program.sha256
    ]


FROZEN = encode_frozen(
    {
        "base.weight": FrozenTensor("F32", (4, 8), np.arange(128, dtype=np.uint8)),
        "base.ids": FrozenTensor("I64", (3,), np.arange(24, dtype=np.uint8)),
        "base.mask": FrozenTensor("BOOL", (), np.ones(1, np.uint8)),
    }
)


def test_hundreds_of_mutated_frozen_tensors_are_refused_before_anything_parses_them(
    tmp_path: Path,
) -> None:
    packed, rng = the_archive(), Random(11)
    manifest = signed(packed, frozen_file=BlobRef(archive.digest(FROZEN), len(FROZEN)))
    server = HostileServer(manifest, packed)
    store = BundleStore(tmp_path / "bundles", {POLICY.pin.owner: POLICY})

    async def accept(bundle: Bundle) -> None:
        assert bundle.frozen is not None
        assert bundle.frozen.read_bytes() == FROZEN

    async def scenario() -> None:
        for _ in range(400):
            server.frozen = mutated(FROZEN, rng)
            if server.frozen == FROZEN:
                continue
            with pytest.raises(BundleError, match="frozen tensors: not the bytes") as refused:
                await store.fetch(server.head_key, server, accept, NOW)
            assert refused.value.reason == "wrong_bytes"
            assert store.of_run(server.run) is None
        assert not any((tmp_path / "bundles" / "parts").iterdir())
        server.frozen = FROZEN
        assert (await store.fetch(server.head_key, server, accept, NOW)).frozen is not None

    asyncio.run(scenario())
    store.close()


def test_frozen_tensors_that_their_owner_has_damaged_are_refused_or_whole() -> None:
    """The digest is right. What is read has exactly the bytes of the file, so no view goes beyond
    it.
    """
    rng, read = Random(12), 0
    for _ in range(2000):
        data = mutated(FROZEN, rng)
        try:
            found = decode_frozen(np.frombuffer(data, np.uint8))
        except OperatorError:
            continue
        read += 1
        assert encode_frozen(found) == data
    assert 0 < read < 2000, "other values are valid, other headers are not"


def _all_of(server: HostileServer) -> tuple[BlobKey, Any]:
    return server.head_key, server


def test_a_program_of_another_task_of_the_same_owner_is_refused(tmp_path: Path) -> None:
    packed, other = the_archive(), the_archive(program_bytes() + b"x")
    server = HostileServer(signed(packed), other)
    store = BundleStore(tmp_path, {POLICY.pin.owner: POLICY})

    async def accept(_: Bundle) -> None:
        raise AssertionError

    with pytest.raises(BundleError, match="not the bytes that the owner signed"):
        asyncio.run(store.fetch(*_all_of(server), accept, NOW))
    store.close()


# -- in the job --------------------------------------------------------------------------------


class Devices:
    """A trainer without torch, and the loop that it lives in."""

    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        self.runner = runner
        self._folder = folder
        self._sandbox = Sandbox([], engine="executorch", memory_mb=256, max_parallel=2)
        runner.run(self._sandbox.start())
        self.trainer = ExecutorTrainer(
            *(self._sandbox, lambda: NOW, Random(1), None, "executorch"),
            self._sandbox.engine_version,
        )

    def bundle(self, program: bytes, **changes: Any) -> Bundle:
        packed = the_archive(program)
        folder = self._folder / archive.digest(packed)
        folder.mkdir(exist_ok=True)
        (folder / COMPILED_FILE).write_bytes(program)
        return Bundle(signed(packed, **changes), NOW + 100.0, folder)

    def add(self, program: bytes, **changes: Any) -> Bundle:
        bundle = self.bundle(program, **changes)
        self.runner.run(self.trainer.add_bundle(bundle))
        return bundle

    def train(self, bundle: Bundle, timeout_s: float = LIMIT_S) -> bytes:
        length = bundle.manifest.model_length
        initial = encode(np.full(length, 0.25, FLOAT32), {})
        request = TrainingRequest(
            bundle.run, bundle.run, "s", initial, length, length, False, False, timeout_s
        )
        with ExampleStore(":memory:", {"numbers": UsePolicy(tasks=("*",))}) as store:
            store.add("numbers", EXAMPLES, NOW)
            return self.runner.run(self.trainer.train(request, store)).update

    def close(self) -> None:
        self.runner.run(self._sandbox.close())


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    with asyncio.Runner() as runner:
        found = Devices(tmp_path_factory.mktemp("programs"), runner)
        honest = found.add(program_bytes())
        yield found
        assert any(found.train(honest)), "it has survived everything"
        found.close()


def crafted(change: Callable[[Any], None], **header: Any) -> bytes:
    """A program file whose program was changed, and whose digests are right."""
    file = program_file()
    # Here: the first import warns, and compiling has imported it.
    from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary

    program = deserialize_pte_binary(file.program)
    change(program)
    made: ProgramHeader = structs.replace(file.header, **header)
    return encode_program(made, bytes(serialize_pte_binary(program)))


def values_of(program: Any, kind: str) -> list[int]:
    values = program.program.execution_plan[0].values
    return [index for index, value in enumerate(values) if type(value.val).__name__ == kind]


def loops(program: Any) -> None:
    from executorch.exir.schema import Instruction, JumpFalseCall

    plan = program.program.execution_plan[0]
    never = next(i for i in values_of(program, "Bool") if not plan.values[i].val.bool_val)
    plan.chains[0].instructions.append(Instruction(JumpFalseCall(never, 0)))


def returns_nan(program: Any) -> None:
    for index in values_of(program, "Double"):
        program.program.execution_plan[0].values[index].val.double_val = float("nan")


def has_small_buffers(program: Any) -> None:
    program.program.execution_plan[0].non_const_buffer_sizes = [0, 16]


def has_huge_buffers(program: Any) -> None:
    program.program.execution_plan[0].non_const_buffer_sizes = [0, 1 << 50]


def has_another_output(program: Any) -> None:
    outputs = program.program.execution_plan[0].outputs
    outputs[1], outputs[2] = outputs[2], outputs[1]


def aborts(program: Any) -> None:
    """Give the first kernel a number instead of a tensor: the runtime aborts its process."""
    number = values_of(program, "Int")[0]
    calls = program.program.execution_plan[0].chains[0].instructions
    calls[0].instr_args.args[0] = number


def nothing(program: Any) -> None:
    pass


@needs_confinement
def test_a_program_that_loops_ends_with_its_time(devices: Devices) -> None:
    bundle = devices.add(crafted(loops), task="loops")
    # The runtime itself gives up after ten million instructions, if it is fast enough.
    ends = r"timeout: (training did not finish|exceeded its CPU)|Instruction execution limit"
    with pytest.raises(OperatorError, match=ends):
        devices.train(bundle, timeout_s=4.0)


@needs_confinement
def test_a_program_that_aborts_its_process_has_a_reason_and_harms_no_other(
    devices: Devices,
) -> None:
    bundle = devices.add(crafted(aborts), task="aborts")
    with pytest.raises(OperatorError, match=r"crashed: was killed by SIGABRT"):
        devices.train(bundle)
    assert any(devices.train(devices.add(program_bytes(), task="next")))


@needs_confinement
def test_a_program_that_returns_nan_uploads_nothing(devices: Devices) -> None:
    bundle = devices.add(crafted(returns_nan), task="nan")
    with pytest.raises(OperatorError, match=r"training diverged: .* not finite"):
        devices.train(bundle)


@needs_confinement
def test_a_program_that_lies_about_its_outputs_is_refused(devices: Devices) -> None:
    bundle = devices.add(crafted(has_another_output), task="outputs")
    with pytest.raises(OperatorError, match=r"output 1 of the program is not float32 of shape"):
        devices.train(bundle)


@needs_confinement
@pytest.mark.parametrize(
    ("change", "header", "manifest", "problem"),
    [
        (has_small_buffers, {}, {}, "cannot load the program"),
        (has_huge_buffers, {}, {}, "memory limit"),
        (nothing, {"operators": ("aten::fold.out",)}, {}, r"lacks the operators aten::fold\.out"),
        (nothing, {"executorch": "9.9"}, {}, "was compiled with ExecuTorch 9.9"),
        (nothing, {}, {"layout": (("weight", (2, 1)), ("bias", (1,)))}, "layout"),
        (nothing, {}, {"engine_version": "9.9"}, "needs executorch 9.9 or newer, this device has"),
        (nothing, {}, {"engine": "torch"}, "needs torch .* this device has executorch"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_device_takes_a_place(
    devices: Devices,
    change: Callable[[Any], None],
    header: dict[str, Any],
    manifest: dict[str, Any],
    problem: str,
) -> None:
    program = crafted(change, **header)
    bundle = devices.bundle(program, task="refused", **manifest)
    with pytest.raises(BundleError, match=problem) as refused:
        devices.runner.run(devices.trainer.add_bundle(bundle))
    assert refused.value.reason == "engine"
    assert not devices.trainer.knows(bundle.run)


@needs_confinement
def test_another_batch_size_than_that_of_the_program_is_refused(devices: Devices) -> None:
    client = structs.replace(program_file().header.client, batch_size=5)
    with pytest.raises(BundleError, match="has a batch size of 4, the manifest says 5"):
        devices.add(program_bytes(), client=client)


@needs_confinement
def test_a_field_that_lies_about_its_size_is_refused(devices: Devices) -> None:
    """It would give the program other inputs than it was compiled for."""
    fields = (Numbers(1), Numbers(1, start=2))
    bundle = devices.add(crafted(nothing, fields=fields), task="fields")
    with pytest.raises(OperatorError, match="the program failed"):
        devices.train(bundle)


@needs_confinement
def test_a_revision_that_cannot_be_loaded_leaves_the_one_before_it(devices: Devices) -> None:
    bundle = devices.add(program_bytes(), task="revised")
    later = devices.bundle(crafted(has_small_buffers), task="revised", revision=4)
    with pytest.raises(BundleError):
        devices.runner.run(devices.trainer.add_bundle(later))
    assert any(devices.train(bundle))


@needs_confinement
def test_flipped_bits_with_the_right_digests_harm_only_their_job(devices: Devices) -> None:
    """As a hostile owner could sign them. Some of these abort the process that loads them."""
    rng, file = Random(1), program_file()
    endings = []
    for number in range(40):
        data = bytearray(file.program)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            bundle = devices.add(encode_program(file.header, bytes(data)), task=f"flip-{number}")
            devices.train(bundle, timeout_s=60.0)
            endings.append("trained")
        except BundleError:
            endings.append("not loaded")
        except OperatorError:
            endings.append("failed")
    assert endings.count("not loaded") > 0
    assert "unavailable" not in endings
