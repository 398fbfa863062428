"""`papaya task` and `papaya status` against the real admin API."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from papaya.cli.admin_client import (
    TOKEN_VARIABLE,
    AdminClient,
    ConnectionOptions,
    ServerUnreachable,
)
from papaya.cli.output import print_data
from papaya.cli.task import watch
from papaya.cli.task.show import in_order, silence_warning
from papaya.config import (
    Aggregation,
    AsyncFL,
    EvaluationPlan,
    Requirements,
    StopRule,
    SyncFL,
    TaskConfig,
    Weighting,
)
from papaya.errors import OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.schedules import CosineDecay
from papaya.learning.settings import GivenSettings, changed, changed_client
from papaya.messages.storage import (
    LEADER_KEY,
    AdminAddressRow,
    EndingsRow,
    LeaderRow,
    PointRow,
    TaskRow,
    Transaction,
    admin_address_key,
    endings_key,
    point_key,
    task_key,
)
from papaya.server.admin.live import LiveTask
from papaya.server.admin.views import ClockStatus, SystemStatus, TaskDetail, TaskView
from tests.unit.cli.admin_server import TOKEN, AdminServer, admin_server, papaya
from tests.unit.server.admin.builders import BY, TASK, because


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdminServer]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with admin_server(tmp_path) as found:
        found.call(found.system.submit())
        yield found


def run(server: AdminServer, *arguments: str) -> int:
    return papaya(*arguments, "--admin", server.url)


def with_loss(server: AdminServer, losses: list[float | None]) -> None:
    """A history with these losses, from version 1 on."""
    points = [
        PointRow(version, 1000.0 + 10 * version, 4, 40, 1.5, loss=loss, perplexity=loss)
        for version, loss in enumerate(losses, start=1)
    ]
    put = tuple((point_key("next-word", point.version), point) for point in points)
    server.system.change(Transaction(put=put))


def test_list_and_show_and_status(server: AdminServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.system.live.found["next-word"] = LiveTask("aggregator", 18, 2, 5, "")
    with_loss(server, [3.0, 2.5])
    assert run(server, "task", "list") == 0
    out, err = capsys.readouterr()
    assert " ".join(out.splitlines()[2].split()) == "next-word - - - - running 0 2 2.5 18 20 90 %"
    assert err == ""
    assert run(server, "task", "show", "next-word") == 0
    out, err = capsys.readouterr()
    assert "AsyncFL, 20 clients at a time, 4 updates in a version" in out
    assert "every update, in the clear" in out
    assert "version 0, loss 2.500 at version 2, perplexity 2.5, utilization 90 %" in out


def test_status_exits_with_1_when_a_person_should_look(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "status") == 1
    assert "no coordinator leads yet" in capsys.readouterr().err
    server.system.change(Transaction(put=((LEADER_KEY, LeaderRow("coordinator", 1.0, 3, 9)),)))
    server.system.live.found["next-word"] = LiveTask("aggregator", 18, 2, 5, "")
    assert run(server, "status") == 0
    out, err = capsys.readouterr()
    assert "leader       coordinator, this server" in out
    assert "aggregator   aggregator, heard 0 s ago, 1 task\n" in out
    assert "selector     selector, heard 0 s ago, 7 check-ins held" in out
    assert " ".join(out.splitlines()[-1].split()) == "next-word running 0 18 20 2 5 aggregator"
    assert err == ""
    server.system.live.wrong_clocks = (ClockStatus("aggregator", -12.0, False),)
    assert run(server, "status") == 0
    assert "clock of aggregator is 12 s behind the leader's" in capsys.readouterr().out
    server.system.live.wrong_clocks = (ClockStatus("aggregator", 3600.0, True),)
    assert run(server, "status") == 1
    assert "3600 s ahead of the leader's: its reports are refused" in capsys.readouterr().err
    server.system.live.wrong_clocks = ()
    server.system.time += 60  # servers have had the time to report
    for silent, problem in (
        ("no_aggregators", "no aggregator has reported, so no task can train"),
        ("no_selectors", "no selector has reported, so no device can check in"),
    ):
        setattr(server.system.live, silent, True)
        assert run(server, "status") == 1
        assert f"problem: {problem}\n" in capsys.readouterr().err
        assert run(server, "status", "--format", "json") == 1
        assert json.loads(capsys.readouterr().out)["problems"] == [problem]
        setattr(server.system.live, silent, False)
        assert run(server, "status") == 0
        assert problem not in capsys.readouterr().err
        assert run(server, "status", "--format", "json") == 0
        assert json.loads(capsys.readouterr().out)["problems"] == []
    server.system.live.found["next-word"] = LiveTask("aggregator", 18, 2, 5, "it diverged")
    assert run(server, "status") == 1
    assert "task next-word halted: it diverged" in capsys.readouterr().err
    server.system.live.is_leader = False
    assert run(server, "status") == 1
    assert "coordinator; ask its admin API for live numbers\n" in capsys.readouterr().out
    where = AdminAddressRow("https://10.0.0.7:8751")
    server.system.change(Transaction(put=((admin_address_key("coordinator"), where),)))
    assert run(server, "status") == 1
    assert "papaya status --admin https://10.0.0.7:8751\n" in capsys.readouterr().out
    server.system.live.found["next-word"] = LiveTask("aggregator", 18, 2, 5, "")
    assert run(server, "status") == 0
    capsys.readouterr()
    server.system.live.has_leader = False  # the row still names one, but it is not renewed
    assert run(server, "status") == 1
    out, err = capsys.readouterr()
    assert "leader       none; the last leader was coordinator\n" in out
    assert "problem: no leader: coordinator has not renewed its lease" in err


def test_every_command_speaks_json(server: AdminServer, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, kind in (
        (("task", "list"), list[TaskView]),
        (("task", "pause", "next-word"), TaskView),
        (("task", "resume", "next-word"), TaskView),
        (("task", "rollback", "next-word", "0"), dict[str, object]),
        (("task", "mark", "next-word", "0"), dict[str, object]),
        (("task", "evaluate", "next-word", "--clients", "3"), dict[str, object]),
        (("task", "metrics", "next-word"), list[dict[str, object]]),
        (("status",), SystemStatus),
    ):
        assert run(server, *arguments, "--format", "json") in (0, 1), arguments
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        msgspec.json.decode(out, type=kind)
    assert run(server, "task", "show", "next-word", "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"detail", "versions", "client"}


def test_a_task_is_steered(server: AdminServer, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (("pause", "next-word"), "next-word is paused"),
        (("resume", "next-word"), "next-word is running"),
        (("rollback", "next-word", "0"), "next-word continues at version 1, from version 0"),
        (("mark", "next-word", "0"), "version 0 of next-word is now protected"),
        (("mark", "next-word", "0", "--remove"), "version 0 of next-word is no longer protected"),
        (("evaluate", "next-word"), "next-word-eval-1 evaluates version 1"),
        (("cancel", "next-word", "--why", "enough"), "next-word is cancelled"),
    ):
        assert run(server, "task", *arguments) == 0
        assert capsys.readouterr().out.startswith(told)


@pytest.mark.parametrize(
    ("arguments", "problem", "hint"),
    [
        (("task", "show", "nothing"), "there is no task 'nothing'", "papaya task list"),
        (("task", "resume", "next-word"), "is already running", "show"),
        (("task", "rollback", "next-word", "7"), "task next-word has no version 7", "mark"),
        (("task", "export", "next-word", "--output", "model.onnx"), "model.onnx", "safetensors"),
        (("task", "export", "next-word", "--output", "no/m.pt"), "no folder no", "mkdir -p no"),
        (("task", "metrics", "next-word", "--output", "no/m.csv"), "write no/m.csv", "mkdir -p no"),
        (
            ("task", "export", "next-word", "--output", "m.pt", "--version", "x"),
            "invalid version",
            "new",
        ),
        (("task", "show", "a/../b"), "there is no task", "papaya task list"),
        (("task",), "ACTION", "papaya task --help"),
    ],
)
def test_what_is_wrong_is_told_with_a_hint(
    server: AdminServer, arguments: tuple[str, ...], problem: str, hint: str
) -> None:
    with pytest.raises(OperatorError, match=problem) as error:
        papaya(*arguments, *(("--admin", server.url) if len(arguments) > 1 else ()))
    assert hint in error.value.hint


def test_commands_in_hints_repeat_the_options_that_were_given(
    server: AdminServer, tmp_path: Path
) -> None:
    token = ("--token-file", str(tmp_path / "admin.token"))
    with pytest.raises(OperatorError) as error:
        papaya("task", "show", "nothing", "--admin", server.url, *token)
    assert error.value.hint == f"papaya task list --admin {server.url} {' '.join(token)}"
    options = ConnectionOptions(token_file=Path("a b/admin.token"))
    assert options.repeated("first: papaya task show x; papaya task compile y") == (
        "first: papaya task show --token-file 'a b/admin.token' x; papaya task compile y"
    )
    assert options.repeated("papaya status --admin http://10.0.0.7:8751") == (
        "papaya status --admin http://10.0.0.7:8751"
    )
    assert ConnectionOptions().repeated("papaya task list") == "papaya task list"


# -- the connection -----------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_named_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match=url) as error:
            AdminClient(url, TOKEN).get("/admin/status", SystemStatus)
    assert "papaya serve" in error.value.hint


def test_a_wrong_token_is_told_and_not_shown(
    server: AdminServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "wrong.token"
    file.write_text("not-the-right-token")
    with pytest.raises(OperatorError, match="does not accept this token") as error:
        run(server, "task", "list", "--token-file", str(file))
    assert "not-the-right" not in str(error.value) + error.value.hint
    assert "admin.token" in error.value.hint
    assert run(server, "task", "list", "--token-file", str(tmp_path / "admin.token")) == 0
    monkeypatch.delenv(TOKEN_VARIABLE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OperatorError, match="no token") as error:
        run(server, "task", "list")
    assert "--token-file" in error.value.hint


@pytest.mark.parametrize("url", ["127.0.0.1:8751", "ftp://x", "http://", "http://x:99999"])
def test_an_address_that_is_none_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OperatorError, match="is not an address"):
        AdminClient(url, TOKEN)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)  # where there is no token
    with pytest.raises(OperatorError, match="is not an address"):
        papaya("status", "--admin", url)


def test_another_service_on_the_port_is_noticed(server: AdminServer) -> None:
    with pytest.raises(OperatorError, match="did not answer like an admin API"):
        AdminClient(server.url, TOKEN).get("/admin/status", TaskDetail)


# -- settings of a submission -------------------------------------------------------------------


def test_settings_are_changed_by_name() -> None:
    found = changed(
        TASK,
        "other",
        [
            "concurrency=50",
            "regime.aggregation_goal=7",
            "stop.versions=3",
            "evaluation.clients=5",
            "durability=step",
            "clip=1",
        ],
    )
    assert found == structs.replace(
        TASK,
        task="other",
        concurrency=50,
        regime=AsyncFL(7),
        stop=StopRule(versions=3),
        evaluation=EvaluationPlan(clients=5),
        durability="step",
        clip=1.0,
    )
    assert changed(TASK, None, ["regime=sync"]).regime == SyncFL()
    assert changed(TASK, None, []) == TASK


@pytest.mark.parametrize(
    ("setting", "problem", "hint"),
    [
        ("concurrency", "has no value", "--set concurrency=…"),
        ("clip", "--set clip has no value", "--set clip=…"),
        ("concurency", "no setting concurency", "did you mean concurrency?"),
        ("concurrency=0", "concurrency = 0", ""),
        ("concurrency=many", "--set concurrency=many: must be a whole number", "configuration.md"),
        ("stop.versions=1.5", "versions=1.5: must be a whole number or null", "configuration.md"),
        ("concurency=3", "no setting concurency", "did you mean concurrency?"),
        ("stop.version=3", "no setting stop.version", "did you mean stop.versions?"),
        ("versions=3", "no setting versions", "did you mean stop.versions?"),
        ("upload_bits=8", "no setting upload_bits", "did you mean requirements.upload_bits?"),
        ("xyz=3", "no setting xyz", "configuration.md"),
        ("task=x", "cannot change task", "--name"),
        ("model_length=3", "cannot change model_length", "model"),
        ("regime=both", "--set regime=both: is not one of async, sync", "configuration.md"),
        ("regime=asink", "regime=asink: is not one of async, sync", "did you mean async?"),
        ("durability=steps", "durability=steps: is not one of commit, step", "did you mean step?"),
        ("requirements.upload_bits=7", "upload_bits=7: is not one of", "configuration.md"),
        ("regime.over_selection=1", "this regime has no setting over_selection", ""),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting: str, problem: str, hint: str) -> None:
    with pytest.raises(OperatorError, match=re.escape(problem)) as refused:
        changed(TASK, None, [setting])
    assert hint in refused.value.hint


# -- watching -----------------------------------------------------------------------------------


def view_of(server: AdminServer) -> TaskDetail:
    return AdminClient(server.url, TOKEN).get("/admin/tasks/next-word", TaskDetail)


def test_watch_tells_every_change_and_ends_with_the_task(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with_loss(server, [3.0, 2.0])
    server.system.live.found["next-word"] = LiveTask("aggregator", 10, 10, 0, "")
    turns = iter(["nothing", "pause", "cancel"])

    def sleep(seconds: float) -> None:
        action = next(turns)
        if action != "nothing":
            run(server, "task", action, "next-word")

    client = AdminClient(server.url, TOKEN)
    show = watch.LineShow(lambda detail: print_data(watch.line(detail)))
    last = watch.follow(client, "next-word", "completed", 1.0, show, sleep)
    assert last.task.state == "cancelled"
    lines = [line for line in capsys.readouterr().out.splitlines() if "version 0" in line]
    assert [line.split(",")[0] for line in lines] == [
        "next-word running",
        "next-word paused",
        "next-word cancelled",
    ]
    assert "loss 2.000 at version 2, perplexity 2.0, utilization 50 %, staleness 1.5" in lines[0]


def test_watch_exits_with_1_for_a_cancelled_task_and_0_for_a_completed_one(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.call(server.system.service.set_state("next-word", "cancelled", because("enough")))
    assert run(server, "task", "watch", "next-word", "--until", "completed") == 1
    assert "was cancelled: enough" in capsys.readouterr().err
    server.call(server.system.submit(structs.replace(TASK, task="second")))
    server.call(server.system.service.set_state("second", "completed", because("done")))
    assert run(server, "task", "watch", "second", "--format", "json") == 0
    detail = msgspec.json.decode(capsys.readouterr().out, type=TaskDetail)
    assert detail.task.why == "done"


def test_watch_until_evaluated_waits_for_the_last_version(server: AdminServer) -> None:
    plan = EvaluationPlan(every_versions=5, clients=3)
    server.call(server.system.submit(structs.replace(TASK, task="planned", evaluation=plan)))
    server.call(server.system.service.set_state("planned", "completed", BY))
    server.call(server.system.turn())  # starts the evaluation
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            server.call(server.system.service.set_state("planned-eval-0", "cancelled", BY))

    client = AdminClient(server.url, TOKEN)
    watch.follow(
        client,
        "planned",
        "evaluated",
        1.0,
        watch.LineShow(lambda detail: print_data(watch.line(detail))),
        sleep,
    )
    assert len(slept) == 2


def test_watch_waits_for_a_server_that_restarts_and_not_for_ever(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    detail = view_of(server)
    over = structs.replace(detail, task=structs.replace(detail.task, state="completed"))

    answers = iter([detail, None, None, over])

    class Restarting(AdminClient):
        """Answers, is away for a while, and answers again."""

        def get(self, path: str, kind: type) -> TaskDetail:  # type: ignore[override]
            found = next(answers, None)
            if found is None:
                raise ServerUnreachable("nobody there")
            return found

    client = Restarting(server.url, TOKEN)
    show = watch.LineShow(lambda detail: print_data(watch.line(detail)))
    seen = watch.follow(client, "next-word", "completed", 1.0, show, lambda seconds: None)
    assert seen.task.state == "completed"
    assert capsys.readouterr().err.count("waiting for it") == 1
    with pytest.raises(ServerUnreachable):
        watch.follow(client, "next-word", "completed", 1.0, show, lambda seconds: None)


def a_view(task: str = "next-word", **more: Any) -> TaskView:
    known = {"state": "running", "why": "", "regime": "AsyncFL", "submitted": 0.0, "ended": 0.0}
    numbers = {"concurrency": 20, "aggregation_goal": 4, "version": 3}
    return TaskView(**{"task": task, **known, **numbers, **more})


def test_evaluations_are_listed_after_their_task_in_order_of_version() -> None:
    ids = ["next-word", "next-word-eval-95", "next-word-eval-100", "next-word-eval-100-2", "other"]
    numbers = {"95": ("95", 1.0), "100": ("100", 2.0), "100-2": ("100", 3.0)}

    def view(task: str) -> TaskView:
        name, _, number = task.partition("-eval-")
        if not number:
            return a_view(name)
        version, submitted = numbers[number]
        return a_view(task, evaluates=f"{name}@{version}", submitted=submitted)

    assert [each.task for each in in_order(map(view, sorted(ids)))] == ids


def test_old_numbers_of_a_silent_holder_have_a_warning() -> None:
    assert silence_warning(a_view(holder="aggregator-2")) == ""
    assert silence_warning(a_view(holder="aggregator-2", silent_s=24.4)) == (
        "aggregator-2, which holds next-word, has not reported for 24 s; active and utilization "
        "are from its last report"
    )


def test_the_live_display_shows_the_same_numbers_and_the_curve() -> None:
    task = a_view(
        halted="the model diverged", utilization=0.98, evaluated=2, loss=1.0, perplexity=2.718
    )
    config = TaskConfig(task="next-word", concurrency=20, model_length=6)
    points = tuple(PointRow(v, 10.0 * v, 4, 40, 1.5, loss=float(8 - v)) for v in range(8))
    detail = TaskDetail(
        task=task, config=config, manifest=(), points=points, versions_per_minute=6.0, warnings=()
    )
    shown = watch.picture(detail)
    assert "loss 8.000 █▇▆▅▄▃▂▁ 1.000" in shown
    assert "loss 1.000 at version 2" in shown
    assert "HALTED: the model diverged" in shown
    assert "6.0 versions/min" in shown
    assert watch.curve([2.0, 2.0]) == "▁▁"
    # Before anything is known, nothing is claimed.
    fresh = structs.replace(task, version=0, active=0, utilization=0.0, loss=None, evaluated=None)
    nothing = structs.replace(detail, task=fresh, points=points[:0])
    assert watch.numbers(nothing) == ["loss -", "utilization -", "staleness -", "- versions/min"]


def test_a_rate_is_of_versions_that_clients_made_and_of_some_seconds() -> None:
    made = [PointRow(version, 100.0 + 2 * version, 4, 40, 0.0) for version in range(1, 6)]
    assert watch.versions_per_minute(made) == 30.0
    assert watch.versions_per_minute(made[:3]) is None
    assert watch.versions_per_minute(made[:3], over_s=0.0) == 30.0
    assert watch.versions_per_minute(made[:1], over_s=0.0) is None
    assert watch.versions_per_minute([]) is None


def test_show_tells_how_updates_are_combined_unless_it_is_the_default(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "task", "show", "next-word") == 0
    assert "updates      " not in capsys.readouterr().out
    other = structs.replace(
        TASK,
        task="second",
        aggregation=Aggregation("median"),
        weighting=Weighting("equal"),
        requirements=Requirements(upload_bits=8),
    )
    server.call(server.system.submit(other))
    assert run(server, "task", "show", "second") == 0
    shown = "updates      uploaded in 8 bits, combined by median, equal weights\n"
    assert shown in capsys.readouterr().out


def test_show_tells_why_participations_gave_no_update(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "task", "show", "next-word") == 0
    assert "no update" not in capsys.readouterr().out
    row = EndingsRow(2, {"counted": 60, "left_diverged": 30}, {"left_diverged": 7, "new_one": 1})
    server.system.change(Transaction(put=((endings_key("next-word"), row),)))
    assert run(server, "task", "show", "next-word") == 0
    out, err = capsys.readouterr()
    assert "no update    38 of 98 participations\n" in out
    assert "\n             37 × training diverged: loss is not finite\n" in out
    assert "\n             1 × new_one\n" in out
    assert "papaya client --explain" in err
    row = EndingsRow(2, {"aborted_stale": 9, "left_diverged": 1}, {})
    server.system.change(Transaction(put=((endings_key("next-word"), row),)))
    assert run(server, "task", "show", "next-word") == 0
    assert "hint" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("left_s", "shown", "warning"),
    [
        (29 * 86400.0 + 60, "29.0 days", ""),
        (7 * 86400.0 - 60, "7.0 days", "the lease of digits ends in 7.0 days"),
        (-60.0, "ended", "the lease of digits has ended: no device starts to train it"),
    ],
)
def test_a_lease_is_shown_and_its_end_announced(
    server: AdminServer,
    capsys: pytest.CaptureFixture[str],
    left_s: float,
    shown: str,
    warning: str,
) -> None:
    system = server.system
    rows = system.store.read((task_key("next-word"),))
    row = rows[task_key("next-word")]
    assert isinstance(row, TaskRow)
    needs = structs.replace(row.config.requirements, owner=32 * "a", bundle="b")
    signed = structs.replace(
        row,
        config=structs.replace(row.config, requirements=needs),
        name="digits",
        run=1700,
        revision=3,
        lease_until=time.time() + left_s,
    )
    system.change(Transaction(put=((task_key("next-word"), signed),)))
    assert run(server, "task", "list") == 0
    out, err = capsys.readouterr()
    line = f"next-word aaaaaaaa 1700 3 {shown} running"
    assert " ".join(out.splitlines()[2].split()).startswith(line)
    assert warning in err
    assert ("papaya task renew" in err) is bool(warning)
    assert run(server, "task", "show", "digits", "--run", "1700") == 0
    out, err = capsys.readouterr()
    assert "run          1700, revision 3\n" in out
    assert f"({shown})" in out
    assert warning in err
    with pytest.raises(OperatorError, match="has no run 1701") as error:
        run(server, "task", "show", "digits", "--run", "1701")
    assert "its runs: 1700" in error.value.hint


def test_a_deletion_does_not_guess_which_run_is_meant(server: AdminServer) -> None:
    row = server.system.store.read((task_key("next-word"),))[task_key("next-word")]
    assert isinstance(row, TaskRow)
    for number, task in ((1700, "next-word"), (1800, "next-word-2")):
        config = structs.replace(row.config, task=task)
        run_row = structs.replace(row, config=config, name="digits", run=number)
        server.system.change(Transaction(put=((task_key(task), run_row),)))
    with pytest.raises(OperatorError, match=r"task digits has 2 runs: 1[78]00 ") as error:
        run(server, "task", "delete", "digits")
    assert "digits --run 1" in error.value.hint


def test_a_misspelt_task_gets_a_similar_name(server: AdminServer) -> None:
    with pytest.raises(OperatorError, match="there is no task 'nextword'") as error:
        run(server, "task", "show", "nextword")
    assert error.value.hint.startswith("did you mean next-word? papaya task list")


@pytest.mark.parametrize(
    ("settings", "problem", "hint"),
    [
        (["rat=1"], "there is no setting client.rat", "did you mean client.rate?"),
        (["rate"], "has no value", "--set client.rate=…"),
        (["rate=fast"], "--set client.rate=fast: must be a number", "its fields are rate"),
        (["optimizer=adm"], "client.optimizer=adm: is not one of sgd, adam", "did you mean adam?"),
        (["rate=-1"], "client.rate", "must be above zero"),
        (["schedule.ende=0.1"], "there is no setting client.schedule.ende", "schedule.end"),
        (["schedule=sawtooth"], "schedule=sawtooth: is not one of constant", "schedule.type"),
        (["nesterov=true"], "client.nesterov", "set momentum"),
    ],
)
def test_wrong_settings_of_the_client_are_named(
    settings: list[str], problem: str, hint: str
) -> None:
    with pytest.raises(OperatorError) as error:
        changed_client(ClientSGD(rate=0.1), settings)
    assert problem in str(error.value)
    assert hint in f"{error.value}{error.value.hint}"
    assert error.value.hint.count("schedule.warmup_steps") <= 1


def test_settings_of_the_client_are_separate_from_those_of_the_task() -> None:
    given = GivenSettings.of(["client.rate=0.5", "concurrency=3", "client.epochs=2"])
    assert given.task == ("concurrency=3",)
    assert given.client == ("rate=0.5", "epochs=2")
    assert changed_client(ClientSGD(rate=0.1), given.client) == ClientSGD(rate=0.5, epochs=2)


def test_the_optimizer_and_the_schedule_of_the_client_can_be_set() -> None:
    adam = changed_client(
        ClientSGD(rate=0.1),
        ["optimizer=adam", "beta2=0.99", "proximal=0.1", "schedule=cosine", "schedule.end=0.2"],
    )
    assert adam == ClientSGD(
        rate=0.1, optimizer="adam", beta2=0.99, proximal=0.1, schedule=CosineDecay(end=0.2)
    )
    back = ["optimizer=sgd", "proximal=0", "schedule=constant"]
    assert changed_client(adam, back) == ClientSGD(rate=0.1)


def test_a_run_that_is_over_is_deleted(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OperatorError, match="is running and cannot be deleted") as error:
        run(server, "task", "delete", "next-word")
    assert "papaya task cancel" in error.value.hint
    assert run(server, "task", "cancel", "next-word") == 0
    assert run(server, "task", "delete", "next-word") == 0
    assert "next-word is deleted; its data are removed" in capsys.readouterr().out
    assert run(server, "task", "list") == 0
    assert "no tasks" in capsys.readouterr().err
    with pytest.raises(OperatorError, match="there is no task"):
        run(server, "task", "delete", "next-word")


def test_an_evaluation_is_shown_as_one(
    server: AdminServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "task", "evaluate", "next-word", "--clients", "3") == 0
    capsys.readouterr()
    assert run(server, "task", "show", "next-word-eval-0") == 0
    out = capsys.readouterr().out
    assert "evaluates    next-word@0" in out
    assert "until 3 have reported" in out
    assert "parameters" not in out
    assert "loss" not in out
    assert run(server, "task", "list", "--evaluations") == 0
    assert "next-word-eval-0 - - - - running - -" in " ".join(capsys.readouterr().out.split())
