"""Any bytes at all into the one parser of untrusted bytes: a message, or a ProtocolError."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from papaya.errors import ProtocolError
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.wire import MAX_MESSAGE_BYTES, Parser
from tests.unit.messages.strategies import (
    BETWEEN_SERVERS,
    FROM_DEVICE,
    ROWS,
    TO_DEVICE,
    a_message,
    a_row,
)

PARSERS = [wire.from_device, wire.to_device, wire.between_servers]
EVERY = (*FROM_DEVICE, *TO_DEVICE, *BETWEEN_SERVERS)
TICKET = "dGhlIHRpY2tldA=="
NAMES = [kind.__name__ for kind in EVERY]


def parsed_or_refused(parser: Parser, data: bytes) -> Message | None:
    """Any other exception than ProtocolError fails the test; so does a message that is not one."""
    try:
        message = parser.parse(data)
    except ProtocolError:
        return None
    assert type(message) in EVERY
    return message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.binary(max_size=300))
@example(b"\xff\xfe\xfa")
@example(b'{"type":"Join","ticket":"\xed\xa0\x80"}')
@example(b'{"type":"Join","ticket":"' + base64.b64encode(bytes(1025)) + b'"}')
@example(b'{"type":"Join","ticket":"===="}')
@example(b'{"type":"Join","type":"Leave","ticket":""}')
@example(b'{"type":7}')
@example(b"null")
@example(b"")
def test_any_bytes(data: bytes) -> None:
    for parser in PARSERS:
        parsed_or_refused(parser, data)


@given(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=6), JSON, max_size=3), st.data())
def test_any_fields_under_a_known_name(
    name: str, extra: dict[str, object], data: st.DataObject
) -> None:
    kind = next(kind for kind in EVERY if kind.__name__ == name)
    fields = {field: data.draw(JSON) for field in kind.__struct_fields__}
    document = json.dumps({"type": name} | extra | fields).encode()
    for parser in PARSERS:
        parsed_or_refused(parser, document)


def mutate(encoded: bytes, data: st.DataObject) -> bytes:
    """Cut, double, overwrite, insert: what a broken proxy or a fuzzer does to a good message."""
    mutated = bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(mutated)))
        end = data.draw(st.integers(start, min(len(mutated), start + 8)))
        interesting = st.sampled_from([b"-", b"9" * 30, b"1e400", b"null", b"[", b'"', b"\\u"])
        mutated[start:end] = data.draw(st.binary(max_size=4) | interesting)
    return bytes(mutated)


@settings(max_examples=400)
@given(a_message(*EVERY), st.data())
def test_a_mutated_message(message: Message, data: st.DataObject) -> None:
    mutated = mutate(wire.encode(message), data)
    for parser in PARSERS:
        parsed_or_refused(parser, mutated)


@given(a_message(*EVERY), st.data())
def test_a_message_cut_short_is_no_message(message: Message, data: st.DataObject) -> None:
    encoded = wire.encode(message)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    assert [parsed_or_refused(parser, cut) for parser in PARSERS] == [None, None, None]


@settings(max_examples=200)
@given(a_message(*FROM_DEVICE), st.data())
def test_what_is_parsed_can_be_sent_on(message: Message, data: st.DataObject) -> None:
    """A selector forwards what it parsed: it must survive being encoded and parsed once more."""
    parsed = parsed_or_refused(wire.from_device, mutate(wire.encode(message), data))
    if parsed is not None:
        assert wire.from_device.parse(wire.encode(parsed)) == parsed


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("where", [b"%s", b'{"type":"Alive","x":%s', b'{"type":"Join","x":%s'])
def test_nesting_without_end(opening: bytes, where: bytes) -> None:
    for depth in (900, 1100, 100_000):
        data = where.replace(b"%s", opening * depth)
        assert [parsed_or_refused(parser, data) for parser in PARSERS] == [None, None, None]


@pytest.mark.parametrize("parser", PARSERS)
def test_too_long_is_refused_unread(parser: Parser) -> None:
    with pytest.raises(ProtocolError, match="bytes, the limit is"):
        parser.parse(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("digits", [20, 400, 5000, 100_000])
def test_numbers_without_end(digits: int) -> None:
    number = digits * "9"
    fields: list[tuple[Parser, str]] = [
        (wire.from_device, '{"type":"CheckIn","protocol":%s,"capabilities":{}}'),
        (wire.from_device, '{"type":"Report","ticket":"","examples":%s}'),
        (wire.to_device, '{"type":"Retry","reason":"","after_s":%s}'),
        (wire.to_device, '{"type":"Retry","reason":"","after_s":1e%s}'),
    ]
    for parser, document in fields:
        parsed_or_refused(parser, (document % number).encode())


@pytest.mark.parametrize(
    "document",
    [
        {"type": "Chunk", "ticket": TICKET, "upload": 7},
        {"type": "Join", "ticket": TICKET + "=", "x": TICKET},
        {"type": "Leave", "ticket": TICKET},
        {TICKET: TICKET},
        [TICKET],
    ],
)
def test_a_refusal_does_not_repeat_a_ticket(document: object) -> None:
    """It goes to logs and back to the sender."""
    with pytest.raises(ProtocolError) as caught:
        wire.from_device.parse(json.dumps(document).encode())
    assert TICKET not in str(caught.value)


@pytest.mark.parametrize(
    "document", [{"type": 100_000 * "a"}, {"type": "Aborted", "reason": 100_000 * "a"}]
)
def test_a_refusal_is_short_however_long_the_message_was(document: object) -> None:
    """A log that repeats what strangers send is filled by them."""
    with pytest.raises(ProtocolError) as caught:
        wire.to_device.parse(json.dumps(document).encode())
    assert len(str(caught.value)) < 500


# --- Rows: written by us, but a disk may have had them in between


@settings(max_examples=300)
@given(a_row(*ROWS), st.data())
def test_a_damaged_row_is_a_row_or_a_protocol_error(row: Any, data: st.DataObject) -> None:
    damaged = mutate(wire.encode_row(row), data)
    with suppress(ProtocolError):
        assert type(wire.decode_row(damaged)) in ROWS


@pytest.mark.parametrize(
    "data",
    [
        b'{"type":"TaskRow","config":{"task":"a","concurrency":0,"model_length":1}}',
        b'{"type":"TaskRow","config":{"task":"A","concurrency":1,"model_length":1}}',
        b'{"type":"EpochRow","epoch":1,"x":' + 100_000 * b"[",
        b'{"type":"EpochRow","epoch":"1"}',
        b'{"type":"EpochRow"}',
        b"\xff",
        b"",
    ],
    ids=range(7),
)
def test_a_row_that_we_never_wrote_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="damaged row"):
        wire.decode_row(data)
