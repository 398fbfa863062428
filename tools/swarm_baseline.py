"""Compare what the protocol does with a recorded baseline, for 200 swarm seeds.

The trace hash of a seed covers the virtual time, the sender, the receiver, the tag and every field
of every message and row except free text. A change that must not change behaviour keeps all of
them. A change that means to change behaviour writes the baseline again and says so:

    python -m tools.swarm_baseline            compare; exit with 1 if a seed differs
    python -m tools.swarm_baseline --write    record the hashes of this tree
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from papaya.sim.swarm import run_seed

SEEDS = range(200)
BASELINE = Path(__file__).with_name("swarm_baseline.json")


def trace_hash(seed: int) -> str:
    return run_seed(seed).trace_hash


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.swarm_baseline",
        description="Compare the traces of 200 swarm seeds with the baseline.",
    )
    parser.add_argument("--write", action="store_true", help="record the hashes of this tree")
    options = parser.parse_args(arguments)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(map(str, SEEDS), pool.map(trace_hash, SEEDS), strict=True))
    if options.write:
        BASELINE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    expected = json.loads(BASELINE.read_text(encoding="utf-8"))
    changed = [seed for seed in expected if found[seed] != expected[seed]]
    print(f"{len(expected) - len(changed)} of {len(expected)} seeds as in the baseline")
    if changed:
        print(f"changed: {', '.join(changed[:20])}; replay one: papaya swarm --seed {changed[0]}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
