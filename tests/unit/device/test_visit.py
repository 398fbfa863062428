"""One visit over HTTP: the whole way, what is durable when, and what ends it."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from aiohttp import web
from msgspec import structs

from papaya.client.work import Finish, Trained
from papaya.device.events import Event, StageReached, StepsTrained, VisitEnded
from papaya.device.example_store import ExampleStore
from papaya.device.limits import DeviceLimits
from papaya.device.training import ProtocolTrainer, TrainingRequest
from papaya.device.use_policy import UsePolicy
from papaya.errors import OperatorError
from papaya.learning.compression import decode_update, encode_update, session_seed
from papaya.learning.definition import TaskTerms
from papaya.learning.parameters import FLOAT32
from papaya.messages.base import TaskId
from papaya.messages.participation import Aborted, Alive, Completed, Leave, Refused, Retry
from papaya.messages.selection import CheckIn, Rejected
from tests.unit.device.fake_selector import (
    GRANTED,
    PARAMETERS,
    UPDATE,
    Clock,
    FakeSelector,
    answer,
    device,
    joined,
    process,
    reset,
    serving,
    trainer,
)


class Recorder(ProtocolTrainer):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__(lambda session, length: UPDATE, lambda: 0.0, lambda: 20)
        self.given: list[TrainingRequest] = []

    async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
        self.given.append(assignment)
        assignment.step_done(3, 9)
        return await super().train(assignment, store)


class Failing(ProtocolTrainer):
    def __init__(self, error: Exception) -> None:
        super().__init__(lambda session, length: UPDATE, lambda: 0.0)
        self._error = error

    async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
        raise self._error


async def one_visit(fake: FakeSelector, **changes: Any) -> Finish:
    async with process() as host:
        with device(host, fake.url, **changes) as phone:
            return await phone.visit()


def test_a_visit_from_check_in_to_counted() -> None:
    async def scenario() -> None:
        recorder, events = Recorder(), list[Event]()
        async with serving() as fake:
            finish = await one_visit(
                fake, trainer=recorder, token="secret-7", labels=["b", "a"], notify=events.append
            )
        assert finish == Finish("counted", "")
        assert fake.completed == [UPDATE]
        steps = ["check-in", "join", "parameters", "report", "chunk", "chunk", "complete"]
        assert fake.seen == steps
        shown = [headers.get("Authorization") for headers in fake.headers]
        assert shown == ["Bearer secret-7"] + [None] * 6  # tickets do the rest
        [given] = recorder.given
        assert (given.parameters, given.session, given.program) == (PARAMETERS, "ab12", "next-word")
        assert isinstance(fake.messages[0], CheckIn)
        assert fake.messages[0].capabilities.labels == ("a", "b")
        stages = [event.stage for event in events if isinstance(event, StageReached)]
        assert stages[0] == "checking in"
        assert stages[-1] == "completing"
        [progress] = [event for event in events if isinstance(event, StepsTrained)]
        assert (progress.task, progress.done, progress.steps) == ("next-word", 3, 9)
        assert isinstance(events[-1], VisitEnded)
        assert (events[-1].ending, events[-1].task) == ("counted", "next-word")
        assert "secret-7" not in repr(events)

    asyncio.run(scenario())


@pytest.mark.parametrize("bits", [8, 16])
def test_an_update_is_uploaded_in_as_many_bits_as_the_server_asks_for(bits: Literal[8, 16]) -> None:
    async def scenario() -> None:
        async with serving() as fake:
            fake.replace["join"] = answer(joined(upload_bits=bits))
            assert (await one_visit(fake)).ending == "counted"
        assert isinstance(fake.messages[0], CheckIn)
        assert fake.messages[0].capabilities.upload_bits == 8
        [uploaded] = fake.completed
        length = len(UPDATE) // 4
        numbers = np.frombuffer(UPDATE, FLOAT32)
        assert uploaded == encode_update(numbers, bits, session_seed("ab12"))
        step = np.abs(numbers).max() / (127 if bits == 8 else 32_767)
        decoded = decode_update([uploaded], length, bits)
        np.testing.assert_allclose(decoded, numbers, atol=1.01 * step)

    asyncio.run(scenario())


@pytest.mark.parametrize("changes", [{"secure": True}, {"evaluates": True}])
def test_a_server_that_asks_for_fewer_bits_of_what_must_be_exact_gets_nothing(
    changes: dict[str, bool],
) -> None:
    async def scenario() -> None:
        async with serving() as fake:
            fake.replace["join"] = answer(joined(upload_bits=8, **changes))
            finish = await one_visit(fake)
        assert (finish.ending, finish.reason) == ("failed", "protocol")
        assert "chunk" not in fake.seen

    asyncio.run(scenario())


def test_the_participation_is_on_disk_when_the_first_byte_arrives(tmp_path: Path) -> None:
    found: list[tuple[str, int]] = []

    async def look(request: web.Request) -> web.StreamResponse:
        with closing(sqlite3.connect(tmp_path / "device.db")) as database:
            found.extend(database.execute("SELECT task, count FROM participation").fetchall())
        return await answer(Refused("enough seen"))(request)

    async def scenario() -> None:
        async with serving() as fake:
            fake.replace["chunk"] = look
            await one_visit(fake, store=tmp_path / "device.db")

    asyncio.run(scenario())
    assert found == [("next-word", 1)]


def test_a_history_that_cannot_be_written_lets_nothing_out(tmp_path: Path) -> None:
    path = tmp_path / "device.db"

    async def break_it(request: web.Request) -> web.StreamResponse:
        with closing(sqlite3.connect(path)) as database:
            database.execute("DROP TABLE participation")
            database.commit()
        return await answer(GRANTED)(request)

    async def scenario() -> None:
        async with serving() as fake:
            fake.replace["report"] = break_it
            finish = await one_visit(fake, store=path)
        assert finish == Finish("failed", "storage")
        assert "chunk" not in fake.seen
        assert fake.seen[-1] == "leave"

    asyncio.run(scenario())


def test_a_device_asks_a_task_again_until_it_has_declined_it(tmp_path: Path) -> None:
    """A rogue server cannot bar it for good, and it does not take a slot at each visit."""
    path, month_s, excluded = tmp_path / "device.db", 30 * 86400.0, []

    async def scenario() -> None:
        clock = Clock()
        async with serving() as fake:

            async def visit() -> str:
                async with process(now=clock) as host:
                    with device(host, fake.url, store=path) as phone:
                        finish = await phone.visit()
                asked = [m for m in fake.messages if isinstance(m, CheckIn)]
                excluded.append(asked[-1].excluded)
                return finish.reason or finish.ending

            fake.joined = joined(participation_gap_s=1e300)
            assert await visit() == "counted"
            clock.pass_(month_s + 60_000.0)  # not at the same time of day
            assert [await visit() for _ in range(2)] == ["declined", "declined"]
            clock.pass_(month_s)
            fake.joined = joined()
            assert await visit() == "counted"

    asyncio.run(scenario())
    # The fake assigns the task all the same.
    assert excluded == [(), (), ("next-word",), ()]


def test_a_declined_join_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    path, events = tmp_path / "device.db", list[Event]()

    async def break_it(request: web.Request) -> web.StreamResponse:
        with closing(sqlite3.connect(path)) as database:
            database.execute("DROP TABLE declined")
            database.commit()
        return await answer(joined(participation_gap_s=1e300))(request)

    async def scenario() -> None:
        clock = Clock()
        async with serving() as fake, process(now=clock) as host:
            with device(host, fake.url, store=path, notify=events.append) as phone:
                fake.joined = joined(participation_gap_s=1e300)
                await phone.visit()
                clock.pass_(31 * 86400.0)
                fake.replace["join"] = break_it
                finish = await phone.visit()
        assert (finish.ending, finish.reason) == ("gave_up", "declined")
        assert fake.seen[-1] == "leave"

    asyncio.run(scenario())
    assert isinstance(events[-1], VisitEnded)
    assert "cannot use the device's file" in events[-1].detail


def test_another_process_of_the_same_device_is_noticed_before_the_upload(tmp_path: Path) -> None:
    """Both read an empty history; the one that records second sends nothing."""

    async def scenario() -> None:
        async with serving() as fake, process() as host:
            both_are_here = asyncio.Event()

            async def together(request: web.Request) -> web.StreamResponse:
                if fake.seen.count("report") == 2:
                    both_are_here.set()
                await both_are_here.wait()
                return await answer(GRANTED)(request)

            fake.replace["report"] = together
            path = tmp_path / "device.db"
            with device(host, fake.url, store=path) as a, device(host, fake.url, store=path) as b:
                endings = await asyncio.gather(a.visit(), b.visit())
        assert sorted(finish.ending for finish in endings) == ["counted", "failed"]
        assert fake.completed == [UPDATE]

    asyncio.run(scenario())


class Keeping(Recorder):
    """Trains a state that stays on the device."""

    def terms(self, program: TaskId) -> TaskTerms:
        return TaskTerms(False, 5, 1500, 10, None, None, collection="text")

    async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
        trained = await super().train(assignment, store)
        return structs.replace(trained, device_state=assignment.device_state + b"+")


def test_a_state_is_kept_once_the_update_is_counted_and_given_to_the_next_training(
    tmp_path: Path,
) -> None:
    """Neither training nor an upload that the server does not count changes it."""
    path, keeping, found = tmp_path / "device.db", Keeping(), list[list[tuple[bytes]]]()

    def kept() -> list[tuple[bytes]]:
        with closing(sqlite3.connect(path)) as database:
            return database.execute("SELECT state FROM device_state").fetchall()

    async def look(request: web.Request) -> web.StreamResponse:
        found.append(kept())
        return await answer(Completed())(request)

    async def scenario() -> None:
        async with serving() as fake:
            policies = {"text": UsePolicy(tasks=("*",))}
            for where, reply, state in (
                ("report", answer(Aborted("stale")), []),
                ("chunk", answer(Refused("enough seen")), []),
                ("complete", answer(Completed("round_over")), []),
                ("complete", look, [(b"+",)]),
                ("complete", answer(Aborted("stale")), [(b"+",)]),
                ("complete", look, [(b"++",)]),
            ):
                fake.replace = {where: reply}
                await one_visit(fake, store=path, policies=policies, trainer=keeping)
                assert kept() == state
                with closing(sqlite3.connect(path)) as database:
                    database.execute("DELETE FROM participation")  # the gap has passed
                    database.commit()

    asyncio.run(scenario())
    given = [given.device_state for given in keeping.given]
    assert given == [b"", b"", b"", b"", b"+", b"+"]
    assert found == [[], [(b"+",)]], "it is not kept before the server has the whole update"


def test_a_state_that_cannot_be_kept_is_reported(tmp_path: Path) -> None:
    """The update is counted all the same: a device cannot take it back."""
    path, events = tmp_path / "device.db", list[Event]()

    async def break_it(request: web.Request) -> web.StreamResponse:
        with closing(sqlite3.connect(path)) as database:
            database.execute("DROP TABLE device_state")
            database.commit()
        return await answer(Completed())(request)

    async def scenario() -> None:
        async with serving() as fake:
            fake.replace["complete"] = break_it
            finish = await one_visit(
                fake,
                store=path,
                policies={"text": UsePolicy(tasks=("*",))},
                trainer=Keeping(),
                notify=events.append,
            )
        assert finish.ending == "counted"

    asyncio.run(scenario())
    assert isinstance(events[-1], VisitEnded)
    assert "counted, but the personal tensors could not be stored: " in events[-1].detail


@pytest.mark.parametrize(
    ("where", "reply", "finish"),
    [
        ("check-in", Rejected("no demand", 3.0, 9.0), Finish("rejected", "no demand", 3.0, 9.0)),
        ("check-in", Refused("no token"), Finish("refused", "no token")),
        ("join", Aborted("full"), Finish("aborted", "full")),
        ("report", Aborted("stale"), Finish("aborted", "stale")),
        ("complete", Refused("expired"), Finish("refused", "expired")),
    ],
)
def test_the_server_ends_it(
    where: str, reply: Rejected | Refused | Aborted, finish: Finish
) -> None:
    async def scenario() -> None:
        async with serving() as fake:
            fake.replace[where] = answer(reply, 403 if isinstance(reply, Refused) else 200)
            assert await one_visit(fake) == finish
            assert fake.seen[-1] == where

    asyncio.run(scenario())


def test_a_retry_and_a_broken_connection_are_asked_again() -> None:
    async def scenario() -> None:
        async with serving() as fake:

            async def only_once(request: web.Request) -> web.StreamResponse:
                del fake.replace["join"]
                return await answer(Retry("moving", 0.0), 503)(request)

            async def broken_once(request: web.Request) -> web.StreamResponse:
                del fake.replace["chunk"]
                return await reset(request)

            fake.replace |= {"join": only_once, "chunk": broken_once}
            assert (await one_visit(fake)).ending == "counted"
            assert fake.seen.count("join") == 2
            assert fake.completed == [UPDATE]

    asyncio.run(scenario())


def test_another_selector_takes_over() -> None:
    async def scenario() -> None:
        async with serving() as dead, serving() as fake, process() as host:
            for path in ("check-in", "join", "report", "chunk", "complete", "parameters"):
                dead.replace[path] = reset
            with device(host, dead.url, fake.url) as phone:
                assert (await phone.visit()).ending == "counted"
        assert fake.completed == [UPDATE]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (OperatorError("no examples of mine"), "no examples of mine"),
        (RuntimeError("segfault"), "RuntimeError: segfault"),
    ],
)
def test_a_trainer_that_fails_says_nothing_of_it_to_the_server(
    error: Exception, detail: str
) -> None:
    async def scenario() -> None:
        events: list[Event] = []
        async with serving() as fake:
            finish = await one_visit(fake, trainer=Failing(error), notify=events.append)
        assert finish == Finish("failed", "training_failed")
        [leave] = [message for message in fake.messages if isinstance(message, Leave)]
        assert leave.reason == "training_failed"
        assert isinstance(events[-1], VisitEnded)
        assert events[-1].detail == detail

    asyncio.run(scenario())


def test_an_update_of_the_wrong_size_is_not_sent() -> None:
    async def scenario() -> None:
        async with serving() as fake:
            fake.joined = joined(update_length=4)
            assert await one_visit(fake) == Finish("failed", "training_failed")
            assert "report" not in fake.seen

    asyncio.run(scenario())


def test_heartbeats_go_on_while_it_trains_and_an_abort_ends_the_training() -> None:
    async def scenario() -> None:
        async with serving() as fake:
            fake.joined = joined(heartbeat_s=0.2)

            async def second_is_fatal(request: web.Request) -> web.StreamResponse:
                fake.replace["heartbeat"] = answer(Aborted("stale"))
                return await answer(Alive())(request)

            fake.replace["heartbeat"] = second_is_fatal
            finish = await one_visit(fake, trainer=trainer(seconds=60.0))
        assert finish == Finish("aborted", "stale")
        # On a busy machine a third is sent before the answer to the second has been read.
        assert fake.seen.count("heartbeat") >= 2

    asyncio.run(scenario())


def test_training_ends_at_the_devices_own_limit() -> None:
    async def scenario() -> None:
        clock = Clock()

        class Endless(ProtocolTrainer):
            async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
                assert assignment.timeout_s == 50.0
                clock.pass_(51.0)
                return await super().train(assignment, store)

        endless = Endless(lambda session, length: UPDATE, lambda: 60.0)
        async with serving() as fake:
            fake.joined = joined(training_timeout_s=1e300, heartbeat_s=1e300)
            limits = DeviceLimits(max_training_s=50.0, max_heartbeat_s=0.2)
            async with process(limits=limits, now=clock) as host:
                with device(host, fake.url, trainer=endless) as phone:
                    finish = await phone.visit()
        assert finish == Finish("failed", "timed_out", detail="training took too long")
        assert fake.seen[-1] == "leave"

    asyncio.run(scenario())


def test_cancelled_it_vanishes_without_a_word() -> None:
    async def scenario() -> None:
        async with serving() as fake, process() as host:
            with device(host, fake.url, trainer=trainer(seconds=60.0)) as phone:
                visit = asyncio.create_task(phone.visit())
                await fake.arrival("parameters").wait()
                visit.cancel()
                await asyncio.gather(visit, return_exceptions=True)
            assert "leave" not in fake.seen

    asyncio.run(scenario())
