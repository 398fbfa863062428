"""LoRA on a base model that is larger than a program may be: signed, fetched, trained confined."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec import structs

from papaya.bundle.archive import MAX_ARCHIVE_BYTES
from papaya.bundle.errors import BundleError
from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import TaskManifest
from papaya.cli.task.signing import BundleBlobs, blob_ref, first_manifest
from papaya.cli.task.submit import bundle_blobs
from papaya.device.bundles import Bundle, BundleStore
from papaya.device.example_store import ExampleStore
from papaya.device.executor import EngineName
from papaya.device.owners import OwnerPolicy
from papaya.device.sandbox import Sandbox
from papaya.device.training import ExecutorTrainer, TrainingRequest
from papaya.device.use_policy import UsePolicy
from papaya.learning.checkpoint_files import read_frozen
from papaya.learning.executorch.program_file import decode_program
from papaya.learning.frozen_file import FrozenTensor, encode_frozen
from papaya.learning.parameters import FLOAT32, Vector, encode
from papaya.learning.task import LoadedTask, load_task
from papaya.learning.torch.engine import TorchEngine
from papaya.learning.torch.export import compile_task
from papaya.messages.base import BlobKey
from tests.confined import needs_confinement
from tests.unit.bundle.builders import KEY, NOW, PIN, a_lease, public

pytestmark = needs_confinement

ROWS = 4400  # 18 MB of float32
LORA = f"""
import torch
from torch import nn
from papaya.learning.example_fields import Numbers
from papaya.learning.task import ClientSGD, Examples, Task

class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Embedding({ROWS}, 1024)
        self.base.weight.requires_grad = False
        self.down = nn.Linear(1024, 4, bias=False)
        self.up = nn.Linear(4, 1)

    def forward(self, place):
        return self.up(self.down(self.base(place[:, 0])))

task = Task(
    name="lora", model=Lora, batch=(Numbers(1, kind="int64"), Numbers(1, start=1)),
    loss=lambda module, place, y: (module(place) - y).square()[:, 0],
    examples=Examples("numbers"), client=ClientSGD(rate=0.01, batch_size=4), concurrency=2,
    frozen="base.safetensors", sample=[b"1,2", b"4000,-1", b"77,0.5", b"8,3", b"9,1"],
)
"""
EXAMPLES = [b"%d,%d" % (17 * number, number % 3) for number in range(10)]
POLICY = OwnerPolicy(
    key=public(KEY).hex(), collections=("numbers",), engines=("torch", "executorch")
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> LoadedTask:
    folder = tmp_path_factory.mktemp("lora")
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(ROWS, 1024)).astype(np.float32)
    (folder / "base.safetensors").write_bytes(encode_frozen({"base.weight": _stored(weight)}))
    (folder / "task.py").write_text(LORA)
    return load_task(folder / "task.py")


def _stored(values: Vector) -> FrozenTensor:
    return FrozenTensor("F32", values.shape, values.reshape(-1).view(np.uint8))


class Fleet:
    """The blobs of an owner at a server, and a device that has pinned the owner."""

    def __init__(self, folder: Path, written: LoadedTask, engine: EngineName) -> None:
        self.written = written
        compiled = compile_task(written) if engine == "executorch" else None
        self.blobs = bundle_blobs(written.path, written, compiled)
        config = (
            written.config() if compiled is None else written.config_for(decode_program(compiled))
        )
        made = first_manifest(PIN.owner, written, config, self.blobs)
        self.manifest = structs.replace(made, run=int(NOW * 1000))
        self.asked: list[str] = []
        self.store = BundleStore(folder / "bundles", {PIN.owner: POLICY})
        self.runner = asyncio.Runner()
        self._sandbox = Sandbox([], engine=engine, memory_mb=512, max_parallel=1)
        self.runner.run(self._sandbox.start())
        self.trainer = ExecutorTrainer(
            *(self._sandbox, lambda: NOW, Random(1), None, engine), self._sandbox.engine_version
        )

    def head_key(self, manifest: TaskManifest) -> BlobKey:
        return f"{Bundle(manifest, 0.0, Path()).run}/0/bundle-{manifest.revision}-{'0' * 32}"

    async def blob(self, key: BlobKey, limit: int) -> bytes:
        self.asked.append("bundle")
        return self.head

    async def file(self, key: BlobKey, limit: int, path: Path) -> None:
        self.asked.append(key)
        data = self.blobs.program if key == "program" else self.blobs.frozen
        assert len(data) <= limit
        path.write_bytes(data)

    def fetch(self, manifest: TaskManifest) -> Bundle:
        signed = (manifest.sign(KEY), a_lease(manifest))
        self.head = BundleHead(*signed, "program", (), "frozen").encode()
        return self.runner.run(
            self.store.fetch(self.head_key(manifest), self, self.trainer.add_bundle, NOW)
        )

    def train(self, bundle: Bundle) -> Vector:
        length = bundle.manifest.model_length
        initial = self.written.initial_parameters()
        request = TrainingRequest(
            *(bundle.run, bundle.run, "s", encode(initial, {}), length, length),
            *(False, False, 300.0),
        )
        with ExampleStore(":memory:", {"numbers": UsePolicy(tasks=("*",))}) as store:
            store.add("numbers", EXAMPLES, NOW)
            self.used = store.query("numbers", "lora", "train", 1500, True, NOW)
            update = self.runner.run(self.trainer.train(request, store)).update
        return np.frombuffer(update, FLOAT32)

    def close(self) -> None:
        self.runner.run(self._sandbox.close())
        self.runner.close()
        self.store.close()


@pytest.fixture(scope="module", params=["torch", "executorch"])
def fleet(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    written: LoadedTask,
) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp(request.param), written, request.param)
    yield made
    made.close()


def test_a_large_base_model_travels_once_and_is_trained_on(fleet: Fleet) -> None:
    assert len(fleet.blobs.program) < MAX_ARCHIVE_BYTES / 100
    assert len(fleet.blobs.frozen) > MAX_ARCHIVE_BYTES
    bundle = fleet.fetch(fleet.manifest)
    assert fleet.asked == ["bundle", "program", "frozen"]
    found = fleet.train(bundle)
    assert np.linalg.norm(found) > 0

    engine = TorchEngine(fleet.written)
    initial, seed = fleet.written.initial_parameters(), Random(1).getrandbits(63)
    update, _ = engine.train(initial, fleet.used, seed)
    expected = np.frombuffer(update, FLOAT32)
    assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected)

    fleet.asked.clear()
    slower = structs.replace(fleet.manifest.client, rate=0.001)
    later = structs.replace(fleet.manifest, revision=2, client=slower)
    shorter = fleet.train(fleet.fetch(later))
    assert fleet.asked == ["bundle"]
    assert 0 < np.linalg.norm(shorter) < np.linalg.norm(found) / 2


def test_a_program_with_other_frozen_tensors_than_the_signed_ones_is_refused(
    fleet: Fleet,
) -> None:
    """The owner's signature covers both; here they do not belong together."""
    genuine, tensors = fleet.blobs, read_frozen(Path(fleet.written.task.frozen or ""))
    weight = tensors["base.weight"]
    other = weight._replace(data=weight.data.copy())
    other.data[:4] ^= 1
    data = encode_frozen({"base.weight": other})
    try:
        fleet.blobs = BundleBlobs(genuine.program, data)
        swapped = structs.replace(fleet.manifest, revision=9, frozen_file=blob_ref(data))
        with pytest.raises(BundleError, match="frozen tensors") as refused:
            fleet.fetch(swapped)
        assert refused.value.reason == "engine"
    finally:
        fleet.blobs = genuine
