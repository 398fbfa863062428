"""Logs for tests, what others serve of them, and a reference tree that is slow and plain."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from papaya.verifiable_log.checkpoint import LogPolicy
from papaya.verifiable_log.errors import MissingFile
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.note import COSIGNATURE, SignerKey
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.record import Record

KEY = SignerKey("example.org/tsa-log", bytes(range(32)))
WITNESSES = tuple(SignerKey(f"witness.example/{i}", bytes([i] * 32), COSIGNATURE) for i in range(3))
POLICY = LogPolicy(KEY.verifier)
NOW = 1_750_338_000
ARTIFACT = "ab" * 32


def a_record(artifact: str = ARTIFACT, revision: str = "12" * 20) -> Record:
    measurements = {"software": {"mrenclave": artifact}, "sgx": {"mrenclave": "cd" * 32}}
    return Record(
        artifact, measurements, "https://example.org/papaya", revision, "papaya tsa build"
    )


def a_log(folder: Path, entries: Sequence[bytes] = (), key: SignerKey = KEY) -> LogFolder:
    log = LogFolder(folder)
    log.create(key)
    if entries:
        log.append(entries, key)
    return log


def a_reader(
    log: LogFolder, remembered: bytes | None = None, policy: LogPolicy = POLICY
) -> LogReader:
    return LogReader(log.fetch, policy, remembered)


class Served:
    """A log's files as somebody else serves them; a test may change or remove some."""

    def __init__(self, log: LogFolder) -> None:
        self._log = log
        self.changed: dict[str, bytes] = {}
        self.removed: set[str] = set()
        self.fetched: list[str] = []

    def fetch(self, path: str) -> bytes:
        self.fetched.append(path)
        if path in self.removed:
            raise MissingFile(path)
        return self.changed.get(path) or self._log.fetch(path)


def slow_root(leaves: Sequence[bytes]) -> bytes:
    """RFC 6962, 2.1, as it is written."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + slow_root(leaves[:k]) + slow_root(leaves[k:])).digest()


class SlowNodes:
    """`Nodes` of complete subtrees, each computed from its leaves."""

    def __init__(self, leaves: Sequence[bytes]) -> None:
        self._leaves = leaves

    def __call__(self, level: int, index: int) -> bytes:
        covered = self._leaves[index << level : (index + 1) << level]
        assert len(covered) == 1 << level
        return slow_root(covered)
