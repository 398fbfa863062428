"""Alerts, dashboard and autoscaling use only metrics that the servers export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml
from prometheus_client import CollectorRegistry, generate_latest

from papaya.server.certificates import Certificates
from papaya.server.metrics import CertificateCollector, TsaCollector
from papaya.server.tsa_fleet import TsaFleet
from tests.unit.server.test_metrics import a_whole_process

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_NAME = re.compile(r"papaya_[a-z_]+")
_LABELS = re.compile(r'(papaya_[a-z_]+)\{([a-z_]+)="([a-z_]+)"')


def alerts() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return [*group["rules"]]


def expressions() -> Iterator[str]:
    for rule in alerts():
        yield rule["expr"]
    for panel in json.loads((DEPLOY / "grafana" / "papaya.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    chart = DEPLOY / "helm" / "papaya"
    for file in chart.rglob("*.yaml"):
        yield " ".join(re.findall(r"name: (papaya_[a-z_]+)", file.read_text()))


class NoTsas:
    """A fleet whose only TSA answers."""

    class _Link:
        class breaker:
            open_s = 0.0
            outages = 0

    links = (_Link,)


def exported() -> str:
    registry = CollectorRegistry()
    registry.register(TsaCollector(cast(TsaFleet, NoTsas())))
    own = SimpleNamespace(expiry={"tls_certificate": 1.0})
    registry.register(CertificateCollector(cast(Certificates, own)))
    return a_whole_process() + generate_latest(registry).decode()


def test_every_metric_that_is_used_exists() -> None:
    text = exported()
    names = set(_NAME.findall(" ".join(line for line in text.splitlines() if line[:1] != "#")))
    used = {name for expression in expressions() for name in _NAME.findall(expression)}
    assert len(used) > 20
    assert used - names == set()


def test_every_label_that_is_used_exists() -> None:
    text = exported()
    used = {found for expression in expressions() for found in _LABELS.findall(expression)}
    assert used
    for name, label, _ in used:
        assert re.search(rf"{name}\{{[^}}]*{label}=", text), f"{name} has no label {label}"


def test_every_alert_says_what_to_do() -> None:
    found = alerts()
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")
