"""Claim: a user's torch model trains 1.5 times as fast in the simulator as in the fastest peer.

Six models: a perceptron whose form is drawn from the seed, a CNN, a small transformer, LoRA on a
frozen base, and language models with a GRU and an LSTM, for which the target is 1.0. The same
modules (FedJAX: the same functions), the same clients from the same first model, federated
averaging over cohorts of 100, plain SGD, batches of 32, one epoch. Peers are FedJAX, pfl-research
and Flower, each in a virtual environment that is made here from PyPI, and a tuned plain loop in
PyTorch; no peer is a dependency of Papaya. All systems live side by side on one core and take
turns. Rates are client updates per CPU-second; the value is the median over the turns of Papaya's
rate divided by that of the fastest peer. Compilation belongs to the warm-up, which is not counted.

The claim is about compiled steps. Short simulations use eager ones, so Papaya takes part a second
time, with eager steps. Their ratio to the fastest peer is reported without a target.

Run as `python bench/peers/run.py`; prints one JSON line per system and model, and two per model
with the ratios. Exits with 1 if the final loss of a system differs; a slow system is only
reported. See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from common import COHORT, MODELS, Array, Data, drawn_form, write

HERE = Path(__file__).resolve().parent
PACKAGES = {
    # The newest jax has dropped what the newest fedjax and a haiku of its time use.
    "fedjax": (
        "fedjax==0.0.17",
        "jax==0.4.30",
        "jaxlib==0.4.30",
        "dm-haiku==0.0.12",
        "optax==0.2.2",
        "chex==0.1.90",
        "flax==0.10.4",
        "orbax-checkpoint==0.6.4",
        "numpy==1.26.4",
        "scipy==1.17.1",
    ),
    "pfl": ("pfl==0.6.0", "torch==2.13.0", "numpy==2.4.6", "scipy==1.17.1"),
    "flower": ("flwr==1.41.0", "torch==2.13.0", "numpy==2.4.6"),
}
OURS = ("papaya", "papaya_eager")  # with compiled steps and with eager ones
# peer -> the environment that it needs; None is Papaya's own.
PEERS = {"loop": None, "fedjax": "fedjax", "pfl": "pfl", "flower": "flower"}
TARGETS = dict.fromkeys(MODELS, 1.5) | {"gru": 1.0, "lstm": 1.0}
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}
SAME_LOSS = 0.05  # of what has been learnt: Papaya shuffles, the others do not


@dataclass
class Peer:
    """A system that is running, and how long each of its turns has taken."""

    name: str
    process: subprocess.Popen[str]
    about: dict[str, Any] = field(default_factory=dict)
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    loss: float = float("nan")

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with {self.process.wait()}: see its messages above")
        found: dict[str, Any] = json.loads(line)
        return found

    def turn(self, number: int) -> None:
        took = self.ask({"rounds": [number, number + 1]})
        self.cpu_s.append(took["cpu_s"])
        self.wall_s.append(took["wall_s"])


def environment(folder: Path, name: str) -> Path:
    """The Python of a peer's virtual environment, which is made if it is not there."""
    packages = PACKAGES[name]
    place = folder / name
    python, done = place / "bin" / "python", place / "packages"
    if done.exists() and done.read_text().split() == list(packages):
        return python
    print(f"{name}: installing {' '.join(packages)}", file=sys.stderr)
    venv.create(place, with_pip=True, clear=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, stdout=2)
    done.write_text("\n".join(packages))
    return python


@contextmanager
def running(name: str, python: Path, data: Path) -> Iterator[Peer]:
    repository = HERE.parent.parent
    paths = {"PYTHONPATH": str(repository)} if name in OURS else {}
    process = subprocess.Popen(
        [python, HERE / f"{name}_peer.py", data],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | ONE_THREAD | paths,
        text=True,
    )
    with process:
        try:
            yield Peer(name, process)
        finally:
            process.kill()


def compare(model: str, seed: int, pythons: dict[str, Path], folder: Path, turns: int) -> bool:
    """All systems, in turn; whether their losses agree."""
    judge = Judge(model, seed)
    data = judge.write(folder / f"{model}.npz")
    with ExitStack() as stack:
        peers = [
            stack.enter_context(running(name, python, data)) for name, python in pythons.items()
        ]
        for peer in peers:
            peer.about = peer.answer()
        for turn in range(turns):
            for peer in peers:
                peer.turn(1 + turn)
        for peer in peers:
            saved = folder / f"{model}-{peer.name}.npz"
            peer.ask({"save": str(saved)})
            peer.loss = judge.loss(data, saved)
    report(model, peers)
    return judge.agree(data, peers)


class Judge:
    """The torch module of a model: where all systems start, and how good they got."""

    def __init__(self, model: str, seed: int) -> None:
        import torch
        import torch_models

        torch.manual_seed(seed)
        self._model, self._seed = model, seed
        self._module = torch_models.make(model, drawn_form(seed))

    def write(self, path: Path) -> Path:
        import modules

        trained, frozen = modules.trained(self._module), modules.frozen(self._module)
        return write(path, self._model, self._seed, trained, frozen)

    def loss(self, data: Path, saved: Path | None) -> float:
        """Mean loss on data that no client has; of the first model if none is saved."""
        import numpy as np

        read = Data(data)
        parameters = read.trained
        if saved is not None:
            with np.load(saved, allow_pickle=False) as file:
                parameters = dict(file)
        return self._loss(parameters, *read.held_out)

    def _loss(self, parameters: dict[str, Array], inputs: Array, targets: Array) -> float:
        import modules
        import torch
        import torch_models

        modules.set_parameters(self._module, parameters)
        with torch.no_grad():
            pair = torch.from_numpy(inputs), torch.from_numpy(targets)
            return float(torch_models.loss(self._module, *pair))

    def agree(self, data: Path, peers: list[Peer]) -> bool:
        """Whether the final losses are close, as a share of the way from the first."""
        losses = {peer.name: round(peer.loss, 4) for peer in peers}
        learnt = self.loss(data, None) - max(losses.values())
        if learnt > 0 and max(losses.values()) - min(losses.values()) < SAME_LOSS * learnt:
            return True
        print(f"wrong result: the final losses of {self._model} are {losses}", file=sys.stderr)
        return False


def report(model: str, peers: list[Peer]) -> None:
    for peer in peers:
        line = {"bench": "peers", "case": f"{model}, {peer.name}"}
        rates = {
            "clients_per_cpu_s": round(COHORT / median(peer.cpu_s), 1),
            "clients_per_s": round(COHORT / median(peer.wall_s), 1),
        }
        print(json.dumps(line | rates | {"loss": round(peer.loss, 6)} | peer.about), flush=True)
    compiled, eager, *theirs = peers
    if theirs:
        fastest = min(theirs, key=lambda peer: median(peer.cpu_s))
        report_ratio(model, compiled, fastest, TARGETS[model])
        report_ratio(f"{model}, eager steps", eager, fastest, None)


def report_ratio(case: str, ours: Peer, fastest: Peer, target: float | None) -> None:
    """How many times as fast, in each turn on the same clients; the median turn counts."""
    ratios = [theirs / our for our, theirs in zip(ours.cpu_s, fastest.cpu_s, strict=True)]
    value = median(ratios)
    line: dict[str, Any] = {"bench": "peers", "case": case, "value": round(value, 2)}
    if target is not None:
        line |= {"target": target, "passed": value >= target}
    line |= {
        "fastest_peer": fastest.name,
        "lowest": round(min(ratios), 2),
        "highest": round(max(ratios), 2),
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--environments", type=Path, help="folder of the virtual environments")
    parser.add_argument("--keep", action="store_true", help="do not delete a temporary folder")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--turns", type=int, default=5, help="rounds of every system (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="of data, first models and perceptron")
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    folder = asked.environments or Path(tempfile.mkdtemp(prefix="papaya-peers-"))
    try:
        own = Path(sys.executable)
        pythons = dict.fromkeys(OURS, own)
        for name in asked.peers:
            needed = PEERS[name]
            pythons[name] = own if needed is None else environment(folder, needed)
        os.sched_setaffinity(0, cores[-1:])  # and every system that is started from here
        with tempfile.TemporaryDirectory() as data:
            print(f"perceptron of seed {asked.seed}: {drawn_form(asked.seed)}", file=sys.stderr)
            rights = [
                compare(model, asked.seed, pythons, Path(data), asked.turns)
                for model in asked.models
            ]
    finally:
        if asked.environments is None and not asked.keep:
            shutil.rmtree(folder)
        elif asked.environments is None:
            print(f"kept: --environments {folder}", file=sys.stderr)
    sys.exit(0 if all(rights) else 1)


if __name__ == "__main__":
    main()
