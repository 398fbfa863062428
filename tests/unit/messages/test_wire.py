"""The wire: every message comes back as it went, and each direction takes only its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.errors import ProtocolError
from papaya.messages import wire
from papaya.messages.base import PROTOCOL_VERSION, Message
from papaya.messages.participation import MAX_CHUNKS, Alive, Chunk, Heartbeat, Join, Retry
from papaya.messages.selection import Capabilities, CheckIn
from papaya.messages.wire import MAX_MESSAGE_BYTES, Parser
from tests.unit.messages.strategies import (
    BETWEEN_SERVERS,
    FROM_DEVICE,
    TO_DEVICE,
    a_message,
    with_unknown_fields,
)

DIRECTIONS: list[tuple[Parser, tuple[type[Message], ...]]] = [
    (wire.from_device, FROM_DEVICE),
    (wire.to_device, TO_DEVICE),
    (wire.between_servers, BETWEEN_SERVERS),
]
# Every kind of message gets this many examples.
FEW = settings(max_examples=20)
EVERY = [(parser, kind) for parser, kinds in DIRECTIONS for kind in kinds]


def as_document(message: Message) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(wire.encode(message))
    return document


# --- Round trips


@pytest.mark.parametrize(("parser", "kind"), EVERY)
@FEW
@given(data=st.data())
def test_every_message_comes_back_as_it_went(
    parser: Parser, kind: type[Message], data: st.DataObject
) -> None:
    message = data.draw(a_message(kind))
    parsed = parser.parse(wire.encode(message))
    assert type(parsed) is kind
    assert parsed == message


def test_a_message_is_parsed_where_it_lies() -> None:
    whole = b"head" + wire.encode(Heartbeat(b"ticket")) + b"tail"
    assert wire.from_device.parse(memoryview(whole)[4:-4]) == Heartbeat(b"ticket")


def test_what_a_hello_looks_like() -> None:
    """Written down: a change of these bytes is a change of the protocol."""
    hello = CheckIn(PROTOCOL_VERSION, Capabilities("torch", ("ab12",), 512, ("eu",)), ("t1",))
    assert wire.encode(hello) == (
        b'{"type":"CheckIn","protocol":2,"capabilities":{"engine":"torch","modules":["ab12"],'
        b'"memory_mb":512,"labels":["eu"],"trust_policy":true,"owners":[],"engine_version":"",'
        b'"upload_bits":32},"excluded":["t1"]}'
    )
    assert wire.encode(Join(b"\x00\xff")) == b'{"type":"Join","ticket":"AP8="}'


# --- Newer peers


@pytest.mark.parametrize(("parser", "kind"), EVERY)
@FEW
@given(data=st.data())
def test_unknown_fields_are_ignored(
    parser: Parser, kind: type[Message], data: st.DataObject
) -> None:
    """Servers ignore unknown fields: a newer peer may say more."""
    message = data.draw(a_message(kind))
    newer = with_unknown_fields(as_document(message))
    assert parser.parse(json.dumps(newer).encode()) == message


# --- Directions


@pytest.mark.parametrize(("parser", "kind"), EVERY)
@FEW
@given(data=st.data())
def test_a_message_of_another_direction_is_refused(
    parser: Parser, kind: type[Message], data: st.DataObject
) -> None:
    """A device that speaks like a server, or a server like a device, is not understood."""
    encoded = wire.encode(data.draw(a_message(kind)))
    for other, _ in DIRECTIONS:
        if other is not parser:
            with pytest.raises(ProtocolError, match="Invalid value"):
                other.parse(encoded)


def test_every_message_is_frozen() -> None:
    """The simulator hands the same object to sender and receiver."""
    assert [kind for _, kind in EVERY if not kind.__struct_config__.frozen] == []


def test_no_message_has_two_directions() -> None:
    names = [kind.__name__ for _, kind in EVERY]
    assert len(names) == len(set(names))


def test_a_refusal_says_what_was_expected() -> None:
    with pytest.raises(ProtocolError, match="invalid message, expected a device's request: "):
        wire.from_device.parse(wire.encode(Alive()))
    with pytest.raises(ProtocolError, match="invalid message, expected an answer to a device: "):
        wire.to_device.parse(b"{}")
    with pytest.raises(
        ProtocolError, match="invalid message, expected a message between servers: "
    ):
        wire.between_servers.parse(b"")


# --- Bounds


def test_the_longest_message_is_parsed_and_one_byte_more_is_refused() -> None:
    message = wire.encode(Alive())
    room = MAX_MESSAGE_BYTES - len(message)
    assert wire.to_device.parse(message + room * b" ") == Alive()
    with pytest.raises(ProtocolError, match=f"has {MAX_MESSAGE_BYTES + 1} bytes, the limit is"):
        wire.to_device.parse(message + (room + 1) * b" ")


HELLO = as_document(CheckIn(1, Capabilities()))
CHUNK = as_document(Chunk(b"t", "u", 0, 0, b"d"))
JOINED = {
    "type": "Joined",
    "ticket": "",
    "task": "t",
    "session": "s",
    "version": 0,
    "parameters": "p",
    "model_length": 1,
    "update_length": 1,
    "evaluates": False,
    "heartbeat_s": 1,
    "training_timeout_s": 1,
    "participation_gap_s": 0,
    "max_participations": None,
}
GRANTED = {
    "type": "UploadGranted",
    "ticket": "",
    "version": 0,
    "chunk_bytes": 1,
    "upload_timeout_s": 1,
}

# document, field, the last value that is legal, the first that is not
BOUNDS: list[tuple[Parser, dict[str, Any], str, Any, Any]] = [
    (wire.from_device, HELLO, "protocol", 2**53, 2**53 + 1),
    (wire.from_device, HELLO, "excluded", 64 * ["t"], 65 * ["t"]),
    (wire.from_device, HELLO, "excluded", [64 * "t"], [65 * "t"]),
    (wire.from_device, HELLO, "capabilities", {"labels": 32 * ["l"]}, {"labels": 33 * ["l"]}),
    (wire.from_device, HELLO, "capabilities", {"modules": 32 * ["m"]}, {"modules": 33 * ["m"]}),
    (wire.from_device, HELLO, "capabilities", {"engine": 64 * "e"}, {"engine": 65 * "e"}),
    (wire.from_device, HELLO, "capabilities", {"engine": "a-Z.0"}, {"engine": "a\x00"}),
    (wire.from_device, HELLO, "capabilities", {"engine": "a b"}, {"engine": "a b\n"}),
    (wire.from_device, HELLO, "capabilities", {"labels": ["eu"]}, {"labels": ["é"]}),
    (wire.from_device, HELLO, "capabilities", {"memory_mb": 0}, {"memory_mb": -1}),
    (wire.from_device, HELLO, "capabilities", {"memory_mb": 2**53}, {"memory_mb": 2**53 + 1}),
    (wire.from_device, CHUNK, "index", 0, -1),
    (wire.from_device, CHUNK, "index", MAX_CHUNKS - 1, MAX_CHUNKS),
    (wire.from_device, CHUNK, "crc32", 2**32 - 1, 2**32),
    (wire.from_device, CHUNK, "crc32", 0, -1),
    (wire.from_device, CHUNK, "upload", 128 * "u", 129 * "u"),
    (wire.from_device, CHUNK, "ticket", 1366 * "A" + "==", 1366 * "A" + "A="),
    (wire.from_device, {"type": "Report", "ticket": ""}, "examples", 1, 0),
    (wire.from_device, {"type": "Report", "ticket": ""}, "examples", 2**31, 2**31 + 1),
    (wire.from_device, {"type": "Leave", "ticket": ""}, "reason", 128 * "r", 129 * "r"),
    (wire.to_device, {"type": "Retry", "reason": ""}, "after_s", 0, -0.001),
    (wire.to_device, {"type": "Retry", "after_s": 0}, "reason", 128 * "r", 129 * "r"),
    (wire.to_device, {"type": "Incomplete"}, "missing", [MAX_CHUNKS - 1], [MAX_CHUNKS]),
    (wire.to_device, {"type": "Completed"}, "discarded", "round_over", "because"),
    (wire.to_device, {"type": "Aborted"}, "reason", "stale", "because"),
    (wire.to_device, GRANTED, "chunk_bytes", 1, 0),
    (wire.to_device, GRANTED, "upload_timeout_s", 0, -1),
    (wire.to_device, JOINED, "version", 0, -1),
    (wire.to_device, JOINED, "model_length", 0, -1),
    (wire.to_device, JOINED, "heartbeat_s", 1, -1),
    (wire.to_device, JOINED, "training_timeout_s", 1, -1),
    (wire.to_device, JOINED, "participation_gap_s", 0, -1),
    (wire.to_device, JOINED, "max_participations", 0, -1),
]


@pytest.mark.parametrize(("parser", "document", "field", "legal", "illegal"), BOUNDS)
def test_bounds_hold_on_decoding(
    parser: Parser, document: dict[str, Any], field: str, legal: object, illegal: object
) -> None:
    parser.parse(json.dumps(document | {field: legal}).encode())
    with pytest.raises(ProtocolError):
        parser.parse(json.dumps(document | {field: illegal}).encode())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1"])
def test_a_time_is_a_finite_number_from_zero(number: str) -> None:
    """A NaN deadline would never pass and never be kept."""
    with pytest.raises(ProtocolError):
        wire.to_device.parse(f'{{"type":"Retry","reason":"","after_s":{number}}}'.encode())
    assert wire.to_device.parse(b'{"type":"Retry","reason":"","after_s":0}') == Retry("", 0.0)


@pytest.mark.parametrize("field", ["type", "ticket", "upload", "index", "crc32", "data"])
def test_a_missing_field_is_refused(field: str) -> None:
    document = {name: value for name, value in CHUNK.items() if name != field}
    with pytest.raises(ProtocolError):
        wire.from_device.parse(json.dumps(document).encode())


# --- One encoding


@pytest.mark.parametrize("kind", [*FROM_DEVICE, *BETWEEN_SERVERS])
@FEW
@given(data=st.data())
def test_parsed_and_encoded_again_it_is_the_same(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(a_message(kind))
    parser = wire.from_device if kind in FROM_DEVICE else wire.between_servers
    encoded = wire.encode(message)
    assert wire.encode(parser.parse(encoded)) == encoded
