"""The paper's appendix "Failure Recovery", with a real coordinator and real aggregators."""

from __future__ import annotations

from papaya.aggregator.work import Drop
from papaya.config import TaskConfig
from papaya.machine import Send
from papaya.messages.control import AggregatorOrders, AggregatorReport, Route, SelectorOrders
from papaya.messages.participation import Alive, Completed, Joined, Retry
from tests.unit.aggregator.builders import SERVER, TASK, Node, World, a_task, an_async_task
from tests.unit.coordinator.builders import Office, orders_in, sessions_in

H = SERVER.heartbeat_s
RECOVERY_S = SERVER.recovery_s


class Servers:
    """Aggregators over one store, a coordinator or none, and the messages between them."""

    def __init__(self, world: World, *names: str) -> None:
        self.world = world
        self.nodes = [world.start(name) for name in names]
        self.office: Office | None = None
        self.cut_off: list[Node] = []
        self._delivered: dict[str, int] = {}

    def lead(self, name: str) -> Office:
        """A coordinator starts; the one before, if any, is gone."""
        self.office = Office(node=name, store=self.world.store, now=self.world.now)
        self.office.wake()
        return self.office

    def office_tasks(self) -> list[str]:
        assert self.office is not None
        return list(self.office.machine.rows.tasks)

    def beat(self, count: int = 1) -> list[Send]:
        """Heartbeats of everybody, and everything that is said because of them."""
        said: list[Send] = []
        for _ in range(count):
            self.world.pass_s(H)
            if self.office is not None:
                said += self.office.pass_s(self.world.now - self.office.now)
            said += self.deliver()
        return said

    def deliver(self) -> list[Send]:
        said: list[Send] = []
        for node in self.world.nodes:
            start = self._delivered.get(node.name, 0)
            self._delivered[node.name] = len(node.reports)
            if self.office is not None and node not in self.cut_off:
                for report in node.reports[start:]:
                    said += self.office.receive(report)
        for send in said:
            for node in self.world.nodes:
                if send.to == node.name and node not in self.cut_off:
                    node.receive(send.message)
        return said


def servers(*names: str, tasks: int = 1, config: TaskConfig | None = None) -> Servers:
    """All tasks are placed and served, past the adoption window."""
    system = Servers(World(), *names)
    system.lead("c-1")
    system.beat()
    for i in range(tasks):
        system.world.submit(config or a_task(task=TASK if i == 0 else f"task-{i}"))
    system.beat(4)
    return system


def holder(system: Servers, task: str = TASK) -> Node:
    [node] = [node for node in system.world.nodes if task in node.machine.tasks]
    return node


# -- client participation ---------------------------------------------------------------------


def test_participating_clients_are_not_affected_by_coordinator_failure() -> None:
    """Client Participation: "Upon coordinator failure participating clients are not affected"."""
    system = servers("agg-1")
    phones = system.world.joined(holder(system), 4)
    system.office = None
    for _ in range(10):
        system.beat()
        assert [phone.heartbeat() for phone in phones] == 4 * [Alive()]
    assert [phone.upload_for_good(1) for phone in phones] == 4 * [Completed()]
    assert system.world.version == 2


def test_aggregators_continue_on_the_last_known_assignments() -> None:
    """Client Participation: "Selectors and aggregators wait until a new leader coordinator is
    elected meanwhile continuing to operate based on last known assignments." Even who was accepted
    before the failure and joins after it is served.
    """
    system = servers("agg-1")
    node = holder(system)
    accepted = system.world.phone(node)
    system.office = None
    system.beat(2)
    assert isinstance(accepted.join(), Joined)
    system.beat(20)
    assert node.held().fence.seq == 1


def test_no_new_clients_are_assigned_for_the_duration_of_the_recovery_and_then_again() -> None:
    """Client Participation: "only for the duration of the recovery no new clients are assigned.
    [...] After the leader election coordinator enters the recovery period (typically 30s) to
    rebuild the current assignment map from aggregator reports and then resumes assignments." Here
    each task resumes with the first report of its aggregator; the period is how long a new leader
    waits for one.
    """
    assert RECOVERY_S == 30
    system = servers("agg-1")
    system.cut_off.append(holder(system))
    office = system.lead("c-2")
    waited = 0
    while not office.leads:
        assert sessions_in(system.beat() + office.selector("sel-1", 10)) == []
        waited += 1
    assert waited == 3, "the lease of the leader that failed"
    assert sessions_in(system.beat(2) + office.selector("sel-1", 10)) == []
    system.cut_off.clear()
    assert sessions_in(system.beat()) == [], "the aggregator does not follow this leader yet"
    assert len(sessions_in(system.deliver())) == 4


def test_the_assignment_map_is_rebuilt_from_aggregator_reports() -> None:
    """The same sentence: "to rebuild the current assignment map from aggregator reports". Who
    reports keeps its task, and demand is known from the first report on.
    """
    system = servers("agg-1", "agg-2", tasks=4)
    before = {task: holder(system, task) for task in system.office_tasks()}
    system.world.joined(holder(system), 1)
    office = system.lead("c-2")
    system.beat(3)
    assert office.leads
    system.beat(8)
    assert {task: holder(system, task) for task in before} == before
    assert all(office.fence(task).seq == 1 for task in before)
    [orders] = orders_in(office.selector("sel-1"), SelectorOrders)
    assert {route.task: route.aggregator for route in orders.routes} == {
        task: node.name for task, node in before.items()
    }
    assert all(office.machine.demand.of(task) > 0 for task in before)


# -- task execution ---------------------------------------------------------------------------


def test_failure_is_detected_after_several_missed_heartbeats() -> None:
    """Task Execution: "Upon aggregator failure or unresponsiveness, coordinator detects failures
    after several missed heartbeats".
    """
    system = servers("agg-1", "agg-2")
    failed = holder(system)
    system.world.crash(failed)
    assert system.office is not None
    missed = 0
    while system.office.fence().aggregator == failed.name:
        system.beat()
        missed += 1
    assert missed == 3


def test_all_tasks_are_reassigned_and_the_new_map_is_distributed() -> None:
    """Task Execution: "and reassigns all tasks to other aggregators, updates and distributes the
    new assignment map to selectors."
    """
    system = servers("agg-1", "agg-2", "agg-3", tasks=6)
    office = system.office
    assert office is not None
    failed = holder(system)
    moved = list(failed.machine.tasks)
    assert len(moved) == 2
    system.world.crash(failed)
    said: list[Send] = []
    for _ in range(4):
        office.selector("sel-1")
        said += system.beat()
    for task in moved:
        assert holder(system, task) is not failed
        told = [
            orders for orders in orders_in(said, SelectorOrders, "sel-1") if is_told(orders, task)
        ]
        assert told, "the selector was told without asking"


def is_told(orders: SelectorOrders, task: str) -> bool:
    return any(route.task == task and route.seq == 2 for route in orders.routes)


def test_the_impact_of_a_failure_is_isolated() -> None:
    """Failure Recovery: "Fast recovery and isolated impact from failures"."""
    system = servers("agg-1", "agg-2", tasks=2)
    failed = holder(system)
    [other_task] = [task for task in system.office_tasks() if holder(system, task) is not failed]
    survivor = holder(system, other_task)
    [phone] = system.world.joined(survivor, 1, other_task)
    system.world.crash(failed)
    for _ in range(5):
        system.beat()
        assert phone.heartbeat() == Alive()
    assert survivor.held(other_task).fence.seq == 1


def test_the_task_goes_on_at_its_new_aggregator_with_its_running_clients() -> None:
    """Coordinator: it "ensures that tasks progress in the face of Aggregator failures"."""
    system = servers("agg-1", "agg-2", config=an_async_task(2))
    world, failed = system.world, holder(system)
    counted, training = world.joined(failed, 2)
    assert counted.upload_for_good(2) == Completed()
    system.beat()
    world.crash(failed)
    system.beat(3)
    training.node = holder(system)
    assert training.heartbeat() == Alive()
    system.beat()
    assert training.upload_for_good(4) == Completed()
    assert world.version == 1
    assert world.parameters(1) == [3, 0, 0, 0], "nothing that was acknowledged is lost"


def test_an_unresponsive_aggregator_is_told_to_stop_its_stale_assignment() -> None:
    """Task Execution: "Coordinator detects stale assignments in aggregator reports via sequence
    numbers and requests to stop executing stale assignments."
    """
    system = servers("agg-1", "agg-2")
    office = system.office
    assert office is not None
    unresponsive = holder(system)
    system.cut_off.append(unresponsive)
    system.beat(4)
    assert office.fence().aggregator != unresponsive.name
    assert unresponsive.held().fence.seq == 1, "it does not know"
    assert [report.seq for report in unresponsive.reports[-1].tasks] == [1]
    system.cut_off.clear()
    said = system.beat()
    [orders] = orders_in(said, AggregatorOrders, unresponsive.name)
    assert orders.tasks == ()
    assert unresponsive.machine.tasks == {}
    assert Drop(TASK, 1) in unresponsive.log


def test_a_stale_assignment_counts_nothing_even_before_it_is_stopped() -> None:
    """The same sentence, seen from the store: the sequence number is checked by every write."""
    system = servers("agg-1", "agg-2")
    world = system.world
    stale = holder(system)
    phones = world.joined(stale, 1)
    system.cut_off.append(stale)
    for _ in range(4):
        system.beat()
        phones[0].heartbeat()
    handle = phones[0].upload(1)
    assert isinstance(world.answers[handle], Retry)
    assert world.recorded() == []


def test_maps_are_refreshed_on_every_report() -> None:
    """Client Routing: "assignment maps (model training task to corresponding aggregator identity)
    refreshed from coordinator on every report."
    """
    system = servers("agg-1")
    office = system.office
    assert office is not None
    for _ in range(3):
        [orders] = orders_in(office.selector("sel-1"), SelectorOrders, "sel-1")
        assert orders.routes == (Route(TASK, "agg-1", 1),)


def test_transient_client_failures_do_not_cause_dropout() -> None:
    """Client Independence: "transient client failures do not cause clients to dropout because the
    client protocol is based on virtual sessions instead of persistent connections."
    """
    system = servers("agg-1")
    [phone] = system.world.joined(holder(system), 1)
    system.beat(2)  # out of reach for almost three heartbeats
    assert phone.heartbeat() == Alive()
    phone.report()
    phone.chunk(0, b"\0" * 8)
    system.beat(2)  # and again in the middle of its upload: the slot is gone, the session is not
    phone.send(1)
    handle = phone.complete()
    system.beat()
    assert system.world.answers[handle] == Completed()


def test_reports_are_all_that_a_new_leader_has_to_go_by() -> None:
    """Client Participation: a report names every task with its sequence number."""
    system = servers("agg-1", tasks=2)
    report = holder(system).reports[-1]
    assert isinstance(report, AggregatorReport)
    assert {(task.task, task.seq) for task in report.tasks} == {(TASK, 1), ("task-1", 1)}
