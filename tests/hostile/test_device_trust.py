"""A server attacks a device that seals, each attack by its name; the device's code is the real one.

Across restarts, where only the disk remembers; in time, where a host drips; and by what a server
says of versions, weights and losses. Evidence by itself is in test_attestation.py.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from papaya.attestation.policy import AttestationError
from papaya.client.client import Stage
from papaya.client.work import Downloaded, Finish, Seal, Sealed, Trained
from papaya.device.events import Event, VisitEnded
from papaya.device.training import ProtocolTrainer
from papaya.device.trust import Trust
from papaya.errors import OperatorError, ProtocolError
from papaya.learning.definition import TaskTerms
from papaya.messages import wire
from papaya.messages.base import Message, TaskId
from papaya.messages.participation import (
    Chunk,
    ChunkReceived,
    Complete,
    Incomplete,
    Retry,
    UploadGranted,
)
from papaya.secagg.offer import Offer
from tests.hostile.device_world import (
    EVIL,
    GOOD,
    OLD,
    SECRET,
    TASK,
    TERMS,
    UPDATE,
    World,
    a_world,
)
from tests.system.tls import make_certificates
from tests.unit.client.builders import GRANTED, Phone, joined
from tests.unit.device import fake_selector
from tests.unit.verifiable_log.hosts import Dripping, serving


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path) as world:
        yield world


def refused(world: World, device: Trust, reason: str, *arguments: Any, **changes: Any) -> str:
    with pytest.raises(ProtocolError) as caught:
        world.seal(device, *arguments, **changes)
    found = caught.value
    said = found.reason if isinstance(found, AttestationError) else str(found).split(":")[0]
    assert said == reason, found
    return str(found)


def test_an_honest_server_gets_the_masked_update(world: World) -> None:
    work = world.work()
    sealed = world.device().seal(work, TERMS, evaluates=False)
    assert UPDATE not in sealed.update
    assert np.allclose(world.opened(work, sealed).vector, SECRET * 0.2, atol=1e-6)


# --- The log, across restarts --------------------------------------------------------------------


def test_an_old_checkpoint_after_a_restart(world: World) -> None:
    """Back to before the binary was replaced: its hole is still open there."""
    world.seal(world.device())
    world.show(OLD)
    offer = world.offer(binary=OLD, leaf=0)
    assert "had 2 before" in refused(world, world.device(), "log", offer)


def test_a_forked_log_after_a_restart(world: World) -> None:
    """A history for this device alone, with the server's own binary in it."""
    world.seal(world.device())
    for history in ((OLD, EVIL), (OLD, EVIL, GOOD)):
        world.show(*history)
        said = refused(world, world.device(), "log", world.offer(binary=EVIL))
        assert "does not extend" in said


def test_a_forked_log_after_a_visit_that_was_refused_and_a_restart(world: World) -> None:
    """The log was seen, whatever was wrong with the evidence."""
    refused(world, world.device(), "measurement", world.offer(binary=EVIL))
    world.show(OLD, EVIL)
    assert "does not extend" in refused(world, world.device(), "log", world.offer(binary=EVIL))


def test_a_log_that_was_seen_and_withholds_its_entry(world: World) -> None:
    for path in (world.folder / "shown").glob("tile/entries/*"):
        path.rename(path.with_name("gone"))
    refused(world, world.device(), "log")
    world.show(OLD, EVIL)
    assert "does not extend" in refused(world, world.device(), "log", world.offer(binary=EVIL))


def test_a_fork_from_before_the_checkpoint_in_the_package(world: World) -> None:
    """The device's file is older than its package: an update of the app pinned a newer one."""
    world.show(OLD)
    world.seal(world.device(), world.offer(binary=OLD, leaf=0))
    pinned = world.log(OLD, GOOD).fetch("checkpoint").decode()
    world.show(OLD, EVIL, GOOD)
    device = world.device(log_checkpoint=pinned)
    assert "does not extend" in refused(world, device, "log", world.offer(binary=EVIL))
    world.show(OLD)
    refused(world, world.device(log_checkpoint=pinned), "log", world.offer(binary=OLD, leaf=0))
    world.show(OLD, GOOD)
    world.seal(world.device(log_checkpoint=pinned))


def test_a_checkpoint_that_cannot_be_kept_ends_the_visit(world: World) -> None:
    """Nothing is masked for a log that the device would not know again."""
    device = world.device()
    world.checkpoint.with_name(f".{world.checkpoint.name}.new").mkdir()
    with pytest.raises(OperatorError, match="cannot store the checkpoint"):
        world.seal(device)


@pytest.mark.parametrize("damage", [b"", b"half a check"])
def test_a_damaged_file_stops_a_device_and_nobody_is_told_to_delete_it(
    world: World, damage: bytes
) -> None:
    world.checkpoint.write_bytes(damage)
    with pytest.raises(OperatorError, match="not a checkpoint of this log") as caught:
        world.device()
    assert "restore" in caught.value.hint
    assert "remove" not in caught.value.hint


# --- Time ----------------------------------------------------------------------------------------


def test_an_offer_that_is_over_by_the_devices_clock(world: World) -> None:
    """The server keeps an offer back until the TSA's memory of it may be gone."""
    offer = world.offer()
    device, expires = world.device(), Offer.decode(offer.offer).expires
    world.now = expires - 0.5
    world.seal(device, offer)
    world.now = expires
    refused(world, device, "expired", offer)


def test_an_expiry_that_the_server_has_stretched(world: World) -> None:
    offer = world.offer()
    signed = Offer.decode(offer.offer)
    world.now = signed.expires
    longer = Offer(signed.index, signed.expires + 3600, signed.key, signed.signature)
    stretched = structs.replace(offer, offer=longer.encode())
    refused(world, world.device(), "signature", stretched)


@pytest.fixture
def port() -> Iterator[int]:
    """For two hosts, one after the other. It stays bound, so nobody else gets it in between."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_a_log_host_that_drips_is_given_up(tmp_path: Path) -> None:
    with Dripping(b"HTTP/1.0 200 OK\r\n\r\n") as host:
        world = World(tmp_path, f"http://127.0.0.1:{host.port}")
        assert "no complete response within" in refused(world, world.device(log_s=0.3), "log")


def test_a_log_host_that_drips_does_not_keep_a_believed_party_waiting(
    tmp_path: Path, port: int
) -> None:
    with serving(tmp_path, port=port) as address:
        world = World(tmp_path, address)
        device = world.device()
        world.seal(device)
    other = world.work(world.offer(replace(TASK, max_staleness=7)))
    done = threading.Event()

    def unknown_party() -> None:
        with pytest.raises(ProtocolError):
            device.seal(other, TERMS, evaluates=False)
        done.set()

    slow = threading.Thread(target=unknown_party)
    with Dripping(b"HTTP/1.0 200 OK\r\n\r\n", port=port) as host:
        slow.start()
        assert host.asked.acquire(timeout=60)
        world.seal(device)
        assert not done.is_set()
    slow.join()


def test_a_log_host_that_drips_leaves_the_other_threads_of_a_process_alone(tmp_path: Path) -> None:
    """Files, probes and histories of all devices share one pool: forty slow seals are not in it."""

    async def scenario(world: World, host: Dripping) -> None:
        device, work = world.device(), world.work()
        seals = [
            asyncio.create_task(device.seal_aside(work, TERMS, evaluates=False)) for _ in range(40)
        ]
        await asyncio.sleep(0)
        assert host.asked.acquire(timeout=60)
        async with asyncio.timeout(60):
            await asyncio.to_thread(int)
        for seal in seals:
            assert not seal.done()
            seal.cancel()
        await asyncio.gather(*seals, return_exceptions=True)

    with Dripping(b"HTTP/1.0 200 OK\r\n\r\n") as host:
        asyncio.run(scenario(World(tmp_path, f"http://127.0.0.1:{host.port}"), host))


def test_a_seal_that_waits_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    async def scenario(world: World, host: Dripping) -> None:
        device, work = world.device(), world.work()
        seal = asyncio.create_task(device.seal_aside(work, TERMS, evaluates=False))
        await asyncio.to_thread(host.asked.acquire, timeout=60)
        asked = [thread for thread in threading.enumerate() if thread.name.startswith("papaya-")]
        assert len(asked) == 2, "one that seals and one that reads the log"
        assert all(thread.daemon for thread in asked)
        seal.cancel()
        await asyncio.gather(seal, return_exceptions=True)

    before = {thread for thread in threading.enumerate() if thread.name.startswith("papaya-")}
    for thread in before:
        thread.join(60)
    with Dripping(b"HTTP/1.0 200 OK\r\n\r\n") as host:
        asyncio.run(scenario(World(tmp_path, f"http://127.0.0.1:{host.port}"), host))


def test_the_certificates_of_a_device_are_also_those_of_the_log(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    with serving(tmp_path, context) as address:
        world = World(tmp_path, address)
        assert "certificate" in refused(world, world.device(), "log")
        assert world.seal(world.device(certificates=made.authority)).update


# --- What a server says --------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [-7, -1, TASK.max_staleness + 1, 10**6])
def test_a_server_that_lies_about_the_current_version(world: World, ahead: int) -> None:
    refused(world, world.device(), "staleness", current=6 + ahead)


@pytest.mark.parametrize("examples", [1, 20, 100, 10**6])
@pytest.mark.parametrize("ahead", [0, 3, TASK.max_staleness])
def test_all_that_a_server_can_say_is_a_staleness(world: World, examples: int, ahead: int) -> None:
    work = world.work(examples=examples, current=6 + ahead)
    found = world.opened(work, world.device().seal(work, TERMS, evaluates=False))
    weight = min(examples, 100) / 100
    assert found.weight == pytest.approx(weight, abs=1e-6)
    assert np.allclose(found.vector, SECRET * weight / math.sqrt(1 + ahead), atol=1e-6)


def test_a_server_sends_a_weight(world: World) -> None:
    """In every field that might be read: what is masked is the device's own number of examples."""
    said = msgspec.json.decode(wire.encode(structs.replace(GRANTED, secure=world.offer())))
    for place in (said, said["secure"]):
        place |= {"weight": 50.0, "examples": 100, "damping": 1.0, "max_examples": 1}
    granted = wire.to_device.parse(msgspec.json.encode(said))
    device, phone = world.device(), reporting()
    [work] = phone.answer(granted)
    assert isinstance(work, Seal)
    found = world.opened(work, device.seal(work, TERMS, evaluates=False))
    assert found.weight == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_examples", 20),
        ("max_staleness", 7),
        ("clip", 2.0),
        ("length", 4),
        ("task", "other-word"),
        ("weighting", "none"),
    ],
)
def test_attested_parameters_that_are_not_those_of_the_task_file(
    world: World, name: str, value: Any
) -> None:
    """A smaller max_examples is another weight; the TSA would vouch for it."""
    fields = msgspec.json.decode(TASK.encode()) | {name: value}
    weak = type(TASK)(**fields)
    said = refused(world, world.device(), name, world.offer(weak))
    assert f"{name} = {value!r}" in said


def test_a_server_without_secure_aggregation_for_a_file_that_asks_for_it() -> None:
    finish, told, fake = asyncio.run(visited(secure_file=True, secure_server=False))
    assert (finish.ending, fake.completed) == ("failed", [])
    assert "the file has it" in told
    assert {"parameters", "report", "chunk"}.isdisjoint(fake.seen)


def test_a_server_with_secure_aggregation_for_a_file_that_knows_none() -> None:
    finish, told, fake = asyncio.run(visited(secure_file=False, secure_server=True))
    assert (finish.ending, fake.completed) == ("failed", [])
    assert "the file does not have it" in told
    assert {"parameters", "report", "chunk"}.isdisjoint(fake.seen)


def test_a_device_without_a_trust_policy_leaves_a_secure_task_before_it_trains() -> None:
    finish, told, fake = asyncio.run(visited(secure_file=True, secure_server=True))
    assert (finish.ending, fake.completed) == ("failed", [])
    assert "no trust policy" in told
    assert fake.seen == ["check-in", "join", "leave"]


def test_a_server_and_a_file_that_agree() -> None:
    finish, _, fake = asyncio.run(visited(secure_file=False, secure_server=False))
    assert (finish.ending, len(fake.completed)) == ("counted", 1)


class WithTerms(ProtocolTrainer):
    def __init__(self, terms: TaskTerms) -> None:
        super().__init__(lambda session, length: fake_selector.UPDATE, lambda: 0.0)
        self._terms = terms

    def terms(self, program: TaskId) -> TaskTerms | None:
        return self._terms


async def visited(
    *, secure_file: bool, secure_server: bool
) -> tuple[Finish, str, fake_selector.FakeSelector]:
    """How it ended, what the owner was told of it, and what the server has seen."""
    told: list[Event] = []
    async with fake_selector.serving() as fake, fake_selector.process() as host:
        fake.joined = fake_selector.joined(secure=secure_server)
        trainer = WithTerms(structs.replace(TERMS, secure=secure_file))
        with fake_selector.device(host, fake.url, trainer=trainer, notify=told.append) as device:
            finish = await device.visit()
    [ended] = [event for event in told if isinstance(event, VisitEnded)]
    return finish, ended.detail, fake


# --- A pretended loss ----------------------------------------------------------------------------


def reporting() -> Phone:
    phone = Phone().until(Stage.JOINING)
    phone.answer(joined(secure=True))
    phone.receive(Downloaded())
    phone.receive(Trained(UPDATE, examples=20))
    return phone


LOSSES: dict[str, list[Message | None]] = {
    "another grant": [None],
    "another grant after the chunks": [*[ChunkReceived("u", 0)] * 5, None],
    "all chunks, then another grant": [*[ChunkReceived("u", 0)] * 5, Incomplete((0, 1)), None],
    "a retry, then another grant": [Retry("the TSA was lost", 0.0), None],
    "joined again": [joined(secure=True), None],
}


@pytest.mark.parametrize("answers", LOSSES.values(), ids=LOSSES)
def test_a_server_that_pretends_a_loss_to_get_an_update_sealed_twice(
    world: World, answers: list[Message | None]
) -> None:
    """Two sums that differ by one client are that client. None stands for another offer."""
    device, phone = world.device(), reporting()
    seals: list[Sealed] = []

    def told(answer: Message | None) -> None:
        """Whatever the machine asks of its device is done, as the driver would."""
        effects = phone.answer(answer or grant(world))
        for work in [effect for effect in effects if isinstance(effect, Seal)]:
            seals.append(device.seal(work, TERMS, evaluates=False))
            phone.receive(seals[-1])

    told(None)
    assert phone.stage is Stage.UPLOADING
    for answer in answers:
        if not phone.endings:
            told(answer)
            phone.wait(5.0)
    left = {message.sealed for message in phone.messages if isinstance(message, Complete)}
    chunks = {m.index: m.data for m in phone.messages if isinstance(m, Chunk)}
    assert len(seals) == 1
    assert left <= {seals[0].sealed}
    for message in phone.messages:
        assert not isinstance(message, Chunk) or message.data == chunks[message.index]


def grant(world: World) -> UploadGranted:
    return structs.replace(GRANTED, secure=world.offer())
