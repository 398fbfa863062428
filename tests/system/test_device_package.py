"""`papaya-device` in an environment of its own: small, without torch, and part of a secure task."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from papaya.cli.demo.demo import write_trust
from papaya.cli.owner import create_key
from tests.confined import needs_confinement
from tests.system.admin import Admin
from tests.system.processes import Installation, run_to_the_end
from tests.unit.learning.executorch.small_program import EXAMPLES, SOURCE, program_bytes
from tools.device_wheel import FORBIDDEN, REQUIRES, build_wheel

MAX_INSTALLED_MB = 60  # beside numpy and Python
MAX_IDLE_MB = 80
MAX_TRAINING_MB = 150
MAX_IMPORT_CPU_S = 5.0  # about half a second on an idle machine
STEP_S = 300.0
LOOK = """
import json, sys, time
start_s = time.process_time()
import papaya.cli.device, papaya.cli.client.setup, papaya.device.fork_server
import papaya.learning.executorch.engine
taken_s = time.process_time() - start_s
status = open("/proc/self/status").read()
idle_mb = int(status.partition("VmRSS:")[2].split()[0]) / 1024
print(json.dumps({"modules": sorted(sys.modules), "cpu_s": taken_s, "idle_mb": idle_mb}))
"""
TRAIN = """
import sys
from pathlib import Path
import numpy as np
from papaya.learning.executorch.engine import ExecuTorchEngine
from papaya.learning.executorch.program_file import read_program
engine = ExecuTorchEngine(read_program(Path(sys.argv[1])))
initial = np.random.default_rng(0).normal(0, 0.1, engine.manifest.length).astype(np.float32)
engine.train(initial, [b"a b c d e f g h i j k"] * 320, seed=0)
print(int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) / 1024)
"""


class DevicePackage:
    """A virtual environment with `papaya-device` and what it requires, and nothing else."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.bin = folder / "bin"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        for found in _required(list(REQUIRES)):
            _copy(found, self.packages)
        wheel = build_wheel(folder / "dist")
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install"]
        subprocess.run(
            [*pip, "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)],
            check=True,
            timeout=STEP_S,
        )

    def run(self, *arguments: str) -> str:
        command = [str(self.bin / "python"), "-I", *arguments]  # not from this folder
        return subprocess.check_output(command, text=True, timeout=STEP_S, env=environment())


def environment() -> dict[str, str]:
    """Without anything that leads back to this project."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _required(names: list[str]) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    while names:
        requirement = Requirement(names.pop())
        marker = requirement.marker
        if requirement.name in found or (marker and not marker.evaluate({"extra": ""})):
            continue
        found[requirement.name] = distribution(requirement.name)
        names += found[requirement.name].requires or []
    return list(found.values())


def _copy(found: Distribution, target: Path) -> None:
    for file in found.files or ():
        if file.parts[0] not in ("..", "__pycache__") and file.suffix != ".pyc":
            place = target / file
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), place)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> DevicePackage:
    return DevicePackage(tmp_path_factory.mktemp("device") / "environment")


def test_it_is_small(package: DevicePackage) -> None:
    files = [path for path in package.packages.rglob("*") if path.is_file()]
    kept = [f for f in files if not f.relative_to(package.packages).parts[0].startswith("numpy")]
    assert len(kept) < len(files), "numpy is there"
    assert sum(path.stat().st_size for path in kept) < MAX_INSTALLED_MB * 1e6


def test_it_imports_neither_torch_nor_servers(package: DevicePackage) -> None:
    found = json.loads(package.run("-c", LOOK))
    modules = set(found["modules"])
    for name in ("torch", "executorch", "uvloop", "numba", "matplotlib", *FORBIDDEN):
        assert name not in modules
    assert found["idle_mb"] < MAX_IDLE_MB
    assert found["cpu_s"] < MAX_IMPORT_CPU_S


@pytest.mark.soak
def test_training_the_model_of_the_demo_takes_little_memory(
    package: DevicePackage, tmp_path: Path
) -> None:
    source, program = Path("examples/next_word.py"), tmp_path / "next_word.program"
    done = run_to_the_end(
        "task", "compile", str(source), "--output", str(program), seconds=4 * STEP_S
    )
    assert done.returncode == 0, done.stderr
    assert float(package.run("-c", TRAIN, str(program))) < MAX_TRAINING_MB


@needs_confinement
def test_its_devices_take_part_in_a_secure_task(package: DevicePackage, tmp_path: Path) -> None:
    """They know only the owner's key: the program comes in a signed bundle."""
    source, key, owners = (tmp_path / name for name in ("sums.py", "owner.key", "owners.toml"))
    program = tmp_path / "sums.program"
    source.write_text(SOURCE)
    program.write_bytes(program_bytes())
    public = create_key(key).public_key().public_bytes_raw().hex()
    owners.write_text(f'[owners.me]\nkey = "{public}"\ncollections = ["numbers"]\n')
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        lines = b"\n".join(EXAMPLES) + b"\n%d,1,%d\n" % (number, number + 1)
        (texts / f"{number}.txt").write_bytes(lines)
    with Installation(tmp_path) as installation:
        server = installation.add().start()
        url = f"http://{server.addresses['admin']}"
        owner = ("--admin", url, "--token-file", str(installation.data / "admin.token"))
        submitted = run_to_the_end(
            *("task", "submit", str(source), "--program", str(program), "--owner", str(key)),
            *owner,
            seconds=STEP_S,
        )
        assert submitted.returncode == 0, submitted.stderr
        write_trust(tmp_path / "trust.toml", installation.data, server.addresses["devices"], goal=2)
        out, err = tmp_path / "devices.out", tmp_path / "devices.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            devices = subprocess.Popen(
                [
                    *(str(package.bin / "papaya-device"), "--owners", str(owners)),
                    *("--bundles", str(tmp_path / "bundles")),
                    *("--server", f"http://{server.addresses['devices']}"),
                    *("--token-file", str(installation.data / "device.token")),
                    *("--trust", str(tmp_path / "trust.toml")),
                    *("--store", str(tmp_path / "stores"), "--devices", "3"),
                    *("--import", f"numbers={texts}", "--assume", "idle,charging,unmetered"),
                    *("--participation-floor", "0", "--pause", "0"),
                ],
                stdout=stdout,
                stderr=stderr,
                env=environment(),
                cwd=tmp_path,
            )
            try:
                admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
                admin.until_task("sums", lambda line: line["version"] >= 2, STEP_S)
            finally:
                devices.send_signal(signal.SIGTERM)
                devices.wait(STEP_S)
        assert server.stop() == 0
        told = out.read_text()
        assert "fetched the bundle of sums" in told, err.read_text()
        assert "counted sums-" in told
