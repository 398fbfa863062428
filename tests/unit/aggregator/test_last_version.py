"""The last version that the owner asked for: exactly that one, whoever else is on his way."""

from __future__ import annotations

from papaya.aggregator.work import Step
from papaya.config import StopRule
from papaya.messages.participation import Aborted, Completed
from papaya.messages.storage import VersionRow
from tests.unit.aggregator.builders import SERVER, a_world, an_async_task


def test_updates_that_come_while_the_last_version_is_made_make_no_further_one() -> None:
    world, node = a_world(an_async_task(2, concurrency=6, stop=StopRule(versions=1)))
    phones = world.joined(node, 6)
    node.hold(Step)
    handles = [phone.upload(1) for phone in phones]
    world.pass_s(1.0)
    node.release()
    world.pass_s(1.0)

    assert [row.version for row in world.store.all(VersionRow)] == [0, 1]
    answers = [world.answers[handle] for handle in handles]
    assert answers == [Completed()] * 2 + [Aborted("task_over")] * 4
    assert world.consumed() == [phone.session for phone in phones[:2]]
    assert world.recorded() == []
    assert node.held().slots.client_demand == 0


def test_no_client_is_wanted_once_the_last_version_has_all_its_updates() -> None:
    world, node = a_world(an_async_task(2, concurrency=6, stop=StopRule(versions=1)))
    node.hold(Step)
    phones = world.joined(node, 3)
    for phone in phones[:2]:
        phone.upload(1)
    told = len(node.reports)
    world.pass_s(SERVER.min_report_interval_s)

    assert len(node.reports) == told + 1, "at once: until then clients are assigned"
    assert node.last_report().demand == 0
    assert world.phone(node).join() == Aborted("task_over")
    world.pass_s(SERVER.min_report_interval_s)
    assert len(node.reports) == told + 1, "and once"


def test_clients_are_wanted_until_the_last_version_has_all_its_updates() -> None:
    world, node = a_world(an_async_task(2, concurrency=6, stop=StopRule(versions=2)))
    node.hold(Step)
    for phone in world.joined(node, 3):
        phone.upload(1)
    world.pass_s(SERVER.heartbeat_s)
    assert node.last_report().demand > 0
