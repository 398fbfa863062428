"""Programs in child processes: the update of the torch engine; no damage outside the child."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

import numpy as np
import pytest
from msgspec import structs

from papaya.device.executor import Job, JobFailed, JobResult
from papaya.device.sandbox import Sandbox
from papaya.errors import OperatorError
from papaya.learning.definition import TaskTerms
from papaya.learning.evaluation import EVALUATION_LENGTH, summarize
from papaya.learning.executorch.program_file import encode_program
from papaya.learning.parameters import FLOAT32, encode
from papaya.learning.torch.engine import TorchEngine
from tests.unit.learning.executorch.small_program import (
    EXAMPLES,
    loaded_task,
    program_bytes,
    program_file,
)

T = TypeVar("T")
INITIAL = np.array([0.1, -0.2, 0.3], FLOAT32)
# Jobs have a low priority: on a busy machine they wait long for a processor.
PATIENCE_S = 900.0


class Programs:
    """A sandbox with some program files, and the loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, files: list[Path]) -> None:
        self.runner = runner
        self.files = files
        self.sandbox = Sandbox(files, engine="executorch", memory_mb=256, max_parallel=2)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def run(
        self,
        *examples: bytes,
        kind: Literal["train", "evaluate", "load"] = "train",
        file: int = 0,
        timeout_s: float = PATIENCE_S,
        initial: np.ndarray[Any, Any] = INITIAL,
    ) -> JobResult:
        path = str(self.files[file])
        job = Job(kind, path, encode(initial, {}), examples or tuple(EXAMPLES), seed=4, volume=3)
        return self.do(self.sandbox.run(job, timeout_s))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    folder = tmp_path_factory.mktemp("programs")
    good, flipped = folder / "sums.program", []
    good.write_bytes(program_bytes())
    rng, original = Random(1), program_file()
    for number in range(40):
        data = bytearray(original.program)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path = folder / f"flipped-{number}.program"
        path.write_bytes(encode_program(original.header, bytes(data)))
        flipped.append(path)
    # Many steps, so that a time limit ends it first.
    endless = folder / "endless.program"
    client = structs.replace(original.header.client, epochs=2**31, rate=1e-9)
    endless.write_bytes(
        encode_program(structs.replace(original.header, client=client), original.program)
    )
    with asyncio.Runner() as runner:
        found = Programs(runner, [good, endless, *flipped])
        runner.run(found.sandbox.start())
        yield found
        assert found.run().examples == len(EXAMPLES), "the sandbox has survived everything"
        runner.run(found.sandbox.close())


def test_it_trains_the_update_of_the_torch_engine(programs: Programs) -> None:
    result = programs.run()
    expected, count = TorchEngine(loaded_task()).train(INITIAL, EXAMPLES, seed=4)
    assert result.examples == count == len(EXAMPLES)
    ours, theirs = (np.frombuffer(update, FLOAT32) for update in (result.update, expected))
    assert np.linalg.norm(ours) > 0
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def test_it_evaluates(programs: Programs) -> None:
    result = programs.run(kind="evaluate")
    found = np.frombuffer(result.update, FLOAT32)
    assert found.shape == (EVALUATION_LENGTH,)
    expected = TorchEngine(loaded_task()).evaluate(INITIAL, EXAMPLES, volume=3)
    theirs = summarize(np.frombuffer(expected, FLOAT32))
    assert summarize(found).all.loss == pytest.approx(theirs.all.loss, rel=1e-6)


def test_its_terms_are_those_of_the_task(programs: Programs) -> None:
    task = programs.sandbox.tasks[0]
    assert task.task == "sums"
    assert task.module_hash == program_file().name
    expected = TaskTerms.of(loaded_task().config())
    own = {"collection": loaded_task().task.examples.collection, "task": "sums"}
    assert task.terms == structs.replace(expected, **own, keeps_tensors=False)
    assert task.terms.secure
    assert task.examples == loaded_task().task.examples


def test_the_training_process_does_not_contain_torch(programs: Programs) -> None:
    server = programs.sandbox._own._server
    assert server is not None
    maps = Path(f"/proc/{server._process.pid}/maps").read_text()
    assert "libpapaya_executorch" in maps
    assert "libtorch" not in maps


def test_an_example_that_does_not_fit_is_refused(programs: Programs) -> None:
    with pytest.raises(JobFailed, match="an example does not fit field 1") as failed:
        programs.run(b"1,2,3", b"1,2")
    assert failed.value.kind == "refused"
    assert "1,2" not in failed.value.reason
    assert failed.value.traceback == "the example is b'1,2'", "for papaya client --explain"


def test_a_loss_that_is_not_finite_is_told(programs: Programs) -> None:
    with pytest.raises(JobFailed, match="training diverged: the loss is not finite"):
        programs.run(b"1e30,1e30,-1e30", initial=np.full(3, 1e30, FLOAT32))


def test_a_program_has_no_loader(programs: Programs) -> None:
    with pytest.raises(JobFailed, match="is a program, which has no load_examples"):
        programs.run(b"text", kind="load")


def test_a_program_that_does_not_end_is_ended(programs: Programs) -> None:
    with pytest.raises(JobFailed) as failed:
        programs.run(file=1, timeout_s=3.0)
    assert failed.value.kind == "timeout"


def test_a_damaged_program_fails_alone(programs: Programs) -> None:
    """Programs with a flipped bit and the digest to go with it, as a hostile owner could send."""
    endings = []
    for number in range(2, len(programs.files)):
        try:
            programs.run(file=number, timeout_s=PATIENCE_S)
            endings.append("trained")
        except JobFailed as error:
            endings.append(error.kind)
    assert endings.count("refused") + endings.count("crashed") > 0
    assert "unavailable" not in endings


def test_a_changed_file_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "sums.program"
    path.write_bytes(program_bytes()[:-1] + b"x")
    with (
        asyncio.Runner() as runner,
        pytest.raises(OperatorError, match="does not have the digest in its header"),
    ):
        runner.run(Sandbox([path], engine="executorch").start())


def test_missing_operators_are_named(tmp_path: Path) -> None:
    path, found = tmp_path / "sums.program", program_file()
    header = structs.replace(found.header, operators=("aten::mm.out", "aten::fold.out"))
    path.write_bytes(encode_program(header, found.program))
    with (
        asyncio.Runner() as runner,
        pytest.raises(OperatorError, match=r"lacks the operators aten::fold\.out"),
    ):
        runner.run(Sandbox([path], engine="executorch").start())
