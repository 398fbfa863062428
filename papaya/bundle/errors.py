"""What is wrong with a bundle. `reason` is a fixed word for counters; the message is for people."""

from __future__ import annotations

from typing import Literal, TypeAlias

from papaya.errors import ProtocolError

BundleReason: TypeAlias = Literal[
    "encoding",
    "signature",
    "unknown_owner",
    "revoked",
    "conflict",
    "expired",
    "rolled_back",
    "too_far_ahead",
    "not_allowed",
    "wrong_bytes",
    "engine",
]


class BundleError(ProtocolError):
    """A bundle that this device must not use.

    encoding         not in its one encoding, or a value out of bounds
    signature        not signed by the key that it names
    unknown_owner    signed by a key that this device has not pinned
    revoked          signed by a key that its owner has revoked
    conflict         a second, different successor of one key: somebody else may have it
    expired          the lease is over, or begins in the future
    rolled_back      an older run or revision than this device has seen
    too_far_ahead    a run or revision that no owner can have reached yet
    not_allowed      it asks for more than this device's policy allows
    wrong_bytes      a blob that is not the one named in the manifest
    engine           the engine of this device cannot run the program
    """

    def __init__(self, reason: BundleReason, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason
