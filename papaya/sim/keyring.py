"""A keyring for simulations, which seals faster."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from papaya.messages.tickets import Keyring


class SimulatedKeyring(Keyring):
    """Seals tickets with keyed BLAKE2b instead of HMAC-SHA256: the same rules, in a third of the
    time. Nothing in a run depends on the bytes of a seal.
    """

    _macs: dict[int, Any]

    def replace(self, keys: Mapping[int, bytes], sealing: int) -> None:
        self._macs = {key_id: blake2b(key=key, digest_size=32) for key_id, key in keys.items()}
        self._sealing = sealing
