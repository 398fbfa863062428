"""What a device keeps of a task between participations: the values of its personal tensors.

    16 bytes   of the SHA-256 of the layout: names and shapes
    values     little-endian float32, in the order of the layout

The state never leaves the device. It is written together with a participation, so training that was
not followed by an upload changes nothing. A state of another layout is not used: the owner has
changed the model, and personal tensors start again.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec
import numpy as np

from papaya.learning.parameters import FLOAT32, Manifest, Vector, is_finite

MAX_STATE_BYTES: Final = 64 << 20
"""Of the whole state."""

_LAYOUT_BYTES: Final = 16


def encode_state(layout: Manifest, values: Vector) -> bytes:
    return _name(layout) + values.astype(FLOAT32, copy=False).tobytes()


def decode_state(layout: Manifest, data: bytes) -> Vector | None:
    """The values, or None if there are none for this layout."""
    if not data.startswith(_name(layout)) or len(data) != _LAYOUT_BYTES + 4 * layout.length:
        return None
    values: Vector = np.frombuffer(data, FLOAT32, offset=_LAYOUT_BYTES)
    return values if is_finite(values) else None


def _name(layout: Manifest) -> bytes:
    return hashlib.sha256(msgspec.json.encode(layout)).digest()[:_LAYOUT_BYTES]
