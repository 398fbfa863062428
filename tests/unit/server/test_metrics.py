"""Metrics: text that Prometheus reads, numbers that are those of the machines."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.registry import Collector

from papaya import __version__
from papaya.http.passthrough import Passthrough
from papaya.messages.storage import PointRow, Transaction, point_key
from papaya.server.admin.history import TaskHistory
from papaya.server.metrics import (
    STALENESS,
    AggregatorCollector,
    CoordinatorCollector,
    DriverMetrics,
    EvaluationCollector,
    PassthroughCollector,
    SelectorCollector,
    WorkersCollector,
    buckets,
    watch_process,
)
from papaya.server.workers import Counters, Workers
from tests.unit.aggregator.builders import World, a_world, an_async_task, make_version
from tests.unit.coordinator.builders import a_served_office, an_office
from tests.unit.coordinator.builders import a_task as a_placed_task
from tests.unit.selector.builders import BOOT, an_open_selector, check_in
from tests.unit.server.admin.builders import a_system

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
        labels = tuple(sorted((n, re.sub(r"\\.", lambda m: _ESCAPES[m[0]], v)) for n, v in pairs))
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
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    series = parse(generate_latest(registry).decode())
    return lambda name, **labels: series[f"papaya_{name}", tuple(sorted(labels.items()))]


# -- the same series as before ---------------------------------------------------------------


def a_whole_process() -> str:
    """Every metric of every role, with fixed values."""
    driver = DriverMetrics()
    driver.requests.labels("devices", "/v1/join", "200").inc(2)
    driver.requests.labels("devices", "/v1/join", "503").inc(1)
    for seconds in (0.0005, 0.02, 0.02, 1.0, 7.5, 60.0):
        driver.request_seconds.labels("devices", "/v1/join").observe(seconds)
    driver.connections.labels("devices").set(3)
    driver.check_ins.inc(4)
    driver.answers.labels("Accepted").inc()
    driver.upload_bytes.labels("taken_in").inc(1 << 40)
    driver.free_buffers.set(5)
    driver.queue.set(2)
    driver.observe_work(0.1, "fold")
    driver.observe_work(10.0, "step")
    driver.lost_messages.set(1)
    driver.observe_commit(0.003, "committed")
    driver.observe_commit(0.5, "refused")
    counters = Counters(
        updates=3, refused=1, folded_bytes=4096, snapshots=2, steps=1, written_bytes=8192
    )
    driver.registry.register(WorkersCollector(cast(Workers, SimpleNamespace(counters=counters))))
    world, node = a_world(an_async_task(1, max_staleness=1))
    gone, slow = world.joined(node, 2)
    gone.leave()
    for _ in range(2):
        make_version(world, node)
    slow.heartbeat()
    driver.registry.register(AggregatorCollector(node.machine, lambda: world.now))
    selector = an_open_selector()
    for device in range(3):
        selector.receive(BOOT, check_in(), device)
    driver.registry.register(SelectorCollector(selector))
    office = a_served_office(a_placed_task(), demand=4)
    office.selector("sel-1", 3)
    driver.registry.register(CoordinatorCollector(office.machine, lambda: office.now))
    return driver.text().decode()


def kinds(text: str) -> set[str]:
    return {line for line in text.splitlines() if line.startswith("# TYPE ")}


def test_names_labels_types_and_values_are_those_of_version_0_3_0() -> None:
    """`metrics_before.txt` was written by the registry that prometheus_client replaced; reasons
    that are newer were added to it.
    """
    before = Path(__file__).with_name("metrics_before.txt").read_text(encoding="ascii")
    after = a_whole_process()
    assert parse(after) == parse(before)
    assert kinds(after) == kinds(before)


@given(st.lists(st.integers(0, 150)))
def test_counted_values_give_the_buckets_of_a_histogram(values: list[int]) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("papaya_thing", "A thing.", buckets=STALENESS, registry=registry)
    for value in values:
        histogram.observe(value)
    [family] = registry.collect()
    expected = [s.value for s in family.samples if s.name == "papaya_thing_bucket"]
    assert [count for _, count in buckets(STALENESS, Counter(values))] == expected


def test_a_request_is_counted_and_timed_under_its_template() -> None:
    driver = DriverMetrics()
    route = "/v1/uploads/{upload}/chunks/{index}"
    for status in (200, 200, 503):
        driver.observe_request("devices", route, status, 0.02)
    series = parse(driver.text().decode())
    labels = (("listener", "devices"), ("route", route))
    assert series["papaya_http_requests_total", (*labels, ("status", "200"))] == 2
    assert series["papaya_http_requests_total", (*labels, ("status", "503"))] == 1
    assert series["papaya_http_request_seconds_count", labels] == 3


def test_connections_that_are_passed_through_are_counted_by_outcome() -> None:
    passthrough = Passthrough(lambda name: None)
    passthrough.passed, passthrough.unreachable = 3, 2
    value = scrape(PassthroughCollector(passthrough))
    assert value("passthrough_connections_total", outcome="passed") == 3
    assert value("passthrough_connections_total", outcome="unreachable") == 2


def test_two_processes_in_one_interpreter_count_apart() -> None:
    one, other = DriverMetrics(), DriverMetrics()
    one.check_ins.inc()
    assert parse(one.text().decode())["papaya_selector_check_ins_total", ()] == 1
    assert parse(other.text().decode())["papaya_selector_check_ins_total", ()] == 0


# -- the machines -----------------------------------------------------------------------------


def of_aggregator(world: World) -> Callable[..., float]:
    [node] = world.nodes
    return scrape(AggregatorCollector(node.machine, lambda: world.now))


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
    assert list(AggregatorCollector(node.machine, lambda: 0.0).collect()) == []


def test_a_selector_tells_how_many_it_holds() -> None:
    selector = an_open_selector()
    for device in range(3):
        selector.receive(BOOT, check_in(), device)
    assert scrape(SelectorCollector(selector))("selector_held_check_ins") == 3


def test_a_coordinator_tells_who_leads_and_what_is_leased() -> None:
    office = a_served_office(a_placed_task(), demand=4)
    office.selector("sel-1", 3)
    value = scrape(CoordinatorCollector(office.machine, lambda: office.now))
    assert value("coordinator_leader") == 1
    assert value("coordinator_epoch") == 1
    assert value("coordinator_tasks") == 1
    assert value("coordinator_selectors") == 1
    assert value("coordinator_aggregators") == len(office.machine.fleet.aggregators) == 1
    assert value("coordinator_leases", task="words") == 3
    assert value("coordinator_demand", task="words") == 1


def test_a_coordinator_tells_how_long_a_lease_lasts() -> None:
    office = a_served_office(a_placed_task(), demand=4)
    row = office.machine.rows.tasks["words"]
    registry = CollectorRegistry()
    registry.register(CoordinatorCollector(office.machine, lambda: office.now))
    assert b"lease_seconds" not in generate_latest(registry), "it has no owner"
    office.machine.rows.tasks["words"] = structs.replace(row, lease_until=office.now + 86400)
    value = scrape(CoordinatorCollector(office.machine, lambda: office.now))
    assert value("task_lease_seconds", task="words") == 86400


def test_a_candidate_that_lost_its_lease_does_not_lead() -> None:
    office = an_office(a_placed_task())
    later = office.now + 3600
    value = scrape(CoordinatorCollector(office.machine, lambda: later))
    assert value("coordinator_leader") == 0
    assert value("coordinator_recovering") == 0


# -- evaluations, and this process -----------------------------------------------------------------


def test_the_newest_evaluation_of_each_task(tmp_path: Path) -> None:
    points = {
        "digits": (
            PointRow(1, 0.0, 4, 4, 0.0, loss=2.0, metrics={"accuracy": 0.25}),
            PointRow(5, 0.0, 4, 4, 0.0, loss=1.5, metrics={"accuracy": 0.75}),
            PointRow(6, 0.0, 4, 4, 0.0),
        ),
        "words": (PointRow(0, 0.0, 0, 0, 0.0, loss=1.0, perplexity=2.75),),
        "untested": (PointRow(0, 0.0, 0, 0, 0.0),),
    }

    async def cached() -> TaskHistory:
        async with a_system(tmp_path) as system:
            for task, rows in points.items():
                put = tuple((point_key(task, row.version), row) for row in rows)
                system.change(Transaction(put=put))
            history = TaskHistory(system.state)
            for task in points:
                await history.points(task)
            return history

    value = scrape(EvaluationCollector(asyncio.run(cached())))
    assert value("task_loss", task="digits") == 1.5
    assert value("task_evaluated_version", task="digits") == 5
    assert value("task_metric", task="digits", metric="accuracy") == 0.75
    assert value("task_metric", task="words", metric="perplexity") == 2.75
    with pytest.raises(KeyError):
        value("task_loss", task="untested")


def test_version_and_resources_of_the_process() -> None:
    registry = CollectorRegistry()
    watch_process(registry)
    series = parse(generate_latest(registry).decode())
    labels = (("python", platform.python_version()), ("version", __version__))
    assert series["papaya_build_info", labels] == 1
    if Path("/proc/self/stat").exists():
        assert 0 < series["process_start_time_seconds", ()] < time.time()
        assert series["process_resident_memory_bytes", ()] > 1 << 20
        assert series["process_cpu_seconds_total", ()] <= sum(os.times()[:4])
