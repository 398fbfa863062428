"""Metrics: text that Prometheus reads, numbers that are those of the machines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.errors import InvariantError
from papaya.server.collectors import (
    STALENESS,
    DriverMetrics,
    aggregator_collector,
    coordinator_collector,
    selector_collector,
)
from papaya.server.metrics import (
    Collector,
    Family,
    MetricSample,
    Registry,
    exposition,
    histogram_of,
)
from tests.unit.aggregator.builders import World, a_world, an_async_task, make_version
from tests.unit.coordinator.builders import a_served_office, an_office
from tests.unit.coordinator.builders import a_task as a_placed_task
from tests.unit.selector.builders import BOOT, an_open_selector, check_in

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]

# -- a strict reader of the text format, version 0.0.4 ----------------------------------------

_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
_NUMBER = r"[+-]Inf|NaN|-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? ({_NUMBER})", re.ASCII
)
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def parse(text: str) -> Series:
    """Every series; AssertionError for whatever the format does not allow."""
    assert text.endswith("\n")
    series: Series = {}
    seen: list[str] = []
    name = kind = ""
    lines = iter(text[:-1].split("\n") if text != "\n" else [])
    for line in lines:
        if line.startswith("# HELP "):
            _, _, name, help_ = line.split(" ", 3)
            assert re.fullmatch(r"(?:[^\\]|\\\\|\\n)*", help_)
            typed = re.fullmatch(rf"# TYPE {name} (counter|gauge|histogram)", next(lines))
            assert typed is not None
            kind = typed[1]
            assert name not in seen, "all lines of a metric stand together"
            assert kind != "counter" or name.endswith("_total")
            seen.append(name)
            continue
        found = _SAMPLE.fullmatch(line)
        assert found is not None, line
        assert found[1] in [name + suffix for suffix in _SUFFIXES[kind]]
        pairs = re.findall(_LABEL, found[2] or "")
        labels = tuple((n, re.sub(r"\\.", lambda m: _ESCAPES[m[0]], v)) for n, v in pairs)
        assert len({label for label, _ in labels}) == len(labels)
        assert (found[1], labels) not in series, "no series appears twice"
        series[found[1], labels] = float(found[found.re.groups])
    check_histograms(series)
    return series


def check_histograms(series: Series) -> None:
    for (name, labels), value in series.items():
        if name.endswith("_count"):
            base = name.removesuffix("_count")
            buckets = [
                (float(dict(found)["le"]), count)
                for (other, found), count in series.items()
                if other == f"{base}_bucket" and _without_bound(found) == labels
            ]
            assert buckets == sorted(buckets), "bounds and counts only grow"
            assert buckets[-1] == (math.inf, value)
            assert (f"{base}_sum", labels) in series


def _without_bound(labels: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in labels if pair[0] != "le")


def scrape(*collectors: Collector) -> Callable[..., float]:
    """A function that gives the value of one series."""
    registry = Registry()
    for collector in collectors:
        registry.collect(collector)
    series = parse(registry.text())
    return lambda name, **labels: series[f"papaya_{name}", tuple(labels.items())]


# -- the format -----------------------------------------------------------------------------


def test_the_text_is_the_one_of_the_specification() -> None:
    registry = Registry()
    requests = registry.counter("papaya_requests_total", "Requests.", "route", "status")
    requests.add(2, "/v1/join", "200")
    requests.add(1, "/v1/join", "503")
    registry.gauge("papaya_open", "Open\nconnections.").set(1.5)
    seconds = registry.histogram("papaya_seconds", "Time.", bounds=(0.1, 1))
    for value in (0.05, 0.1, 0.5, 3):
        seconds.observe(value)
    assert registry.text().splitlines() == [
        "# HELP papaya_requests_total Requests.",
        "# TYPE papaya_requests_total counter",
        'papaya_requests_total{route="/v1/join",status="200"} 2',
        'papaya_requests_total{route="/v1/join",status="503"} 1',
        r"# HELP papaya_open Open\nconnections.",
        "# TYPE papaya_open gauge",
        "papaya_open 1.5",
        "# HELP papaya_seconds Time.",
        "# TYPE papaya_seconds histogram",
        'papaya_seconds_bucket{le="0.1"} 2',
        'papaya_seconds_bucket{le="1"} 3',
        'papaya_seconds_bucket{le="+Inf"} 4',
        "papaya_seconds_sum 3.65",
        "papaya_seconds_count 4",
    ]


TEXT = st.text(max_size=20) | st.text(alphabet='\\"\n{}, =', max_size=20)


@given(st.dictionaries(st.tuples(TEXT, TEXT), st.floats(allow_nan=False), max_size=5), TEXT)
def test_whatever_stands_in_a_label_is_read_back(
    values: dict[tuple[str, str], float], help_: str
) -> None:
    registry = Registry()
    gauge = registry.gauge("papaya_thing", help_, "one", "other")
    for labels, value in values.items():
        gauge.set(value, *labels)
    assert parse(registry.text()) == {
        ("papaya_thing", (("one", one), ("other", other))): value
        for (one, other), value in values.items()
    }


@given(st.lists(st.floats(0, 100)), st.sets(st.integers(0, 90), min_size=1).map(sorted))
def test_a_histogram_counts_what_is_not_above_each_bound(
    values: list[float], bounds: Sequence[int]
) -> None:
    registry = Registry()
    histogram = registry.histogram("papaya_thing", "A thing.", "kind", bounds=bounds)
    for value in values:
        histogram.observe(value, "a")
    series = parse(registry.text())
    for bound in bounds if values else ():
        expected = sum(value <= bound for value in values)
        assert series["papaya_thing_bucket", (("kind", "a"), ("le", str(bound)))] == expected


@given(st.lists(st.integers(0, 150)))
def test_a_histogram_of_counted_values_is_the_same(values: list[int]) -> None:
    registry = Registry()
    histogram = registry.histogram("papaya_thing", "A thing.", bounds=STALENESS)
    for value in values:
        histogram.observe(value)
    counted = {value: values.count(value) for value in values}
    samples = tuple(histogram_of((), STALENESS, counted)) if values else ()
    assert exposition([Family("papaya_thing", "histogram", "A thing.", samples)]) == registry.text()


def test_a_counter_without_labels_is_there_before_anything_happened() -> None:
    registry = Registry()
    registry.counter("papaya_lost_total", "Lost.")
    assert parse(registry.text()) == {("papaya_lost_total", ()): 0}


def test_families_of_one_name_from_several_collectors_stand_together() -> None:
    families = [
        Family("papaya_a", "gauge", "A.", (MetricSample((("node", "one"),), 1),)),
        Family("papaya_b", "gauge", "B.", (MetricSample((), 2),)),
        Family("papaya_a", "gauge", "A.", (MetricSample((("node", "two"),), 3),)),
    ]
    assert len(parse(exposition(families))) == 3


@pytest.mark.parametrize("name", ["requests_total", "papaya_Requests_total", "papaya_a-b_total"])
def test_a_name_that_breaks_the_conventions_is_refused(name: str) -> None:
    with pytest.raises(InvariantError, match=name):
        Registry().counter(name, "Help.")


def test_only_counters_end_in_total() -> None:
    with pytest.raises(InvariantError):
        Registry().counter("papaya_requests", "Help.")
    with pytest.raises(InvariantError):
        Registry().gauge("papaya_requests_total", "Help.")
    with pytest.raises(InvariantError):
        Registry().histogram("papaya_seconds", "Help.", "le")


def test_two_metrics_of_one_name_are_refused() -> None:
    registry = Registry()
    registry.gauge("papaya_thing", "Help.")
    with pytest.raises(InvariantError, match="papaya_thing"):
        registry.histogram("papaya_thing", "Help.")


def test_nothing_is_lost_when_threads_count_together() -> None:
    registry = Registry()
    counter = registry.counter("papaya_folds_total", "Folds.", "thread")
    seconds = registry.histogram("papaya_fold_seconds", "Time.")

    def count(_: int) -> None:
        for _ in range(2000):
            counter.add(1, "any")
            seconds.observe(0.5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    series = parse(registry.text())
    assert series["papaya_folds_total", (("thread", "any"),)] == 8000
    assert series["papaya_fold_seconds_count", ()] == 8000
    assert series["papaya_fold_seconds_sum", ()] == 4000


# -- the machines -----------------------------------------------------------------------------


def of_aggregator(world: World) -> Callable[..., float]:
    [node] = world.nodes
    return scrape(aggregator_collector(node.machine, lambda: world.now))


def test_a_task_tells_demand_utilization_and_how_full_its_buffer_is() -> None:
    world, node = a_world(an_async_task(3, concurrency=8))
    phones = world.joined(node, 3)
    assert phones[0].upload_for_good(1) is not None
    value, task = of_aggregator(world), node.held().task
    assert value("task_serving", task=task) == 1
    assert value("task_concurrency", task=task) == 8
    assert value("task_active_clients", task=task) == 2
    assert value("task_demand", task=task) == 6
    assert value("task_utilization_ratio", task=task) == 0.25
    assert value("task_aggregation_goal", task=task) == 3
    assert value("task_buffer_updates", task=task) == 1
    assert value("task_version", task=task) == 0
    assert value("task_joined_total", task=task) == 3
    assert value("task_trips_total", task=task) == 1
    assert value("task_counted_total", task=task) == 1


def test_staleness_and_versions_are_told() -> None:
    world, node = a_world(an_async_task(1))
    [slow] = world.joined(node, 1)
    for _ in range(4):
        make_version(world, node)
    slow.upload_for_good(1)
    value, task = of_aggregator(world), node.held().task
    assert value("task_versions_total", task=task) == 5
    assert value("task_version", task=task) == 5
    assert value("task_staleness_versions_count", task=task) == 5
    assert value("task_staleness_versions_sum", task=task) == 4
    assert value("task_staleness_versions_bucket", task=task, le="0") == 4
    assert value("task_staleness_versions_bucket", task=task, le="2") == 4
    assert value("task_staleness_versions_bucket", task=task, le="5") == 5


def test_discarded_and_aborted_are_told_with_their_reasons() -> None:
    world, node = a_world(an_async_task(1, max_staleness=1))
    gone, broken, stale = world.joined(node, 3)
    gone.leave()
    broken.upload_for_good(math.nan)
    for _ in range(2):
        make_version(world, node)
    value, task = of_aggregator(world), node.held().task
    assert stale.heartbeat() is not None
    assert value("task_sessions_aborted_total", task=task, reason="left") == 1
    assert value("task_sessions_aborted_total", task=task, reason="stale") == 1
    assert value("task_updates_discarded_total", task=task, reason="not_finite") == 1


def test_a_task_that_still_loads_is_told_without_numbers_that_it_has_not() -> None:
    world = World(an_async_task(1))
    node = world.start()
    world.place(node)
    node.held().load()
    value, task = of_aggregator(world), node.held().task
    assert value("task_serving", task=task) == 0
    assert value("task_demand", task=task) == 0
    with pytest.raises(KeyError):
        value("task_version", task=task)


def test_an_aggregator_without_tasks_has_nothing_to_tell() -> None:
    world = World()
    node = world.start()
    assert list(aggregator_collector(node.machine, lambda: 0.0)()) == []


def test_a_selector_tells_how_many_it_holds() -> None:
    selector = an_open_selector()
    for device in range(3):
        selector.receive(BOOT, check_in(), device)
    assert scrape(selector_collector(selector))("selector_held_check_ins") == 3


def test_a_coordinator_tells_who_leads_and_what_is_leased() -> None:
    office = a_served_office(a_placed_task(), demand=4)
    office.selector("sel-1", 3)
    value = scrape(coordinator_collector(office.machine, lambda: office.now))
    assert value("coordinator_leader") == 1
    assert value("coordinator_epoch") == 1
    assert value("coordinator_tasks") == 1
    assert value("coordinator_selectors") == 1
    assert value("coordinator_aggregators") == len(office.machine.fleet.aggregators) == 1
    assert value("coordinator_leases", task="words") == 3
    assert value("coordinator_demand", task="words") == 1


def test_a_candidate_that_lost_its_lease_does_not_lead() -> None:
    office = an_office(a_placed_task())
    later = office.now + 3600
    value = scrape(coordinator_collector(office.machine, lambda: later))
    assert value("coordinator_leader") == 0
    assert value("coordinator_recovering") == 0


def test_the_drivers_own_metrics_are_readable() -> None:
    registry = Registry()
    driver = DriverMetrics(registry)
    driver.requests.add(1, "devices", "/v1/uploads/{upload}/chunks/{index}", "200")
    driver.request_seconds.observe(0.02, "devices", "/v1/join")
    driver.connections.add(1, "devices")
    driver.connections.add(-1, "devices")
    driver.work_seconds.observe(0.1, "fold")
    driver.commits.add(1, "committed")
    driver.answers.add(1, "Accepted")
    driver.upload_bytes.add(1 << 40, "taken_in")
    series = parse(registry.text())
    assert series["papaya_http_open_connections", (("listener", "devices"),)] == 0
    assert series["papaya_upload_bytes_total", (("way", "taken_in"),)] == 2**40
    assert series["papaya_store_commits_total", (("outcome", "committed"),)] == 1
