"""`papaya load` against a real server, and the oracle that reads its digits in the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from msgspec import structs

from papaya.config import AsyncFL, OptimizerConfig, TaskConfig
from papaya.device.load import LoadOutcome, Times
from papaya.errors import MissingBlob
from papaya.store.blobs import FolderBlobs
from papaya.store.state import SqliteState
from tests.chaos.oracle import Model, Stored, judge, read_outcomes
from tests.system.admin import Admin
from tests.system.processes import Installation, ServerProcess, run_to_the_end

_TASK = TaskConfig(
    task="digits",
    concurrency=16,
    model_length=400,
    regime=AsyncFL(aggregation_goal=4),
    optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
    participation_gap_s=0.0,
)
_MOST_READS = 100  # far fewer versions than that are made meanwhile


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation(tmp_path_factory.mktemp("load")) as made:
        made.add(server={"chunk_bytes": 1024}).start()
        yield made


def _load(installation: Installation, *more: str) -> tuple[int, str, str]:
    [server] = installation.servers
    ended = run_to_the_end(
        "load",
        *("--server", f"http://{server.addresses['devices']}"),
        *("--admin", f"http://{server.addresses['admin']}"),
        *("--device-token-file", str(installation.data / "device.token")),
        *("--token-file", str(installation.data / "admin.token")),
        *("--devices", "20", "--training", "0.05", "--format", "json", *more),
    )
    return ended.returncode, ended.stdout, ended.stderr


def _admin(installation: Installation, server: ServerProcess) -> Admin:
    return Admin(server.addresses["admin"], installation.secret("admin.token"))


def test_a_load_makes_a_task_and_deletes_it(installation: Installation) -> None:
    code, out, err = _load(installation, "--update-bytes", "4096", "--updates", "40")
    assert code == 0, err
    report = json.loads(out)
    assert report["counted"] >= 40
    assert report["outcomes"]["counted"] == {"": report["counted"]}
    assert report["visits"] == sum(
        count for reasons in report["outcomes"].values() for count in reasons.values()
    )
    assert report["times"]["Complete"]["count"] >= 40
    assert report["direct"] == 0, "this server has no upload_url"
    assert "load: " in err, "progress"
    assert _admin(installation, installation.servers[0]).get("/admin/tasks") == []


def test_the_model_tells_who_was_counted(installation: Installation) -> None:
    _admin(installation, installation.servers[0]).submit(_TASK)
    file = installation.folder / "outcomes"
    arguments = ("--task", _TASK.task, "--update", "digit", "--outcomes", str(file))
    code, out, err = _load(installation, *arguments, "--updates", "60", "--rate", "200")
    assert code == 0, err
    outcomes = read_outcomes(file)
    model = _model(installation)
    verdict = judge(model, outcomes)
    assert verdict.problems == []
    assert verdict.told["counted"] == {1: json.loads(out)["counted"]}
    _check_that_it_notices(model, outcomes)


def _model(installation: Installation) -> Model:
    """What is stored. The server may still make a version of the last updates, and then deletes
    their sum.
    """
    state, blobs = SqliteState(installation.data / "state.db"), installation.data / "blobs"
    try:
        for _ in range(_MOST_READS):
            with suppress(MissingBlob):
                return Stored(state.read(("",)), FolderBlobs(blobs)).model("digits")
        raise AssertionError("a blob that rows name is missing")
    finally:
        state.close()


def _check_that_it_notices(model: Model, outcomes: list[LoadOutcome]) -> None:
    one = next(o for o in outcomes if o.ending == "counted")

    def with_digit(number: int, value: float) -> Model:
        digits = model.digits.copy()
        digits[number] = value
        return model._replace(digits=digits)

    weight = model.digits[one.number]
    lost, twice = with_digit(one.number, 0.0), with_digit(one.number, 2 * weight)
    for wrong, words in ((lost, "counted 0 times"), (twice, "counted 2 times")):
        [problem] = judge(wrong, outcomes).problems
        assert words in problem
        assert one.session in problem
    [problem] = judge(with_digit(one.number, 0.3 * weight), outcomes).problems
    assert "its coordinate is" in problem
    [problem] = judge(with_digit(399, 1.0), outcomes).problems
    assert "that no device used" in problem
    for told in ("aborted", "discarded"):
        changed = [structs.replace(o, ending=told) if o is one else o for o in outcomes]
        [problem] = judge(model, changed).problems
        assert "counted 1 times" in problem
    given_up = [structs.replace(o, ending="gave_up") if o is one else o for o in outcomes]
    assert judge(model, given_up).problems == []
    assert judge(lost, given_up).problems == []
    assert judge(lost._replace(lost=frozenset([one.session])), outcomes).problems == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--secure"], "--secure needs --trust"),
        (["--devices", "30000"], "too many for one process"),
        (["--device-token-file", "none"], "cannot read none"),
        (["--task", "none"], "none"),
        (["--outcomes", "no-folder/file"], "cannot write no-folder/file"),
        (["--devices", "0"], "below 1"),
    ],
)
def test_bad_options(installation: Installation, arguments: list[str], problem: str) -> None:
    code, _, err = _load(installation, *arguments)
    assert code == 2
    assert problem in err
    assert "hint:" in err


def test_percentiles_are_within_five_percent() -> None:
    times, values = Times(), np.geomspace(0.001, 10, 1000)
    for value in values:
        times.add(float(value))
    found = times.percentiles()
    assert found.count == 1000
    assert found.max_s == pytest.approx(10)
    for share, at in ((50, found.p50_s), (90, found.p90_s), (99, found.p99_s)):
        assert at == pytest.approx(np.percentile(values, share), rel=0.05)
