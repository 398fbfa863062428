"""What `papaya doctor` counts; tests/system/test_doctor.py runs it."""

from __future__ import annotations

from papaya.cli.doctor import running_tasks
from papaya.messages.storage import TaskState
from papaya.server.admin.views import SystemStatus, TaskView


def a_view(task: str, state: TaskState, evaluates: str = "") -> TaskView:
    return TaskView(
        task=task,
        state=state,
        why="",
        regime="AsyncFL",
        concurrency=1,
        aggregation_goal=1,
        version=0,
        submitted=0.0,
        ended=0.0,
        evaluates=evaluates,
    )


def test_evaluations_are_not_counted_as_tasks() -> None:
    status = SystemStatus(
        roles=(),
        leads=True,
        recovers=False,
        just_started=False,
        leader="server",
        epoch=1,
        aggregators=(),
        selectors=(),
        tasks=(
            a_view("words", "running"),
            a_view("words-eval-5", "running", "words@5"),
            a_view("old", "completed"),
        ),
    )
    assert running_tasks(status) == 1
