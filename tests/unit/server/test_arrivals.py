"""Bodies on their way: bounded for each upload, broken off with its memory, heard of while slow."""

from __future__ import annotations

from typing import cast

from papaya.aggregator.upload import ARRIVING
from papaya.aggregator.work import Arriving, Growing
from papaya.messages.base import Message
from papaya.messages.participation import Chunk, ChunkOffer, Retry
from papaya.server.buffers import ArrivingBodies, BufferPool
from papaya.server.host import AggregatorHost
from papaya.server.replies import WaitingDevice
from papaya.server.uploads import ArrivingChunk

OWNER = ("words", "s1")
OFFER = ChunkOffer(b"ticket", "u1", 0, 8)


class Body:
    def __init__(self) -> None:
        self.is_broken = False

    def break_off(self) -> None:
        self.is_broken = True


class Host:
    """What a chunk that arrives asks of its aggregator's host."""

    tell_arriving_s = 2.5

    def __init__(self) -> None:
        self.arrivals = ArrivingBodies()
        self.pool = BufferPool(4, 8)
        self.time = 100.0
        self.heard: list[Message] = []
        self.taken: list[bytes] = []

    def now(self) -> float:
        return self.time

    def deliver(self, message: Message) -> None:
        self.heard.append(message)

    def take(self, chunk: Chunk, buffer: memoryview, reply_to: object) -> None:
        self.taken.append(bytes(chunk.data))
        self.pool.give_back(buffer)


class Device:
    def __init__(self) -> None:
        self.answers: list[Message] = []

    def answer(self, message: Message) -> None:
        self.answers.append(message)


def a_chunk(host: Host, device: Device) -> ArrivingChunk:
    buffer = host.pool.take(8)
    assert buffer is not None
    waiting = cast(WaitingDevice, device)
    return ArrivingChunk(cast(AggregatorHost, host), OWNER, buffer, OFFER, 0, waiting)


def receive(chunk: ArrivingChunk, data: bytes) -> None:
    chunk.buffer(8)[: len(data)] = data
    chunk.received(len(data))


def test_an_upload_has_a_bounded_number_of_bodies() -> None:
    arrivals, bodies = ArrivingBodies(), [Body() for _ in range(ARRIVING)]
    for body in bodies:
        assert arrivals.has_room(OWNER)
        arrivals.add(OWNER, body)
    assert not arrivals.has_room(OWNER)
    assert arrivals.has_room(("words", "s2"))
    arrivals.remove(OWNER, bodies[0])
    arrivals.remove(OWNER, bodies[0])
    assert arrivals.has_room(OWNER)


def test_a_session_or_a_whole_task_is_broken_off() -> None:
    arrivals = ArrivingBodies()
    bodies = {owner: Body() for owner in (("a", "1"), ("a", "2"), ("a", "3"), ("b", "1"))}
    for owner, body in bodies.items():
        arrivals.add(owner, body)
    arrivals.break_off("a", "2")
    arrivals.break_off("a", "nobody")
    assert [owner for owner, body in bodies.items() if body.is_broken] == [("a", "2")]
    arrivals.break_off("a", None)
    assert [owner for owner, body in bodies.items() if not body.is_broken] == [("b", "1")]


def test_a_slow_body_is_told_of_a_few_times_per_heartbeat_and_a_fast_one_never() -> None:
    host = Host()
    fast, slow = a_chunk(host, Device()), a_chunk(host, Device())
    receive(fast, b"12345678")
    fast.finished()
    assert host.heard == []
    for second in range(1, 8):
        host.time = 100.0 + second
        receive(slow, b"%d" % second)
    assert host.heard == [Arriving(*OWNER, 3), Arriving(*OWNER, 3)]
    receive(slow, b"8")
    slow.finished()
    assert host.taken == [b"12345678", b"12345678"]
    assert host.arrivals.has_room(OWNER)
    assert host.pool.free == 4


def test_a_body_that_is_broken_off_is_answered_and_its_buffer_comes_back_at_its_end() -> None:
    host, device = Host(), Device()
    chunk = a_chunk(host, device)
    receive(chunk, b"1234")
    host.arrivals.break_off(*OWNER)
    [answer] = device.answers
    assert isinstance(answer, Retry)
    assert host.pool.free == 3, "the kernel may still write into it"
    chunk.broken()
    assert host.pool.free == 4


def a_starter(host: Host, device: Device) -> ArrivingChunk:
    buffer = host.pool.take(3)
    assert buffer is not None
    waiting = cast(WaitingDevice, device)
    return ArrivingChunk(cast(AggregatorHost, host), OWNER, buffer, OFFER, 0, waiting)


def test_a_chunk_that_has_filled_its_starter_goes_on_in_a_whole_buffer() -> None:
    host, device = Host(), Device()
    chunk = a_starter(host, device)
    receive(chunk, b"123")
    assert host.heard == [Arriving(*OWNER, 3), Growing(*OWNER)]
    receive(chunk, b"45678")
    chunk.finished()
    assert host.taken == [b"12345678"]
    assert host.pool.free == 4


def test_a_chunk_that_may_not_grow_is_answered() -> None:
    class Strict(Host):
        def deliver(self, message: Message) -> None:
            if isinstance(message, Growing):
                self.arrivals.break_off(*OWNER)

    host, device = Strict(), Device()
    chunk = a_starter(host, device)
    receive(chunk, b"123")
    assert isinstance(device.answers[0], Retry)
    chunk.broken()
    assert host.pool.free == 4


def test_a_body_that_finds_no_memory_is_answered_once_if_its_upload_is_dropped_too() -> None:
    """The endpoint ends it in the next turn of the loop. An answer that is given twice raises, and
    the other bodies of the task would not be broken off.
    """
    host, device, other = Host(), Device(), Body()
    starter = host.pool.take(4)
    assert starter is not None
    waiting = cast(WaitingDevice, device)
    chunk = ArrivingChunk(cast(AggregatorHost, host), OWNER, starter, OFFER, 0, waiting)
    host.arrivals.add(("words", "s2"), other)
    while host.pool.take(4) is not None:
        pass
    receive(chunk, b"half")
    host.arrivals.break_off("words", None)
    assert [type(answer) for answer in device.answers] == [Retry]
    assert other.is_broken
    chunk.broken()
    assert host.arrivals.has_room(OWNER)
