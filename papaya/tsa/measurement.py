"""The manifest of the TSA binary, and its hash.

    "the code of the trusted party running inside the Intel SGX enclave is open sourced in advance
    along with the hash of the trusted binary, such that the community can exam the code and rebuild
    the trusted binary" (paper, "Deployment with Intel SGX")

`papaya/tsa/enclave.toml` lists the enclave's own sources, and its dependencies as wheels by hash.
The manifest gives each file's SHA-256, as `sha256sum` prints it, sorted by path; its own SHA-256 is
the artifact's hash, which the log records and `software` evidence reports. It depends on the
sources and the lock only. A lock is refused if it names a file twice, a path outside the tree, or a
wheel file that does not match the wheel's name, its version, the Python version or the platforms.
An audit reads the locks that an operator published, so a lock can raise `LockError` only.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

LOCK = "papaya/tsa/enclave.toml"
MANIFEST = "MANIFEST.sha256"
WHEELS = "wheels"
MAX_LOCK_BYTES = 16 * 1024
MAX_SOURCE_BYTES = 4 * 1024 * 1024  # the longest source in use has less than 100 KB

ReadSource: TypeAlias = Callable[[str], bytes]

_SOURCE = re.compile(r"papaya(/[a-z_]+)*/[a-z_]+\.(py|toml)")
# Name, version, perhaps a build, then tags of Python versions, ABIs and platforms.
_WHEEL_FILE = re.compile(
    r"(?=.{,255}\Z)(?P<name>[A-Za-z0-9_.]+)-(?P<version>[A-Za-z0-9_.]+)(-[0-9][A-Za-z0-9_.]*)?"
    r"-(?P<pythons>[a-z0-9.]+)-(?P<abis>[a-z0-9_.]+)-(?P<platforms>[a-z0-9_.]+)\.whl"
)
_PYTHON = re.compile(r"3\.[1-9][0-9]?")
# pip reads these texts, and would take one that starts with a dash for an option.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# Of a release. pip takes a text that ends as an archive does for a file in the current folder.
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?")
_TAG = re.compile(r"(?P<kind>cp|py)3(?P<minor>[0-9]*)")
_FIRST_ABI3 = 2  # Python 3.2
_MOST = 32  # wheels, for each of which pip runs, and platforms; the enclave has four and three
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN_CHARACTERS = 100  # of an invalid value


class LockError(Exception):
    """The enclave's lock file is invalid."""


@dataclass(frozen=True)
class Wheel:
    """One dependency, a file of the artifact."""

    name: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True)
class EnclaveLock:
    """The files of the artifact, and the Python version and platforms of its wheels."""

    python: str
    platforms: tuple[str, ...]
    sources: tuple[str, ...]
    wheels: tuple[Wheel, ...]

    @classmethod
    def parse(cls, raw: bytes) -> EnclaveLock:
        # tomllib needs memory in proportion to the square of the length of a dotted key.
        if len(raw) > MAX_LOCK_BYTES:
            raise LockError(f"{LOCK} of {len(raw)} bytes is longer than {MAX_LOCK_BYTES}")
        try:
            fields: dict[str, Any] = tomllib.loads(raw.decode())
            lock = cls(
                fields["python"],
                tuple(fields["platforms"]),
                tuple(fields["sources"]),
                tuple(Wheel(**wheel) for wheel in fields["wheels"]),
            )
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            reason = str(error)[:_SHOWN_CHARACTERS]
            raise LockError(f"{LOCK} is not a valid lock file: {reason}") from error
        lock._check()
        return lock

    def _check(self) -> None:
        if (most := max(len(self.wheels), len(self.platforms))) > _MOST:
            raise LockError(f"{LOCK} names {most} wheels or platforms, more than {_MOST}")
        for path in self.sources:
            _match(_SOURCE, path)
        _match(_PYTHON, self.python)
        for platform in self.platforms:
            _match(_PLAIN, platform)
        for wheel in self.wheels:
            self._check_wheel(wheel)
        paths = [*self.sources, LOCK, *(wheel.file for wheel in self.wheels)]
        if len(set(paths)) != len(paths):
            raise LockError(f"{LOCK} names a file twice")

    def _check_wheel(self, wheel: Wheel) -> None:
        """Refuse a wheel that pip cannot get although its file may exist.

        Otherwise a lock could give the file of a genuine wheel another hash, and an audit would say
        only that this wheel cannot be downloaded.
        """
        _match(_SHA256, wheel.sha256)
        _match(_PLAIN, wheel.name)
        _match(_VERSION, wheel.version)
        file = _match(_WHEEL_FILE, wheel.file)
        about = f"{LOCK} contains the wheel {wheel.name[:50]} {wheel.version[:50]}"
        shown = wheel.file[:_SHOWN_CHARACTERS]
        named = _normalized(wheel.name), wheel.version
        if (_normalized(file["name"]), file["version"]) != named:
            raise LockError(f"{about} with the file of another wheel: {shown!r}")
        platforms = {"any", *self.platforms} & set(file["platforms"].split("."))
        tags = product(file["pythons"].split("."), file["abis"].split("."))
        if not platforms or not any(self.takes(python, abi) for python, abi in tags):
            raise LockError(f"{about} with a file for another Python or platform: {shown!r}")

    @property
    def abi(self) -> str:
        """CPython's own."""
        return f"cp{self.python.replace('.', '')}"

    def takes(self, python: str, abi: str) -> bool:
        """Whether pip takes a wheel with these tags for this Python version."""
        tag = _TAG.fullmatch(python)
        if tag is None:
            return False
        newest = int(self.python.removeprefix("3."))
        is_older = not tag["minor"] or int(tag["minor"]) <= newest
        if abi == "none":
            return python == self.abi or (tag["kind"] == "py" and is_older)
        if abi == "abi3":
            return tag["kind"] == "cp" and is_older and int(tag["minor"] or 0) >= _FIRST_ABI3
        return abi == python == self.abi


def max_bytes(path: str) -> int:
    """The limit of a source file. Whoever reads sources that somebody else wrote must check it."""
    return MAX_LOCK_BYTES if path == LOCK else MAX_SOURCE_BYTES


def installed(path: str) -> bytes:
    """`ReadSource` for the code that is running."""
    return (Path(__file__).resolve().parents[2] / path).read_bytes()


def read_lock(read: ReadSource) -> EnclaveLock:
    return EnclaveLock.parse(read(LOCK))


def manifest(read: ReadSource) -> bytes:
    """One line per file of the artifact: its SHA-256, two spaces, its path."""
    lock = read_lock(read)
    hashes = {path: hashlib.sha256(read(path)).hexdigest() for path in (LOCK, *lock.sources)}
    hashes |= {f"{WHEELS}/{wheel.file}": wheel.sha256 for wheel in lock.wheels}
    return "".join(f"{hashes[path]}  {path}\n" for path in sorted(hashes)).encode()


def measure(read: ReadSource = installed) -> bytes:
    """The artifact's hash: SHA-256 of its manifest."""
    return hashlib.sha256(manifest(read)).digest()


def _normalized(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _match(pattern: re.Pattern[str], value: object) -> re.Match[str]:
    # Only text is shown: `repr` fails for deep tables and for integers of many digits.
    if not isinstance(value, str):
        raise LockError(f"{LOCK} contains a value that is not text: {type(value).__name__}")
    match = pattern.fullmatch(value)
    if match is None:
        raise LockError(f"{LOCK} contains an invalid value: {value[:_SHOWN_CHARACTERS]!r}")
    return match
