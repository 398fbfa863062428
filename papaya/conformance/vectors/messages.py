"""Test vectors of the messages to and from a client."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator

from papaya.conformance.vectors.cases import (
    Case,
    VectorFormat,
    as_json,
    case_of,
)
from papaya.messages import wire

_TICKET = b64encode(b"a ticket").decode()
_JOINED: Case = {
    "type": "Joined",
    "ticket": _TICKET,
    "task": "next-word",
    "session": "ab12",
    "version": 7,
    "parameters": f"next-word/3/version-7-{'0a' * 16}",
    "model_length": 5,
    "update_length": 5,
    "evaluates": False,
    "heartbeat_s": 10.0,
    "training_timeout_s": 240,
    "participation_gap_s": 3600.0,
    "max_participations": None,
}
_GRANTED: Case = {
    "type": "UploadGranted",
    "ticket": _TICKET,
    "version": 9,
    "chunk_bytes": 1048576,
    "upload_timeout_s": 120.0,
}
_SECURE: Case = {
    "parameters": b64encode(b"{}").decode(),
    "offer": b64encode(bytes(112)).decode(),
    "identity": b64encode(bytes(32)).decode(),
    "platform": "software",
    "evidence": b64encode(b"a quote").decode(),
    "collateral": b64encode(b"{}").decode(),
    "leaf": 3,
}
_ANSWERS: tuple[Case, ...] = (
    {"type": "Accepted", "ticket": _TICKET, "task": "next-word", "session": "ab12"},
    {"type": "Rejected", "reason": "full", "retry_from_s": 5.0, "retry_until_s": 15},
    _JOINED,
    {"type": "Alive"},
    _GRANTED,
    {**_GRANTED, "secure": _SECURE},
    {**_GRANTED, "upload_url": "https://aggregator-1.example:8750"},
    {"type": "ChunkReceived", "upload": "u-1", "index": 4095},
    {"type": "Incomplete", "missing": [0, 2]},
    {"type": "Completed"},
    {"type": "Completed", "discarded": None},
    {"type": "Completed", "discarded": "round_over"},
    {"type": "Left"},
    {"type": "Aborted", "reason": "stale"},
    {"type": "Refused", "reason": "no"},
    {"type": "Retry", "reason": "busy", "after_s": 0.5},
    {"type": "Retry", "reason": "moved", "after_s": 0.5, "elsewhere": True},
)
_REQUESTS: tuple[Case, ...] = (
    {
        "type": "CheckIn",
        "protocol": 1,
        "capabilities": {
            "engine": "torch",
            "modules": [f"sha256:{'0a' * 16}"],
            "memory_mb": 1024,
            "labels": ["wifi"],
        },
        "excluded": ["next-word"],
    },
    {"type": "CheckIn", "protocol": 2, "capabilities": {}},
    {"type": "Join", "ticket": _TICKET},
    {"type": "Heartbeat", "ticket": _TICKET},
    {"type": "Report", "ticket": _TICKET, "examples": 2**31},
    {"type": "Complete", "ticket": _TICKET, "upload": "u-1"},
    {"type": "Complete", "ticket": _TICKET, "upload": "u-1", "sealed": b64encode(bytes(64))},
    {"type": "Leave", "ticket": _TICKET, "reason": "x" * 128},
)
_OPTIONAL = ("discarded", "hint", "secure", "sealed", "excluded", "upload_url", "elsewhere")
_ABORTED_ONLY = "an unknown reason to abort"
_BAD_FIELDS: tuple[tuple[str, Case], ...] = (
    ("a ticket that is not base64", {"ticket": "no base64!"}),
    ("a ticket without padding", {"ticket": _TICKET.rstrip("=")}),
    ("a ticket of 1,025 bytes", {"ticket": b64encode(bytes(1025)).decode()}),
    ("a ticket that is a number", {"ticket": 7}),
    ("a negative count", {"version": -1}),
    ("a count with a fraction", {"version": 1.5}),
    ("a count above 2^53", {"version": 2**53 + 1}),
    ("a count that is a string", {"protocol": "1"}),
    ("negative seconds", {"after_s": -0.5}),
    ("seconds that are a string", {"heartbeat_s": "10"}),
    ("a boolean that is a number", {"evaluates": 1}),
    ("chunks of no bytes", {"chunk_bytes": 0}),
    ("a chunk index of 4,096", {"index": 4096}),
    ("a missing chunk of 4,096", {"missing": [4096]}),
    (_ABORTED_ONLY, {"reason": "because"}),
    ("an unknown reason to discard", {"discarded": "because"}),
    ("a reason of 129 characters", {"reason": "x" * 129}),
    ("no examples", {"examples": 0}),
    ("more than 2^31 examples", {"examples": 2**31 + 1}),
    ("65 excluded tasks", {"excluded": ["a"] * 65}),
    ("a name with a character that names do not have", {"excluded": ["a\u00e9"]}),
    ("a name of 65 characters", {"excluded": ["a" * 65]}),
    ("33 labels", {"capabilities": {"labels": ["a"] * 33}}),
    ("negative memory", {"capabilities": {"memory_mb": -1}}),
    ("an upload_url of 513 characters", {"upload_url": "https://" + "a" * 505}),
    ("an elsewhere that is a number", {"elsewhere": 1}),
    ("an upload id of 129 characters", {"upload": "u" * 129}),
    ("a sealed seed of 257 bytes", {"sealed": b64encode(bytes(257)).decode()}),
    ("an offer of 111 bytes", {"secure": {**_SECURE, "offer": b64encode(bytes(111))}}),
    ("an identity of 33 bytes", {"secure": {**_SECURE, "identity": b64encode(bytes(33))}}),
    ("parameters of 1,025 bytes", {"secure": {**_SECURE, "parameters": b64encode(bytes(1025))}}),
    ("a quote above 16 KiB", {"secure": {**_SECURE, "evidence": b64encode(bytes(16385))}}),
    ("a leaf of -2", {"secure": {**_SECURE, "leaf": -2}}),
    ("a platform that is no name", {"secure": {**_SECURE, "platform": "<script>"}}),
)


def _messages(valid: tuple[Case, ...]) -> Iterator[Case]:
    """Every message, and every message with one mistake. Equal bodies appear once."""
    cases = {case["body"]: case for case in _message_cases(valid)}
    return iter(cases.values())


def _message_cases(valid: tuple[Case, ...]) -> Iterator[Case]:
    for message in valid:
        kind = message["type"]
        yield case_of("valid", kind, body=as_json(message))
        yield case_of(
            "valid", f"{kind} with an unknown field", body=as_json({**message, "new": [1]})
        )
        for field in message:
            if field not in _OPTIONAL:
                left = {name: value for name, value in message.items() if name != field}
                yield case_of("invalid", f"{kind} without {field}", body=as_json(left))
        for what, change in _BAD_FIELDS:
            if change.keys() <= message.keys() and (what != _ABORTED_ONLY or kind == "Aborted"):
                yield case_of("invalid", f"{kind} with {what}", body=as_json({**message, **change}))
    whole = as_json(valid[0])
    yield case_of("invalid", "an unknown type", body=as_json({**valid[0], "type": "Unheard"}))
    yield case_of("invalid", "a type in lower case", body=as_json({**valid[0], "type": "alive"}))
    yield case_of("invalid", "a list", body=f"[{whole}]")
    yield case_of("invalid", "half an object", body=whole[: len(whole) // 2])
    yield case_of("invalid", "two objects", body=whole + whole)
    yield case_of("invalid", "nothing", body="")
    yield case_of("invalid", "a page of a proxy", body="<html>502 Bad Gateway</html>")
    yield case_of("invalid", "null", body="null")


FORMATS: dict[str, VectorFormat] = {
    "answers": (
        lambda: _messages(_ANSWERS),
        lambda case: wire.to_device.parse(case["body"].encode()),
    ),
    "requests": (
        lambda: _messages(_REQUESTS),
        lambda case: wire.from_device.parse(case["body"].encode()),
    ),
}
