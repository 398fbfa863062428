"""Checkpoints of learning: an interrupted run resumes and ends with the same numbers.

A checkpoint has all that the versions after it depend on: the models from which clients still
train, the state of the server's optimizer, and what was judged. It is one file, written completely
or not at all. The trace has its own file (lab.py), so a run that is interrupted while it is
recorded starts again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from msgspec import Struct

from papaya.sim.jobs import write_whole
from papaya.study.masked_words import MaskedRounding
from papaya.study.precision import RoundingError


class LearningState(Struct, frozen=True):
    """What learning has reached after `version`: models, moments and norms as bytes.

    `judging` is what was judged (`Judging.state`), `device_states` are the personal tensors of
    clients.
    """

    version: int
    models: dict[int, bytes]
    optimizer: bytes
    norms: list[float]
    judging: dict[str, Any]
    device_states: dict[int, bytes] = {}
    rounding: dict[int, RoundingError] = {}
    masked: MaskedRounding | None = None


class Checkpoints:
    """One file, written at most every `every_s` seconds; 0: after every version."""

    def __init__(self, path: Path, every_s: float) -> None:
        self.path = path
        self._every_s = every_s
        self._written_s = monotonic()

    def load(self) -> LearningState | None:
        """None also for a damaged file: learning starts from version 0."""
        try:
            return msgspec.msgpack.decode(self.path.read_bytes(), type=LearningState)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def save_if_due(self, make: Callable[[], LearningState]) -> None:
        if monotonic() - self._written_s < self._every_s:
            return
        encoded = msgspec.msgpack.encode(make())
        write_whole(self.path, lambda path: path.write_bytes(encoded))
        self._written_s = monotonic()

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)
