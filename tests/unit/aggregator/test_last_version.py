"""The last version that the owner asked for: exactly that one, whoever else is on his way."""

from __future__ import annotations

from papaya.aggregator.work import Step
from papaya.config import StopRule
from papaya.messages.participation import Aborted, Completed
from papaya.messages.storage import VersionRow
from tests.unit.aggregator.builders import a_world, an_async_task


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
    assert node.held().config_demand == 0
