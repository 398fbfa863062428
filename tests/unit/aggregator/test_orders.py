"""An aggregator and its Coordinator: orders are believed by epoch and row, reports repeat."""

from __future__ import annotations

from msgspec.structs import replace

from papaya.aggregator.aggregator import Aggregator
from papaya.aggregator.work import Drop, Folded, Restore, Snapshotted
from papaya.machine import Read, Send, Transact
from papaya.messages.control import AggregatorOrders, AggregatorReport, Placement
from papaya.messages.participation import Aborted, Alive, Completed, Joined, Retry
from papaya.messages.storage import FenceRow, Transacted, fence_key, holder_prefixes
from papaya.messages.tickets import AssignmentTicket
from tests.unit.aggregator.builders import (
    KEYRING,
    SERVER,
    TASK,
    Node,
    World,
    a_task,
    a_world,
    an_async_task,
)

H = SERVER.heartbeat_s
SOON_S = SERVER.min_report_interval_s


def orders(node: Node, *tasks: Placement, epoch: int, number: int) -> AggregatorOrders:
    return AggregatorOrders(epoch, "coordinator-1", node.machine.boot, number, 0, tasks)


# -- taking a task ----------------------------------------------------------------------------


def test_a_task_is_taken_when_orders_name_it_and_the_row_agrees() -> None:
    world = World(a_task())
    node = world.start()
    world.place(node)
    [read] = node.did(Read)
    assert read.prefixes == holder_prefixes(TASK)
    assert isinstance(world.phone(node).join(), Joined)


def test_orders_alone_give_no_authority() -> None:
    """The row names somebody else: then nothing else that was read may be believed."""
    world = World(a_task())
    world.store.rows[fence_key(TASK)] = FenceRow(2, "agg-2", 0)
    node = world.start()
    node.order([Placement(TASK, 1)])
    assert node.machine.tasks == {}
    assert node.did(Restore) == []


def test_the_row_must_name_this_boot() -> None:
    world = World(a_task())
    world.now = 50.0
    node = world.start()
    world.store.rows[fence_key(TASK)] = FenceRow(1, "agg-1", 49)
    node.order([Placement(TASK, 1)])
    assert node.machine.tasks == {}


def test_the_same_orders_again_change_nothing() -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    held = node.held()
    node.order([Placement(TASK, 1)])
    assert node.held() is held
    assert len(node.did(Read)) == 1
    assert phone.heartbeat() == Alive()


def test_a_higher_sequence_number_is_a_new_beginning() -> None:
    world, node = a_world()
    [phone] = world.joined(node, 1)
    old = node.held()
    world.place(node)
    assert node.held() is not old
    assert node.held().fence.seq == 2
    assert Drop(TASK, 1) in node.log
    assert phone.heartbeat() == Alive(), "adopted like any running client"


def test_what_orders_do_not_list_must_stop() -> None:
    world, node = a_world(an_async_task(3))
    phone, uploader = world.joined(node, 2)
    node.hold(Transact)
    handle = uploader.upload(1)
    node.order([])
    assert node.machine.tasks == {}
    answer = world.answers[handle]
    assert isinstance(answer, Retry)
    assert answer.elsewhere, "a direct upload goes on through a selector"
    assert isinstance(phone.heartbeat(), Retry)
    assert Drop(TASK, 1) in node.log
    assert node.memory_used == 0
    node.release()
    assert node.machine.tasks == {}, "the answer of a commit that nobody waits for"


def test_one_task_is_stopped_and_the_other_goes_on() -> None:
    world = World(a_task(), a_task(task="images"))
    node = world.start()
    world.place(node)
    world.place(node, "images")
    [phone] = world.joined(node, 1, "images")
    node.order([Placement("images", 1)])
    assert list(node.machine.tasks) == ["images"]
    assert phone.heartbeat() == Alive()


def test_results_of_an_earlier_sequence_number_are_ignored() -> None:
    world, node = a_world()
    world.place(node)
    before = dict(world.store.rows)
    node.receive(Folded(TASK, 1, 1, "s1"))
    node.receive(Snapshotted(TASK, 1, ()))
    node.receive(Transacted(999, "committed"))
    node.receive(Folded("unknown", 1, 1, "s1"))
    assert world.store.rows == before


# -- whom to believe --------------------------------------------------------------------------


def test_a_lower_epoch_is_ignored() -> None:
    _, node = a_world()
    node.order([Placement(TASK, 1)], epoch=5)
    node.receive(orders(node, epoch=4, number=1000))
    assert list(node.machine.tasks) == [TASK]
    assert node.machine.epoch == 5


def test_a_higher_epoch_counts_from_its_own_first_number() -> None:
    _, node = a_world()
    for _ in range(5):
        node.order([Placement(TASK, 1)])
    node.receive(orders(node, epoch=2, number=1))
    assert node.machine.tasks == {}
    assert node.machine.epoch == 2


def test_orders_that_were_overtaken_or_doubled_are_ignored() -> None:
    _, node = a_world()
    node.receive(orders(node, Placement(TASK, 1), epoch=1, number=9))
    node.receive(orders(node, epoch=1, number=8))
    node.receive(orders(node, epoch=1, number=9))
    assert list(node.machine.tasks) == [TASK]


def test_orders_for_another_boot_are_ignored() -> None:
    _, node = a_world()
    node.receive(AggregatorOrders(9, "coordinator-1", -1.0, 9, 0, ()))
    assert list(node.machine.tasks) == [TASK]
    assert node.machine.epoch == 1


def test_without_a_coordinator_an_aggregator_goes_on() -> None:
    """ "aggregators wait until a new leader coordinator is elected meanwhile continuing to operate
    based on last known assignments."
    """
    world, node = a_world(an_async_task(1))
    [phone] = world.joined(node, 1)
    for _ in range(20):
        world.pass_s(H)
        phone.heartbeat()
    assert phone.upload_for_good(1) == Completed()
    assert world.version == 1


# -- a new leader ------------------------------------------------------------------------------


def test_the_first_orders_of_a_new_leader_are_answered_with_a_report_at_once() -> None:
    _, node = a_world(a_task())
    before = len(node.reports)
    node.order([Placement(TASK, 1)], epoch=2)
    [report] = node.reports[before:]
    assert (report.epoch, report.heartbeat) == (2, False)
    assert [task.task for task in report.tasks] == [TASK]
    node.order([Placement(TASK, 1)], epoch=2)
    assert len(node.reports) == before + 1, "only the first"


def test_an_earlier_leaders_assignment_takes_no_slot_that_the_new_one_was_told_of() -> None:
    """The new leader may have assigned all of them, and does not know of this one."""
    config = a_task()
    world, node = a_world(config)
    earlier = world.phone(node)
    node.order([Placement(TASK, 1)], epoch=2)
    assert node.last_report().demand == config.concurrency
    assert earlier.join() == Aborted("full")
    assert len(world.joined(node, config.concurrency)) == config.concurrency


def test_an_earlier_leaders_assignment_takes_a_slot_that_nobody_was_told_of() -> None:
    config = a_task()
    world, node = a_world(config)
    phones = world.joined(node, config.concurrency)
    earlier = world.phone(node)
    node.order([Placement(TASK, 1)], epoch=2)
    assert node.last_report().demand == 0
    phones[0].leave()
    assert isinstance(earlier.join(), Joined), "its report is not due yet"


def test_an_assignment_of_a_version_without_epochs_is_judged_by_its_sequence_number() -> None:
    world, node = a_world(a_task())
    old = world.phone(node)
    ticket = KEYRING.open(old.assignment, AssignmentTicket)
    old.assignment = KEYRING.seal(replace(ticket, epoch=0))
    node.order([Placement(TASK, 1)], epoch=2)
    assert isinstance(old.join(), Joined)


# -- reports ----------------------------------------------------------------------------------


def test_a_report_goes_out_every_heartbeat_to_every_candidate() -> None:
    machine = Aggregator("agg", 1, 0.0, SERVER, KEYRING, ["c-1", "c-2"])
    seen = []
    for beat in range(3):
        assert machine.next_wake() == beat * H
        effects = machine.wake(beat * H)
        assert [effect.to for effect in effects if isinstance(effect, Send)] == ["c-1", "c-2"]
        [report, same] = [e.message for e in effects if isinstance(e, Send)]
        assert report == same
        assert isinstance(report, AggregatorReport)
        assert (report.node, report.boot, report.heartbeat) == ("agg", 1.0, True)
        seen.append(report.number)
    assert seen == [1, 2, 3]


def test_a_report_carries_the_epoch_it_obeys() -> None:
    world, node = a_world()
    node.order([Placement(TASK, 1)], epoch=3)
    world.pass_s(H)
    assert node.reports[-1].epoch == 3


def test_a_report_counts_what_is_active_wanted_and_ended() -> None:
    world, node = a_world()
    [phone, *_] = world.joined(node, 3)
    world.pass_s(H)
    report = node.last_report()
    assert (report.seq, report.active, report.demand, report.ended) == (1, 3, 1, 0)
    phone.leave()
    world.pass_s(H)
    report = node.last_report()
    assert (report.seq, report.active, report.demand, report.ended) == (1, 2, 2, 1)


def test_a_task_is_not_reported_before_it_is_loaded() -> None:
    world = World(a_task())
    node = world.start()
    node.hold(Read)
    world.place(node)
    world.pass_s(H)
    assert node.reports[-1].tasks == ()
    node.release()
    world.pass_s(H)
    assert node.last_report().demand == 4


def test_a_rise_of_demand_is_reported_at_once() -> None:
    world, node = a_world()
    phones = world.joined(node, 4)
    world.pass_s(H)
    assert node.last_report().demand == 0
    world.pass_s(H / 2)
    before = len(node.reports)
    phones[0].leave()
    assert len(node.reports) == before + 1
    assert not node.reports[-1].heartbeat
    assert node.last_report().demand == 1


def test_rises_close_together_share_a_report() -> None:
    world, node = a_world()
    phones = world.joined(node, 4)
    world.pass_s(H + H / 2)
    before = len(node.reports)
    for phone in phones:
        phone.leave()
    assert len(node.reports) == before + 1
    world.pass_s(SOON_S)
    assert len(node.reports) == before + 2
    assert node.last_report().demand == 4


def test_a_fall_of_demand_waits_for_the_heartbeat() -> None:
    world, node = a_world()
    world.pass_s(H / 2)
    before = len(node.reports)
    world.joined(node, 4)
    world.pass_s(H / 4)
    assert len(node.reports) == before


def test_joined_sessions_are_repeated_until_a_report_that_had_them_is_acknowledged() -> None:
    world, node = a_world()
    [first] = world.joined(node, 1)
    world.pass_s(H)
    carried = node.reports[-1].number
    assert node.last_report().joined == (first.session,)
    [second] = world.joined(node, 1)
    world.pass_s(H)
    assert node.last_report().joined == (first.session, second.session)
    node.order([Placement(TASK, 1)], acked=carried)
    world.pass_s(H)
    assert node.last_report().joined == (second.session,)
    node.order([Placement(TASK, 1)], acked=node.reports[-1].number)
    world.pass_s(H)
    assert node.last_report().joined == ()


def test_a_join_after_the_acknowledged_report_is_still_to_be_told() -> None:
    world, node = a_world()
    world.pass_s(H)
    [phone] = world.joined(node, 1)
    node.order([Placement(TASK, 1)], acked=node.reports[-1].number)
    world.pass_s(H)
    assert node.last_report().joined == (phone.session,)
