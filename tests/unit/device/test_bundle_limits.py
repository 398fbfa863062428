"""Participations in signed tasks: the limits of the owner and of the device."""

from __future__ import annotations

from random import Random
from typing import Any

from msgspec import structs

from papaya.bundle.manifest import Participation, TaskManifest
from papaya.client.client import Client
from papaya.client.history import History
from papaya.client.work import Answered, Download, Downloaded, Remember, Trained
from papaya.config import DeviceConfig
from papaya.device.bundles import VisitBundles
from papaya.messages.base import BlobKey
from papaya.messages.participation import Joined, UploadGranted
from papaya.messages.selection import Accepted, Capabilities
from tests.unit.bundle.builders import NOW, PIN, a_manifest
from tests.unit.device.bundle_server import POLICY, Open, Server, fetch, run_of


def joined(manifest: TaskManifest, *, evaluates: bool = False, **changes: Any) -> Joined:
    run = run_of(manifest)
    values: dict[str, Any] = {
        "ticket": b"",
        "task": f"{run}-eval-1" if evaluates else run,
        "session": "s",
        "version": 1,
        "parameters": f"{run}/1/version-1-{'0' * 32}",
        "model_length": 9,
        "update_length": 9,
        "training_timeout_s": 1.0,
        "heartbeat_s": 1.0,
        "participation_gap_s": 0.0,
        "max_participations": None,
        "evaluates": evaluates,
        "secure": False,
    }
    return Joined(**(values | changes))


def test_the_signed_limits_count_whatever_a_server_says(opened: Open, server: Server) -> None:
    manifest = a_manifest(participation=Participation(60.0, 5, "task"))
    store = opened()
    fetch(store, server, server.offer(manifest))
    found = VisitBundles(store, lambda: NOW).counted(joined(manifest))
    assert found == ((f"{PIN.owner}/digits", 60.0, 5),)


def test_the_memory_that_a_policy_allows_comes_with_the_bundle(
    opened: Open, server: Server
) -> None:
    key = server.offer(a_manifest())
    assert fetch(opened(), server, key).memory_mb is None
    assert fetch(opened(structs.replace(POLICY, max_memory_mb=64)), server, key).memory_mb == 64


def test_the_device_may_be_stricter_than_the_owner(opened: Open, server: Server) -> None:
    manifest = a_manifest(participation=Participation(60.0, None, "run"))
    policy = structs.replace(POLICY, max_participations=2, min_gap_s=3600.0)
    store = opened(policy)
    fetch(store, server, server.offer(manifest))
    found = VisitBundles(store, lambda: NOW).counted(joined(manifest))
    assert found == ((run_of(manifest), 3600.0, 2), (f"{PIN.owner}/digits", 3600.0, 2))


def test_new_runs_do_not_raise_the_limit_of_the_device(opened: Open, server: Server) -> None:
    """The owner counts each run alone, the device all runs of the task."""
    store, history = opened(structs.replace(POLICY, max_participations=3)), History(0.0)
    taken_part = []
    for run in range(5):
        manifest = a_manifest(
            run=a_manifest().run + run, participation=Participation(0.0, 2, "run")
        )
        key = server.offer(manifest)
        fetch(store, server, key)
        for _ in range(3):
            client = Client(
                ["selector"],
                Capabilities("torch", ()),
                history,
                DeviceConfig(participation_floor_s=0.0),
                Random(1),
                VisitBundles(store, lambda: NOW),
            )
            if uploads(client, manifest, key):
                taken_part.append(run)
    assert taken_part == [0, 0, 1]


def uploads(client: Client, manifest: TaskManifest, key: BlobKey) -> bool:
    """Does a visit to this run come to its upload?"""
    update, run = bytes(4 * 9), run_of(manifest)
    client.start(NOW)
    client.receive(NOW, Answered(1, Accepted(b"", run, "s", key)))
    [effect] = client.receive(NOW, Answered(2, joined(manifest)))[:1]
    if not isinstance(effect, Download):
        return False
    client.receive(NOW, Downloaded())
    client.receive(NOW, Trained(update, 1))
    granted = UploadGranted(b"", 1, 36, 60.0)
    effects = client.receive(NOW, Answered(3, granted))
    return any(isinstance(effect, Remember) for effect in effects)


def test_evaluations_count_together_across_runs(opened: Open, server: Server) -> None:
    store, manifest = opened(), a_manifest()
    fetch(store, server, server.offer(manifest))
    [found] = VisitBundles(store, lambda: NOW).counted(joined(manifest, evaluates=True))
    assert found.name == f"{PIN.owner}/digits/evaluate"


def test_a_task_without_a_bundle_counts_as_before(opened: Open) -> None:
    found = VisitBundles(opened(), lambda: NOW).counted(joined(a_manifest(), participation_gap_s=7))
    assert found == ((run_of(a_manifest()), 7.0, None),)
