"""`papaya demo` as its users run it: real processes that learn, and none of them left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import numpy as np
from safetensors.numpy import load_file

from papaya.learning.task import load_task
from tests.confined import needs_confinement

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "papaya", "demo"]
SMALL = ["--devices", "6", "--concurrency", "4", "--goal", "2", "--minutes", "30"]
MARK = "DEMO_TEST"
LIMIT_S = 2400.0
GONE_S = 240.0
# Python reads it at the start of every process: it notes who is there, and who imports torch.
WATCH = """
import os, sys

def note(what):
    with open(os.path.join(os.path.dirname(__file__), "seen"), "a") as file:
        with open("/proc/self/cmdline") as command:
            file.write(what + " ".join(command.read().replace(chr(0), " ").split()) + chr(10))

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            note("torch in ")

sys.meta_path.insert(0, Watch())
note("start of ")
"""


def environment(tmp_path: Path, mark: str) -> dict[str, str]:
    """Whatever the demo starts inherits the mark, and keeps its files where the test can look."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    return {**os.environ, MARK: mark, "TMPDIR": str(temporary)}


def marked(mark: str) -> list[str]:
    """Command lines of all processes that carry the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it ended meanwhile, or is not ours
    return found


def left_behind(mark: str) -> list[str]:
    """What is still there when helpers that end with their starter had time to notice."""
    deadline = time.monotonic() + GONE_S
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@needs_confinement
def test_a_short_demo_learns_without_torch_and_leaves_only_its_results(tmp_path: Path) -> None:
    mark, output, watch = uuid4().hex, tmp_path / "results", tmp_path / "watch"
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(WATCH)
    paths = os.pathsep.join((str(watch), str(ROOT)))
    done = subprocess.run(
        [*DEMO, *SMALL, "--versions", "4", "--output", str(output), "--format", "json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment(tmp_path, mark), "PYTHONPATH": paths},
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert left_behind(mark) == []
    assert list((tmp_path / "temporary").iterdir()) == []

    seen = (watch / "seen").read_text().splitlines()
    for device in (" client --server ", r"papaya\.device\.fork_server \d+ executorch "):
        assert any(re.search(f"start of .*{device}", line) for line in seen)
        assert not any(re.search(f"torch in .*{device}", line) for line in seen)
    assert any(re.search("torch in .* task submit ", line) for line in seen), "the owner uses it"
    started = [line for line in seen if line.startswith("start of ")]
    parts = (" serve --config ", " task submit ", " client --server ")
    first = [min(n for n, line in enumerate(started) if part in line) for part in parts]
    assert first == sorted(first), "devices start when the task is being submitted"

    summary = json.loads(done.stdout)
    assert summary["engine"] == "executorch"
    assert summary["regime"] == "AsyncFL"
    assert (summary["devices"], summary["concurrency"], summary["aggregation_goal"]) == (6, 4, 2)
    assert summary["version"] >= 4
    assert summary["trips"] >= summary["counted"] == 2 * summary["version"]
    assert summary["start_s"] > 0, "the first version comes after the submission"
    assert summary["seconds"] > 0
    # The demo looks twice a second: on a busy machine it may hardly look after version 1.
    assert 0 <= summary["utilization"] <= 1
    assert summary["utilization"] > 0 or summary["looks"] < 3
    assert summary["threshold"] == 2
    assert "INSECURE: the TSA runs in software" in done.stderr
    # The demo looks ten times a second: on a busy machine it may see none of so few.
    sample = summary["masked_sample"]
    assert sample is None or sample["bits_per_byte"] > 7.99
    assert summary["perplexity"]["0"] > summary["perplexity"][str(summary["version"])] > 1

    loaded = load_task(ROOT / "examples" / "next_word.py")
    tensors = load_file(summary["model"])
    vector = loaded.manifest.flatten(tensors)
    assert np.isfinite(vector).all()
    assert not np.array_equal(vector, loaded.initial_parameters())
    for name in ("perplexity.png", "metrics.csv"):
        assert (output / name).stat().st_size > 0
    assert "version 0" in done.stderr


def until_one_of_each(mark: str) -> None:
    """A process that is about to start another program is seen twice."""
    deadline = time.monotonic() + GONE_S
    while True:
        running = marked(mark)
        wanted = (" serve --config ", " serve tsa ", " client ")
        if [sum(each in command for command in running) for each in wanted] == [1, 1, 1]:
            return
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


@contextmanager
def a_running_demo(tmp_path: Path, mark: str) -> Iterator[subprocess.Popen[str]]:
    """As a shell starts a background job, and many CI systems everything: SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            [*DEMO, *SMALL, "--engine", "torch", "--output", str(tmp_path / "results")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment(tmp_path, mark),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "version 0" in line:  # the task is there, devices are on their way
                    break
            until_one_of_each(mark)
            yield process
        finally:
            process.kill()


def test_an_interrupted_demo_ends_whatever_it_started(tmp_path: Path) -> None:
    mark = uuid4().hex
    with a_running_demo(tmp_path, mark) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert out == ""
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert left_behind(mark) == []
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_killed_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    """As a test that fails kills it, or the kernel when memory runs out."""
    mark = uuid4().hex
    with a_running_demo(tmp_path, mark) as process:
        process.kill()
    assert left_behind(mark) == []
