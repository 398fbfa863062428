"""Claim: without torch, a device trains the demo's model in a quarter of the memory.

Both engines train the same examples from the same parameters in processes of their own, and take
turns. Of each engine the fastest turn counts, in CPU time, and the largest resident set of its
process, imports included. Values are executorch ÷ torch. Programs are slower than eager PyTorch:
their kernels are simple, and the LSTM is unrolled.

Run as `python bench/edge_engine.py`; prints one JSON line per case with value, target and whether
it passed. Updates that differ exit with 1; a slow or large engine is only reported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

NEXT_WORD = Path(__file__).parents[1] / "examples" / "next_word.py"
LSTM = """
import numpy as np
from torch import nn
from torch.nn.functional import cross_entropy
from papaya.learning.example_fields import Binary
from papaya.learning.task import ClientSGD, Examples, Task

class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.last = nn.Linear(64, 64)

    def forward(self, words):
        return self.last(self.lstm(self.embedding(words))[0])

def loss(module, words):
    scores = module(words[:, :-1]).transpose(1, 2)
    return cross_entropy(scores, words[:, 1:], reduction="none").mean(1)

rng = np.random.default_rng(1)
task = Task(
    name="lstm", model=Lstm, loss=loss, batch=(Binary("int64", (9,)),), examples=Examples("words"),
    client=ClientSGD(rate=0.5), concurrency=1,
    sample=[rng.integers(0, 64, 9).tobytes() for _ in range(64)],
)
"""
STEPS = 32
TURNS = 3
TARGETS = {
    ("next word", "memory"): 0.25,
    ("next word", "CPU per step"): 2.5,
    ("LSTM", "memory"): 0.25,
    ("LSTM", "CPU per step"): 6.0,
}


def train(engine_name: str, path: str, initial_path: str, sample_path: str, output: str) -> None:
    """Train in this process: the update goes to a file, what it took to stdout."""
    initial = np.load(initial_path)
    examples = [bytes.fromhex(each) for each in json.loads(Path(sample_path).read_text())]
    if engine_name == "torch":
        from papaya.learning.task import load_task
        from papaya.learning.torch.engine import TorchEngine

        engine: Any = TorchEngine(load_task(Path(path)))
    else:
        from papaya.learning.executorch.engine import ExecuTorchEngine
        from papaya.learning.executorch.program_file import read_program

        engine = ExecuTorchEngine(read_program(Path(path)))
    engine.train(initial, examples[:1], seed=0)
    start_s = time.process_time()
    update, _ = engine.train(initial, examples, seed=0)
    taken_s = time.process_time() - start_s
    Path(output).write_bytes(update)
    status = Path("/proc/self/status").read_text()  # unlike ru_maxrss, it starts anew at exec
    peak_mb = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(json.dumps({"step_ms": 1000 * taken_s / STEPS, "peak_mb": peak_mb}))


def measured(engine_name: str, folder: Path) -> dict[str, float]:
    path = folder / ("task.py" if engine_name == "torch" else "task.program")
    files = (path, folder / "initial.npy", folder / "sample.json", folder / engine_name)
    done = subprocess.run(
        [sys.executable, __file__, engine_name, *map(str, files)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compare(case: str, source: str, folder: Path) -> None:
    from papaya.learning.task import load_task
    from papaya.learning.torch.export import compile_task

    folder.mkdir()
    (folder / "task.py").write_text(source)
    loaded = load_task(folder / "task.py")
    (folder / "task.program").write_bytes(compile_task(loaded))
    count = STEPS * loaded.task.client.batch_size
    cycled = [loaded.task.sample[i % len(loaded.task.sample)].hex() for i in range(count)]
    (folder / "sample.json").write_text(json.dumps(cycled))
    np.save(folder / "initial.npy", loaded.initial_parameters())
    turns = [{e: measured(e, folder) for e in ("torch", "executorch")} for _ in range(TURNS)]
    ours, theirs = (np.fromfile(folder / e, "<f4") for e in ("executorch", "torch"))
    if not np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs):
        print(f"wrong result: the updates of {case} differ", file=sys.stderr)
        sys.exit(1)
    for what, field in (("memory", "peak_mb"), ("CPU per step", "step_ms")):
        edge, eager = (min(turn[e][field] for turn in turns) for e in ("executorch", "torch"))
        target = TARGETS[case, what]
        line: dict[str, object] = {"bench": "edge_engine"}
        line |= {"case": f"{case}, {what}, executorch ÷ torch"}
        line |= {"value": round(edge / eager, 2), "target": target}
        line |= {"passed": edge / eager <= target, field: round(edge, 1)}
        print(json.dumps(line | {f"torch_{field}": round(eager, 1)}, ensure_ascii=False))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        compare("next word", _with_many_examples(NEXT_WORD.read_text()), Path(folder) / "words")
        compare("LSTM", LSTM, Path(folder) / "lstm")


def _with_many_examples(source: str) -> str:
    """The demo's task, allowed to train on as many examples as a turn has."""
    return source.replace("max_examples=500", f"max_examples={32 * STEPS}")


if __name__ == "__main__":
    if sys.argv[1:]:
        train(*sys.argv[1:])
    else:
        main()
