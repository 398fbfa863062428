"""A restarted device uses the bundles on its disk, after the same checks as before."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from aiohttp import web
from msgspec import structs

from papaya.bundle import archive
from papaya.bundle.errors import BundleError
from papaya.bundle.head import BundleHead
from papaya.bundle.manifest import LEASE_S
from papaya.bundle.owner import KeyRevocation, key_id
from papaya.device.bundles import Bundle, BundleStore
from papaya.device.device import Device
from papaya.device.events import Event, VisitEnded
from papaya.device.executor import GivenUp
from papaya.device.owners import OwnerPolicy
from papaya.device.training import ProtocolTrainer
from papaya.device.use_policy import UsePolicy
from papaya.errors import PapayaError
from papaya.messages.base import BlobKey
from papaya.messages.selection import Accepted, CheckIn, Rejected, refused
from tests.unit.bundle.builders import KEY, NOW, PIN, STRANGER, a_manifest, public
from tests.unit.device.bundle_server import (
    POLICY,
    Open,
    Server,
    a_head,
    anything,
    fetch,
    offer_frozen,
    offered,
    run_of,
    with_frozen,
)
from tests.unit.device.fake_selector import (
    PARAMETERS,
    UPDATE,
    FakeSelector,
    answer,
    device,
    joined,
    process,
    raw,
    serving,
)


def load(store: BundleStore, now: float = NOW) -> dict[BlobKey, PapayaError]:
    return asyncio.run(store.load(anything, now))


def test_bundles_on_disk_are_loaded_once_after_a_restart(opened: Open, server: Server) -> None:
    keys = [offer_frozen(server, with_frozen()), server.offer(a_manifest(task="other"))]
    before = [fetch(opened(), server, key) for key in keys]
    server.asked.clear()
    tried: list[Bundle] = []

    async def accept(bundle: Bundle) -> None:
        tried.append(bundle)

    store = opened()
    for _ in range(2):
        assert asyncio.run(store.load(accept, NOW)) == {}
    assert [store.get(key) for key in keys] == before
    assert sorted(bundle.manifest.task for bundle in tried) == ["digits", "other"]
    assert fetch(store, server, keys[0]) == before[0]
    assert server.asked == []


def test_only_the_newest_revision_is_loaded(opened: Open, server: Server) -> None:
    keys = [server.offer(a_manifest(revision=revision)) for revision in (3, 4)]
    for key in keys:
        fetch(opened(), server, key)
    store = opened()
    assert load(store) == {}
    assert [store.lacks(key, NOW) for key in keys] == [True, False]


def test_a_bundle_that_was_not_accepted_is_not_loaded(opened: Open, server: Server) -> None:
    async def refuse(bundle: Bundle) -> None:
        raise BundleError("engine", "cannot run it")

    key = server.offer(a_manifest())
    with pytest.raises(BundleError):
        asyncio.run(opened().fetch(key, server, refuse, NOW))
    store = opened()
    assert load(store) == {}
    assert store.lacks(key, NOW)


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "unpacked", "all"])
def test_a_bundle_that_was_damaged_on_disk_is_fetched_again(
    opened: Open, server: Server, tmp_path: Path, damage: str
) -> None:
    manifest = a_manifest()
    key = server.offer(manifest)
    program = fetch(opened(), server, key).program
    blob = tmp_path / "bundles" / "blobs" / manifest.program.sha256
    data = blob.read_bytes()
    match damage:
        case "cut":
            blob.write_bytes(data[:-1])
        case "flipped":
            blob.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "gone":
            blob.unlink()
        case "unpacked":
            (program / "task.py").write_bytes(b"another program")
        case "all":
            for name in ("blobs", "programs", "parts"):
                shutil.rmtree(tmp_path / "bundles" / name)
    server.asked.clear()
    store = opened()
    problems = load(store)
    if damage == "unpacked":  # the archive is intact
        assert problems == {}
    else:
        assert "missing on disk, or damaged" in str(problems[key])
        assert store.lacks(key, NOW)
    bundle = fetch(store, server, key)
    assert (bundle.program / "task.py").read_bytes() == b"task = 1\n"
    assert server.asked == ([] if damage == "unpacked" else [key, *server.asked[1:]])


def test_a_damaged_head_is_forgotten(opened: Open, server: Server) -> None:
    key = server.offer(a_manifest())
    store = opened()
    fetch(store, server, key)
    whole = BundleHead.decode(server.blobs[key])
    body = whole.manifest.body.replace(b"240.0", b"999.0")
    forged = structs.replace(whole, manifest=structs.replace(whole.manifest, body=body)).encode()
    cut = server.blobs[key][:-10]
    for data in (b"", b"{}", cut, forged, a_head(a_manifest(), STRANGER)):
        store._save_head(key, data, a_manifest())
        restarted = opened()
        assert isinstance(load(restarted)[key], BundleError)
        assert restarted.lacks(key, NOW)
        assert load(opened()) == {}, "it is not tried at each start"


@pytest.mark.parametrize("why", ["expired", "not_allowed", "unknown_owner", "rolled_back"])
def test_a_bundle_that_must_no_longer_be_used_is_not_loaded(
    opened: Open, server: Server, why: str
) -> None:
    key = server.offer(a_manifest())
    fetch(opened(), server, key)
    policy, now = POLICY, NOW
    match why:
        case "expired":
            now += LEASE_S
        case "not_allowed":
            policy = structs.replace(POLICY, collections=("words",))
        case "unknown_owner":
            policy = OwnerPolicy(key=public(STRANGER).hex())
        case "rolled_back":  # another process has seen a newer revision
            opened().check(a_head(a_manifest(revision=4)), run_of(a_manifest()), NOW)
    store = opened(policy)
    error = load(store, now)[key]
    assert isinstance(error, BundleError)
    assert error.reason == why
    assert store.get(key) is None


def test_a_bundle_of_a_revoked_key_is_not_loaded(opened: Open, server: Server) -> None:
    key = server.offer(a_manifest())
    fetch(opened(), server, key)
    revocation = KeyRevocation(key_id(public(KEY))).sign(KEY)
    later = a_manifest(task="other")
    with pytest.raises(BundleError):
        opened().check(a_head(later, statements=(revocation,)), run_of(later), NOW)
    store = opened()
    assert isinstance(load(store)[key], BundleError)
    assert store.get(key) is None


def test_loaded_bundles_that_no_server_names_give_way_to_others(
    opened: Open, server: Server
) -> None:
    """Otherwise the tasks of last month would fill the cache of a device after every restart."""
    keys = [offered(server, number) for number in range(3)]
    for key in keys[:2]:
        fetch(opened(), server, key)
    store = opened(max_bytes=4_500)
    assert load(store) == {}
    store.named(keys[0])
    bundle = fetch(store, server, keys[2])
    assert (bundle.program / "task.py").exists()
    kept = store.get(keys[0])
    assert kept is not None
    assert (kept.program / "task.py").exists(), "a device may train it"
    assert store.lacks(keys[1], NOW)


def test_a_bundle_that_gave_way_is_not_loaded_at_the_next_start(
    opened: Open, server: Server
) -> None:
    """It made room for itself, by deleting the bundles that had taken its place."""
    ended, *used = (offered(server, number) for number in range(3))
    for key in (ended, used[0]):
        fetch(opened(), server, key)
    store = opened(max_bytes=4_500)
    assert load(store) == {}
    store.named(used[0])
    fetch(store, server, used[1])
    server.asked.clear()
    for _ in range(2):
        store = opened(max_bytes=4_500)
        problems = load(store)
        assert [store.lacks(key, NOW) for key in (ended, *used)] == [True, False, False]
        assert problems == {}
        assert all(fetch(store, server, key).program.is_dir() for key in used)
    assert server.asked == []


@pytest.mark.parametrize("missing", [0, 1])
def test_a_bundle_that_is_missing_on_disk_takes_no_room_from_others(
    opened: Open, server: Server, tmp_path: Path, missing: int
) -> None:
    keys = [offered(server, number) for number in range(2)]
    programs = [fetch(opened(), server, key).program for key in keys]
    (tmp_path / "bundles" / "blobs" / programs[missing].name).unlink()
    server.asked.clear()
    for problems in ({keys[missing]}, set()):
        store = opened(max_bytes=4_500)
        assert load(store).keys() == problems, "it is not tried at each start"
        assert fetch(store, server, keys[1 - missing]).program == programs[1 - missing]
        assert server.asked == []
    assert fetch(opened(), server, keys[missing]).program == programs[missing]


# -- visits ----------------------------------------------------------------------------------


class Trying(ProtocolTrainer):
    """Counts trials; `problem` is the outcome of each."""

    def __init__(self, problem: PapayaError | None = None) -> None:
        super().__init__(lambda session, length: UPDATE, lambda: 0.0)
        self.tried = 0
        self._problem = problem

    async def add_bundle(self, bundle: Bundle) -> None:
        self.tried += 1
        if self._problem is not None:
            raise self._problem


class Phone:
    """A device that is started for a few visits at a time. Its task needs the bundle `key`."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder = folder
        self.server = server
        self.manifest = a_manifest()
        self.key = server.offer(self.manifest)
        self.seen: list[str] = []

    def visits(self, number: int = 1, trainer: ProtocolTrainer | None = None) -> list[str]:
        """Start it; how its visits ended, and why."""
        return asyncio.run(self._visits(number, trainer or Trying()))

    async def _visits(self, number: int, trainer: ProtocolTrainer) -> list[str]:
        events: list[Event] = []
        store = BundleStore(self.folder / "bundles", {PIN.owner: POLICY})
        zero = asyncio.get_running_loop().time() - NOW
        now = lambda: asyncio.get_running_loop().time() - zero  # noqa: E731
        async with asyncio.timeout(300), serving() as fake, process(now=now) as host:
            self._prepare(fake)
            with device(
                host,
                fake.url,
                store=self.folder / "device.db",
                policies={"digits": UsePolicy(tasks=("*",))},
                bundles=store,
                trainer=trainer,
                notify=events.append,
            ) as phone:
                phone.store.add_new("digits", [bytes([i]) for i in range(50)], NOW)
                await self._run(phone, number)
            self.seen = fake.seen
        store.close()
        ended = [event for event in events if isinstance(event, VisitEnded)]
        return [f"{e.ending} {e.detail}".strip() for e in ended]

    async def _run(self, phone: Device, number: int) -> None:
        await phone.run_forever(visits=number)

    def _prepare(self, fake: FakeSelector) -> None:
        run = run_of(self.manifest)
        parameters = f"{run}/3/version-7-{archive.digest(PARAMETERS)[:32]}"

        async def check_in(request: web.Request) -> web.StreamResponse:
            asked = fake.messages[-1]
            assert isinstance(asked, CheckIn)
            if refused(run, self.key) in asked.excluded:
                return await answer(Rejected("no task", 0.0, 0.0))(request)
            return await answer(Accepted(b"assignment", run, "ab12", self.key))(request)

        fake.replace["check-in"] = check_in
        fake.joined = joined(task=run, parameters=parameters)

        async def reply(request: web.Request) -> web.StreamResponse:
            key = request.path.removeprefix("/v1/parameters/")
            return await raw(self.server.blobs.get(key, PARAMETERS))(request)

        fake.replace["parameters"] = reply


def test_a_restarted_device_trains_at_its_first_visit(tmp_path: Path, server: Server) -> None:
    phone = Phone(tmp_path, server)
    assert phone.visits() == ["unprepared fetched the bundle of digits"]
    trainer = Trying()
    assert phone.visits(1, trainer) == ["counted"]
    assert trainer.tried == 1
    assert phone.seen.count("parameters") == 1, "the model, nothing of the bundle"


def test_a_bundle_on_disk_without_a_head_is_loaded_not_fetched(
    tmp_path: Path, server: Server
) -> None:
    """Its trial was not possible at the first start."""
    phone = Phone(tmp_path, server)
    unavailable = GivenUp("unavailable", "the training process ended")
    assert phone.visits(1, Trying(unavailable)) == ["unprepared the training process ended"]
    assert phone.visits(2) == ["unprepared loaded the bundle of digits", "counted"]


def test_a_restarted_device_fetches_a_damaged_bundle_again(tmp_path: Path, server: Server) -> None:
    phone = Phone(tmp_path, server)
    phone.visits()
    (tmp_path / "bundles" / "blobs" / phone.manifest.program.sha256).write_bytes(b"x")
    assert phone.visits(2) == ["unprepared fetched the bundle of digits", "counted"]


def test_a_program_that_no_longer_runs_is_tried_once_and_excluded(
    tmp_path: Path, server: Server
) -> None:
    phone = Phone(tmp_path, server)
    phone.visits()
    trainer = Trying(BundleError("engine", "digits: needs torch 9"))
    assert phone.visits(1, trainer) == ["rejected digits: needs torch 9"]
    assert trainer.tried == 1


def test_a_device_that_is_stopped_while_it_loads_stops_at_once(
    tmp_path: Path, server: Server
) -> None:
    class Slow(Trying):
        async def add_bundle(self, bundle: Bundle) -> None:
            self.started.set()
            await asyncio.Event().wait()

        started: asyncio.Event

    class Stopped(Phone):
        async def _run(self, phone: Device, number: int) -> None:
            slow.started = asyncio.Event()
            running = asyncio.create_task(phone.run_forever(visits=number))
            await slow.started.wait()
            phone.stop()
            await running

    Phone(tmp_path, server).visits()
    slow = Slow()
    assert Stopped(tmp_path, server).visits(1, slow) == ["stopped the device was told to stop"]
