"""Test vectors of parameters, updates and evaluations in the clear."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from hashlib import sha256
from zlib import crc32

import numpy as np

from papaya.conformance.vectors.cases import (
    Case,
    VectorFormat,
    case_of,
)
from papaya.learning import parameters as parameters_files
from papaya.learning.evaluation import EVALUATION_LENGTH, admit_evaluation, evaluation_vector
from papaya.learning.parameters import FLOAT32
from papaya.learning.weighting import admit


def _parameters_files() -> Iterator[Case]:
    values = np.array([1.0, -2.5, 0.0], FLOAT32)
    plain = parameters_files.encode(values, {})
    named = parameters_files.encode(values, {"task": "next-word", "version": "7"})
    size = int.from_bytes(plain[:8], "little")
    header, body = plain[8 : 8 + size], plain[8 + size :]

    def file(changed: bytes, data: bytes = body) -> str:
        return (struct.pack("<Q", len(changed)) + changed + data).hex()

    known = {"length": 3, "sha256": sha256(plain).hexdigest(), "values": values.tolist()}
    yield case_of("valid", "three numbers", file=plain.hex(), **known)
    known["sha256"] = sha256(named).hexdigest()
    yield case_of("valid", "with metadata", file=named.hex(), **known)
    for name, length, found in (
        ("of another length", 4, plain.hex()),
        ("cut short", 3, plain[:-1].hex()),
        ("with a byte too many", 3, plain.hex() + "00"),
        ("empty", 3, ""),
        ("a header that is longer than the file", 3, (struct.pack("<Q", 2**40) + plain[8:]).hex()),
        ("float64 numbers", 3, file(header.replace(b"F32", b"F64"))),
        ("another tensor", 3, file(header.replace(b"parameters", b"parameterz"))),
        ("spaces in the header", 3, file(header.replace(b'":', b'": ', 1))),
        ("a header that is not JSON", 3, file(b"{" * len(header))),
        ("not a number", 3, file(header, struct.pack("<3f", 1, math.nan, 0))),
        ("infinity", 3, file(header, struct.pack("<3f", 1, 0, -math.inf))),
    ):
        yield case_of("invalid", name, length=length, file=found)


def _check_parameters_file(case: Case) -> object:
    found = parameters_files.decode(bytes.fromhex(case["file"]), case["length"])
    return {"values": found.tolist(), "sha256": sha256(bytes.fromhex(case["file"])).hexdigest()}


def _updates() -> Iterator[Case]:
    def update(*values: float) -> bytes:
        return struct.pack(f"<{len(values)}f", *values)

    whole = update(1.0, -1.0, 0.5, 0.0, 0.0, 2.0)
    chunks = [whole[start : start + 8] for start in range(0, len(whole), 8)]
    yield case_of(
        "valid",
        "in three chunks",
        update=whole.hex(),
        length=6,
        clip=None,
        chunk_bytes=8,
        chunks=[{"data": c.hex(), "crc32": f"{crc32(c):08x}"} for c in chunks],
    )
    yield case_of("valid", "of zeros", update=bytes(24).hex(), length=6, clip=1.0)
    yield case_of("valid", "at the clip", update=update(0.6, 0.0, 0.8).hex(), length=3, clip=1.0001)
    for name, data, length, clip in (
        ("not a number", update(0.0, math.nan, 0.0), 3, None),
        ("infinity", update(0.0, math.inf, 0.0), 3, None),
        ("minus infinity", update(0.0, -math.inf, 0.0), 3, 1.0),
        ("above the clip", update(0.6, 0.1, 0.8), 3, 1.0),
        ("above 2^60 without a clip", update(2.0**61, 0.0, 0.0), 3, None),
        ("too short", update(0.0, 0.0), 3, None),
        ("too long", update(0.0, 0.0, 0.0, 0.0), 3, None),
        ("cut inside a number", update(0.0, 0.0, 0.0)[:-1], 3, None),
    ):
        yield case_of("invalid", name, update=data.hex(), length=length, clip=clip)


def _check_update(case: Case) -> object:
    data = bytes.fromhex(case["update"])
    size = case.get("chunk_bytes", len(data) or 1)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    admit(pieces, case["length"], case["clip"])
    if "chunks" not in case:
        return {}
    return {"chunks": [{"data": p.hex(), "crc32": f"{crc32(p):08x}"} for p in pieces]}


def _evaluations() -> Iterator[Case]:
    for volume, loss_sum, examples in ((0, 0.0, 1), (3, 12.5, 2), (2**15, 999.0, 100)):
        yield case_of(
            "valid",
            f"{examples} examples of a device with {volume} training examples",
            volume=volume,
            loss_sum=loss_sum,
            examples=examples,
            max_examples=100,
            update=evaluation_vector(volume, loss_sum, examples).tolist(),
        )
    good = evaluation_vector(3, 12.5, 2).tolist()
    start = next(index for index, value in enumerate(good) if value) // 9 * 9
    for name, place, value in (
        ("a number that is not whole", start + 1, 0.5),
        ("a negative number", start + 1, -1.0),
        ("a digit of 8,192", start + 1, 8192.0),
        ("two clients", start + 8, 2.0),
        ("no client", start + 8, 0.0),
        ("more examples than the task takes", start + 5, 101.0),
        ("no examples", start + 5, 0.0),
        ("a mean loss above 1,000", start + 4, 8191.0),
        ("two buckets", (start + 9) % EVALUATION_LENGTH, 1.0),
    ):
        changed = [value if index == place else number for index, number in enumerate(good)]
        yield case_of("invalid", name, max_examples=100, update=changed)


def _check_evaluation(case: Case) -> object:
    admit_evaluation([np.array(case["update"], FLOAT32)], case["max_examples"])
    made = evaluation_vector(case["volume"], case["loss_sum"], case["examples"])
    return {"update": made.tolist()}


FORMATS: dict[str, VectorFormat] = {
    "parameters_files": (_parameters_files, _check_parameters_file),
    "updates": (_updates, _check_update),
    "evaluations": (_evaluations, _check_evaluation),
}
