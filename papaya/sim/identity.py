"""How kept files are named: by a digest of all that decides what is in them, our own code included.

Another configuration, other data, another seed or other code has another name. So a file is never
taken for what this program would make now, and nobody has to know when to delete one.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

import papaya

NEVER_RUN: Final = ("cli", "experiments", "net")  # by a simulated run: it may not import them
_PACKAGE: Final = Path(papaya.__file__).parent
_DIGITS: Final = 24


def digest(value: Struct) -> str:
    encoded = msgspec.json.encode((code_digest(), value), order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:_DIGITS]


@cache
def code_digest(package: Path = _PACKAGE) -> str:
    """Of every source that a run may execute; read once, when a process first asks."""
    hasher = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in NEVER_RUN:
            content = path.read_bytes()
            hasher.update(f"{name.as_posix()} {len(content)}\n".encode() + content)
    return hasher.hexdigest()
