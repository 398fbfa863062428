"""One record of the log: a released TSA binary, its measurement on each platform, its source.

    "append the identity and manifest of the trusted binary to the verifiable log" (paper)

A record is canonical JSON: parsed, encoded again and compared, so that one release has one leaf
hash. A record must have all measurements that `REGISTERS` lists for a platform: a TDX record
without RTMR2 would allow any kernel command line. A `software` measurement must be the artifact's
hash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from papaya.verifiable_log.errors import LogError

FORMAT = "papaya-tsa-release/v1"
MAX_RECORD_BYTES = 16 * 1024

# In the log of a demonstration, whose sources are an installation and no commit.
NO_REVISION = "0" * 40

# platform -> register -> bytes
REGISTERS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "sgx": {"mrenclave": 32},
        "software": {"mrenclave": 32},
        "tdx": {"mrtd": 48, "rtmr0": 48, "rtmr1": 48, "rtmr2": 48, "rtmr3": 48},
    }
)

_FIELDS = {"artifact", "format", "measurements", "recipe", "repository", "revision"}
_REVISION = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MAX_TEXT = 1000


@dataclass(frozen=True)
class Record:
    """`artifact` is the SHA-256 that `papaya tsa build` prints; all hashes are lower-case hex."""

    artifact: str
    measurements: Mapping[str, Mapping[str, str]]
    repository: str
    revision: str
    recipe: str

    def __post_init__(self) -> None:
        _check_hex("artifact", self.artifact, 32)
        if not self.measurements:
            raise LogError("a record needs the measurements of at least one platform")
        for platform, registers in self.measurements.items():
            _check_registers(platform, registers)
        software = self.measurements.get("software")
        if software is not None and software["mrenclave"] != self.artifact:
            raise LogError("the software measurement is not the artifact's hash")
        for name, text in (("repository", self.repository), ("recipe", self.recipe)):
            _check_text(name, text)
        _check_revision(self.revision)

    def encode(self) -> bytes:
        fields = {
            "artifact": self.artifact,
            "format": FORMAT,
            "measurements": {name: dict(of) for name, of in self.measurements.items()},
            "recipe": self.recipe,
            "repository": self.repository,
            "revision": self.revision,
        }
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode()

    @classmethod
    def decode(cls, raw: bytes) -> Record:
        fields = _object(raw)
        if fields.keys() != _FIELDS or fields["format"] != FORMAT:
            raise LogError(f"not a record of the format {FORMAT}")
        measurements = fields["measurements"]
        if not isinstance(measurements, dict):
            raise LogError("measurements must be grouped by platform and register")
        record = cls(
            fields["artifact"],
            measurements,
            fields["repository"],
            fields["revision"],
            fields["recipe"],
        )
        if record.encode() != raw:
            raise LogError("the record is not canonical JSON")
        return record

    @property
    def is_demonstration(self) -> bool:
        """It names no revision, and no hardware runs this artifact."""
        return self.revision == NO_REVISION and self.measurements.keys() == {"software"}

    def check_measured(self, platform: str, registers: Mapping[str, str]) -> None:
        """Raise unless these are the release's measurements on this platform."""
        logged = self.measurements.get(platform)
        if logged is None:
            raise LogError(f"the record {self.artifact[:16]}… has no measurement for {platform}")
        for name in REGISTERS[platform]:
            if registers.get(name) != logged[name]:
                raise LogError(f"{name} is {registers.get(name)}, the logged one is {logged[name]}")


def _object(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_RECORD_BYTES:
        raise LogError(f"a record of {len(raw)} bytes is longer than {MAX_RECORD_BYTES}")
    try:
        fields = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise LogError("the record is not JSON") from error
    if not isinstance(fields, dict):
        raise LogError("the record is not a JSON object")
    return fields


def _check_registers(platform: str, registers: object) -> None:
    if platform not in REGISTERS:
        raise LogError(f"unknown platform: {platform!r}")
    wanted = REGISTERS[platform]
    if not isinstance(registers, Mapping) or registers.keys() != wanted.keys():
        raise LogError(f"{platform} needs the measurements {', '.join(wanted)}")
    for name, size in wanted.items():
        _check_hex(f"{platform} {name}", registers[name], size)


def _check_hex(name: str, value: object, size: int) -> None:
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{2 * size}}}", value):
        raise LogError(f"{name} must be {size} bytes in lower-case hexadecimal digits")


def _check_revision(value: object) -> None:
    if not isinstance(value, str) or not _REVISION.fullmatch(value):
        raise LogError("revision must be a commit's full id, in lower-case hexadecimal digits")


def _check_text(name: str, text: object) -> None:
    # Printable only: a hostile log must not send control sequences to a terminal.
    if not (isinstance(text, str) and 0 < len(text) <= _MAX_TEXT and text.isprintable()):
        raise LogError(f"{name} must be one printable line of at most {_MAX_TEXT} characters")
