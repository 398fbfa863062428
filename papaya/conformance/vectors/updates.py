"""Test vectors of parameters, updates and evaluations in the clear."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from hashlib import sha256
from zlib import crc32

import numpy as np

from papaya.config.upload_bits import UploadBits
from papaya.conformance.vectors.cases import (
    Case,
    VectorFormat,
    case_of,
)
from papaya.learning import parameters as parameters_files
from papaya.learning.compression import decode_update, encode_update
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


def _short(bits: UploadBits, scales: list[float], codes: list[int]) -> bytes:
    kind = {8: "b", 16: "h"}[bits]
    return struct.pack(f"<{len(scales)}f{len(codes)}{kind}", *scales, *codes)


def _updates_in_fewer_bits() -> Iterator[Case]:
    """In the valid cases every number is a multiple of its scale: no draw changes a code."""
    bits: UploadBits
    for bits, most in ((8, 127), (16, 32_767)):
        yield from _valid_in_fewer_bits(bits, most)
        yield from _invalid_in_fewer_bits(bits, most)
    yield case_of(
        "invalid",
        "in 8 bits for a task of 16",
        bits=16,
        length=4,
        clip=None,
        update=_short(8, [1.0], [127, 0, 0, 1]).hex(),
    )
    # The codes are read as the scale, which is NaN then.
    swapped = struct.pack("<4bf", 0, 0, -64, 127, 1.0)
    yield case_of(
        "invalid", "codes before scales", bits=8, length=4, clip=None, update=swapped.hex()
    )


def _valid_in_fewer_bits(bits: UploadBits, most: int) -> Iterator[Case]:
    first = [most, 1 - most, *range(-100, 101), *([0] * 53)]
    cases: tuple[tuple[str, list[float], list[int], float | None], ...] = (
        ("four numbers", [1.0], [most, -64, 0, 1], None),
        ("negative numbers", [0.25], [-most, -1], None),
        ("of zeros", [0.0], [0, 0, 0], 1.0),
        ("256 numbers and one more", [0.5, 0.125], [*first, -most], None),
        ("at the clip", [2.0**-20], [most, 0], most * 2.0**-20),
    )
    for name, scales, codes, clip in cases:
        yield case_of(
            "valid",
            f"{name}, in {bits} bits",
            bits=bits,
            length=len(codes),
            clip=clip,
            values=[code * scales[index // 256] for index, code in enumerate(codes)],
            update=_short(bits, scales, codes).hex(),
        )


def _invalid_in_fewer_bits(bits: UploadBits, most: int) -> Iterator[Case]:
    whole = _short(bits, [1.0], [most, -64, 0, 1])
    many = [most, *([0] * 256)]
    cases: tuple[tuple[str, int, float | None, bytes], ...] = (
        ("float32 numbers", 4, None, struct.pack("<4f", most, -64, 0, 1)),
        ("without scales", 4, None, whole[4:]),
        ("one scale for 257 numbers", 257, None, _short(bits, [1.0], many)),
        ("one number too few", 5, None, whole),
        ("one number too many", 3, None, whole),
        ("cut inside a scale", 4, None, whole[:3]),
        ("empty", 4, None, b""),
        ("a scale that is not a number", 4, None, _short(bits, [math.nan], [0, 0, 0, 1])),
        ("zeros with a scale that is not a number", 2, None, _short(bits, [math.nan], [0, 0])),
        ("an infinite scale", 2, None, _short(bits, [-math.inf], [1, 1])),
        ("zeros with an infinite scale", 2, None, _short(bits, [math.inf], [0, 0])),
        ("numbers above the largest float32", 2, None, _short(bits, [3e38], [most, 0])),
        ("above the clip", 2, 1.0, _short(bits, [1.0], [1, 1])),
        ("lifted above the clip by rounding", 1, 1.0, _short(bits, [1.0001 / most], [most])),
        ("above 2^60 without a clip", 1, None, _short(bits, [2.0**61 / most], [most])),
    )
    for name, length, clip, data in cases:
        yield case_of(
            "invalid",
            f"{name}, in {bits} bits",
            bits=bits,
            length=length,
            clip=clip,
            update=data.hex(),
        )


def _check_in_fewer_bits(case: Case) -> object:
    length, bits, clip = case["length"], case["bits"], case["clip"]
    decoded = decode_update([bytes.fromhex(case["update"])], length, bits)
    admit([decoded.data], length, clip)
    encoded = encode_update(decoded, bits, seed=0, clip=clip)
    return {"values": decoded.tolist(), "update": encoded.hex()}


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
    "updates_in_fewer_bits": (_updates_in_fewer_bits, _check_in_fewer_bits),
    "evaluations": (_evaluations, _check_evaluation),
}
