"""The head of a bundle: everything that an owner has signed for one run, as servers pass it on."""

from __future__ import annotations

from typing import Final, Self

import msgspec
from msgspec import Struct

from papaya.bundle.errors import BundleError
from papaya.bundle.owner import SignedStatement

MAX_HEAD_BYTES: Final = 1 << 19
PROGRAM_FILE: Final = "task.py"
COMPILED_FILE: Final = "task.program"
PROGRAM_FILES: Final = {"torch": PROGRAM_FILE, "executorch": COMPILED_FILE}
"""The file of a program that defines the task, for each engine."""


class BundleHead(Struct, frozen=True):
    """A manifest with its lease, and the owner's statements about its keys.

    `program` and `frozen_file` say where the servers keep these blobs; their hashes are in the
    manifest. Without frozen tensors in a file of their own, `frozen_file` is empty.
    """

    manifest: SignedStatement
    lease: SignedStatement
    program: str
    statements: tuple[SignedStatement, ...] = ()
    frozen_file: str = ""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        if len(data) > MAX_HEAD_BYTES:
            raise BundleError("encoding", f"{len(data)} bytes, at most {MAX_HEAD_BYTES}")
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BundleError("encoding", f"invalid bundle: {str(error)[:200]}") from None
