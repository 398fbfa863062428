"""`papaya swarm`: every seed is run, a failure is a seed to replay, and the exit code tells."""

from __future__ import annotations

import re

import msgspec
import pytest

from papaya.cli.main import main
from papaya.cli.swarm import hunt, judge
from papaya.errors import InvariantError, PapayaError
from papaya.sim.bugs import BUGS
from papaya.sim.swarm import SwarmResult, run_seed

PLANT = "record-kept-with-its-version"


def fragile(seed: int) -> SwarmResult:
    """Stands in for a whole system: seeds divisible by three break a promise."""
    failure = None if seed % 3 else f"promise {seed} is broken"
    return SwarmResult(seed, f"{seed:032x}", 10, 5.0, 2, failure, "one of each")


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_seed_is_run_once_in_any_number_of_processes(jobs: int) -> None:
    assert hunt(fragile, range(4, 12), jobs) == [fragile(seed) for seed in range(4, 12)]


def test_a_failure_is_told_at_once_and_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(hunt(fragile, range(1, 11), 1)) == 10
    told = capsys.readouterr().err
    assert told.index("seed 3: promise 3 is broken") < told.index("seed 9: promise 9")
    assert "10 of 10 seeds, 20 server updates, 3 failures" in told


def test_the_first_failure_is_the_one_to_replay() -> None:
    with pytest.raises(InvariantError, match="2 of 7 seeds broke an invariant") as e:
        judge(hunt(fragile, range(1, 8), 1), None)
    assert e.value.hint == "papaya swarm --seed 3"
    assert e.value.exit_code == 70


def test_a_planted_bug_must_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge([fragile(3)], "a-bug") == 0
    assert "the planted bug was found by 1 of 1 seed" in capsys.readouterr().err
    with pytest.raises(PapayaError, match="1 seed did not find the planted bug 'a-bug'") as missed:
        judge([fragile(4)], "a-bug")
    assert missed.value.exit_code == 1
    assert missed.value.hint == "try more seeds: papaya swarm --seeds 100 --plant a-bug"


def test_the_bugs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["swarm", "--help"])
    shown = capsys.readouterr().out
    lines = [f"\n  {name}\n      {bug.explanation}\n" for name, bug in BUGS.items()]
    assert [line for line in lines if line not in shown] == []
    assert "None" not in shown


def test_seeds_that_keep_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--start", "8", "--seeds", "2", "--jobs", "2", "--format", "json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert (found["seeds"], found["failed"]) == (2, [])
    results = msgspec.convert(found["results"], list[SwarmResult])
    assert results == [run_seed(8), run_seed(9)]  # the same trace as in this process


def test_one_seed_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--seed", "9"]) == 0
    out, expected = capsys.readouterr().out, run_seed(9)
    assert expected.trace_hash in out
    assert expected.configuration in out


def test_a_planted_bug_is_told_once_and_replays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--seeds", "4", "--jobs", "1", "--plant", PLANT]) == 0
    err = capsys.readouterr().err
    assert "error: " not in err
    replay = re.search(r"replay: papaya (swarm --seed (\d+) --plant [\w-]+)\n", err)
    assert replay is not None
    failure = re.search(rf"^seed {replay[2]}: (.+)$", err, re.MULTILINE)
    assert failure is not None
    assert err.count(failure[0]) == 1
    assert main(replay[1].split()) == 0
    out, err = capsys.readouterr()
    assert (out.count(failure[1]), err.count(failure[1])) == (1, 0)
