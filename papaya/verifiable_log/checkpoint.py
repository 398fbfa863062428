"""Checkpoints (C2SP tlog-checkpoint): a log's signed size and root, and the required signers.

    origin, unique to the log
    size of the tree, decimal
    base64 of its root

`LogPolicy` is the configuration of a device or an auditor: the log's key, and the witnesses that
must have cosigned. A witness signs only checkpoints that extend those it signed before. So a log
cannot show one history to devices and another to auditors unless witnesses collude. Without
witnesses a fork is found only by someone who sees both histories.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

from papaya.verifiable_log.errors import LogError, TooFewWitnesses, UnknownSigner
from papaya.verifiable_log.merkle import HASH_BYTES, MAX_SIZE
from papaya.verifiable_log.note import (
    COSIGNATURE,
    LOG_SIGNATURE,
    Note,
    SignerKey,
    VerifierKey,
    decode_base64,
    open_note,
    signed_by,
    signed_note,
)

# A log that shows the same checkpoint for longer may be hiding newer ones.
MAX_COSIGNATURE_AGE_S = 7 * 24 * 3600.0

# How far a witness's clock may be ahead of ours.
_CLOCK_SKEW_S = 300


@dataclass(frozen=True)
class Checkpoint:
    """Size and root of a log's tree. `open_checkpoint` returns verified ones."""

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """Parse a note's text. Extension lines are ignored."""
        lines = text.split("\n")
        if len(lines) < 4 or not all(lines[:-1]) or lines[-1]:
            raise LogError("malformed checkpoint: expected origin, size and root")
        origin, digits, encoded = lines[:3]
        if not (digits.isascii() and digits.isdigit()) or (digits[0] == "0" and digits != "0"):
            raise LogError(f"invalid log size: {digits[:40]!r}")
        # Twenty digits are enough; int() of many more is slow.
        if len(digits) > 20 or int(digits) > MAX_SIZE:
            raise LogError(f"a log of {digits[:40]} entries is too large")
        root = decode_base64(encoded)
        if len(root) != HASH_BYTES:
            raise LogError(f"invalid root: expected {HASH_BYTES} bytes, found {len(root)}")
        return cls(origin, int(digits), root)


@dataclass(frozen=True)
class LogPolicy:
    """A log's key, and how many of which witnesses must have cosigned its checkpoint.

    The origin of a log is the name of its key.
    """

    key: VerifierKey
    witnesses: tuple[VerifierKey, ...] = ()
    quorum: int = 0
    max_cosignature_age_s: float = MAX_COSIGNATURE_AGE_S

    def __post_init__(self) -> None:
        if self.key.kind != LOG_SIGNATURE:
            raise LogError(f"{self.key.name} is the key of a witness, not of a log")
        for witness in self.witnesses:
            if witness.kind != COSIGNATURE:
                raise LogError(f"{witness.name} is the key of a log, not of a witness")
        # The signed message does not name its witness: two names for one key would count twice.
        if len({witness.public_key for witness in self.witnesses}) != len(self.witnesses):
            raise LogError("two witnesses have the same key")
        if not 0 <= self.quorum <= len(self.witnesses):
            raise LogError(
                f"the quorum is {self.quorum}, but there are {len(self.witnesses)} witnesses"
            )
        if self.witnesses and not self.quorum:
            raise LogError("there are witnesses, but the quorum is 0: set it to at least 1")
        if not self.max_cosignature_age_s > 0:
            raise LogError(
                f"the maximum age of a cosignature is {self.max_cosignature_age_s} s: it must be "
                "above zero"
            )


def sign_checkpoint(checkpoint: Checkpoint, key: SignerKey) -> bytes:
    return signed_note(checkpoint.text, [key.signature_line(checkpoint.text)])


def open_checkpoint(raw: bytes, policy: LogPolicy, now: float) -> Checkpoint:
    """The checkpoint, if the log and enough witnesses have signed it."""
    note = open_note(raw, [policy.key, *policy.witnesses])
    checkpoint = _signed_by_log(note, policy)
    times = [
        time for key, time in zip(note.signed_by, note.times, strict=True) if key != policy.key
    ]
    counted = [time for time in times if time is not None and _in_time(time, policy, now)]
    if len(counted) < policy.quorum:
        raise TooFewWitnesses(
            f"only {len(counted)} valid cosignatures of the checkpoint of size {checkpoint.size} "
            f"are at most {policy.max_cosignature_age_s:g} s old; {policy.quorum} of "
            f"{len(policy.witnesses)} witnesses are required; {len(times) - len(counted)} are too "
            "old or have a time in the future"
        )
    return checkpoint


def open_remembered(raw: bytes, policy: LogPolicy) -> Checkpoint:
    """A checkpoint that was accepted before, or came with the device's package.

    Witnesses are not checked again, because the policy may name others by now.
    """
    return _signed_by_log(open_note(raw, [policy.key]), policy)


def _signed_by_log(note: Note, policy: LogPolicy) -> Checkpoint:
    if policy.key not in note.signed_by:
        # Only a few ids are shown. The real key of the log is among the unknown ones.
        found = [*note.unknown, *(key.key_id.hex() for key in note.signed_by)]
        raise UnknownSigner(
            f"{policy.key.name} has not signed this checkpoint: {signed_by(found, [policy.key])}"
        )
    checkpoint = Checkpoint.parse(note.text)
    if checkpoint.origin != policy.key.name:
        raise LogError(f"this is a checkpoint of {checkpoint.origin!r}, not of {policy.key.name!r}")
    return checkpoint


def _in_time(time: int, policy: LogPolicy, now: float) -> bool:
    if time > now + _CLOCK_SKEW_S:
        return False
    return now - time <= policy.max_cosignature_age_s
