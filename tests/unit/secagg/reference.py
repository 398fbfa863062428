"""Slow and plain: AES-128 in counter mode, fixed point and HKDF, as their definitions say."""

from __future__ import annotations

import hashlib
import hmac
from fractions import Fraction


def _doubled(byte: int) -> int:
    return (byte << 1 ^ (0x1B if byte & 0x80 else 0)) & 0xFF


def _multiplied(a: int, b: int) -> int:
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a, b = _doubled(a), b >> 1
    return product


def _substituted(byte: int) -> int:
    inverse = next((x for x in range(256) if _multiplied(byte, x) == 1), 0)
    turned = [(inverse << n | inverse >> (8 - n)) & 0xFF for n in range(5)]
    return turned[0] ^ turned[1] ^ turned[2] ^ turned[3] ^ turned[4] ^ 0x63


_BOX = [_substituted(byte) for byte in range(256)]


def _round_keys(key: bytes) -> list[bytes]:
    words = [key[at : at + 4] for at in range(0, 16, 4)]
    constant = 1
    for at in range(4, 44):
        word = words[-1]
        if at % 4 == 0:
            word = bytes(_BOX[byte] for byte in word[1:] + word[:1])
            word = bytes((word[0] ^ constant, *word[1:]))
            constant = _doubled(constant)
        words.append(bytes(a ^ b for a, b in zip(words[-4], word, strict=True)))
    return [b"".join(words[at : at + 4]) for at in range(0, 44, 4)]


def _mixed(column: bytes) -> bytes:
    factors = (2, 3, 1, 1)
    return bytes(
        _multiplied(column[0], factors[-row % 4])
        ^ _multiplied(column[1], factors[(1 - row) % 4])
        ^ _multiplied(column[2], factors[(2 - row) % 4])
        ^ _multiplied(column[3], factors[(3 - row) % 4])
        for row in range(4)
    )


def aes128(key: bytes, block: bytes) -> bytes:
    """FIPS 197."""
    keys = _round_keys(key)
    state = bytes(a ^ b for a, b in zip(block, keys[0], strict=True))
    for number in range(1, 11):
        state = bytes(_BOX[byte] for byte in state)
        state = bytes(state[(at + 4 * (at % 4)) % 16] for at in range(16))
        if number < 10:
            state = b"".join(_mixed(state[at : at + 4]) for at in range(0, 16, 4))
        state = bytes(a ^ b for a, b in zip(state, keys[number], strict=True))
    return state


def mask(seed: bytes, length: int, bits: int = 32, counter: int = 0) -> list[int]:
    """The keystream from this counter on, as little-endian words."""
    size = bits // 8
    blocks = range(counter, counter + length * size // 16 + 1)
    stream = b"".join(aes128(seed, n.to_bytes(16, "big")) for n in blocks)
    return [int.from_bytes(stream[size * at : size * (at + 1)], "little") for at in range(length)]


def encoded(value: float, factor: float, limit: int) -> int:
    """The group element of one value: exact rounding of the float64 product, half to even."""
    nearest = round(Fraction(float(value) * factor))
    return max(-limit, min(limit, nearest)) % 2**32


def encoded_16(
    values: list[float], weight: float, factor: float, limit: int, seed: bytes
) -> list[int]:
    """The values and the weight as words of 16 bits, rounded at random by the seed."""
    first, *draws = mask(seed, len(values) + 1, 16, 2**127)
    fine = [round(Fraction(float(value) * factor * 65536)) for value in values]
    steps = [max(-limit * 65536, min(limit * 65536, each)) for each in fine]
    words = [(t + r) // 65536 for t, r in zip(steps, draws, strict=True)]
    words.append((round(Fraction(weight * limit * 65536)) + first) // 65536)
    return [word % 65536 for word in words]


def hkdf_sha256(secret: bytes, info: bytes, size: int) -> bytes:
    """RFC 5869 with no salt."""
    key = hmac.digest(bytes(32), secret, hashlib.sha256)
    block, derived = b"", b""
    while len(derived) < size:
        block = hmac.digest(key, block + info + bytes((len(derived) // 32 + 1,)), hashlib.sha256)
        derived += block
    return derived[:size]
