"""The errors of this package, by what is wrong with the log.

    LogError                    malformed data
    ├── MalformedNote           the address may be wrong
    ├── ProofError
    ├── SignatureError
    │   ├── UnknownSigner       the configured key may be the wrong one
    │   └── TooFewWitnesses     they may not have signed yet
    ├── LogSourceUnreachable    not evidence against the log
    ├── MissingFile
    │   └── NoCheckpoint        not evidence against the log: the address may be wrong
    ├── RollbackError
    └── ForkError

They do not derive from `papaya/errors.py` because this package imports nothing else of Papaya.
"""

from __future__ import annotations


class LogError(Exception):
    """The log is malformed or fails a check."""


class MalformedNote(LogError):
    """Not a signed note at all, for example a web page."""


class ProofError(LogError):
    """A Merkle proof is invalid."""


class SignatureError(LogError):
    """A note lacks a required signature, or has a wrong one."""


class UnknownSigner(SignatureError):
    """A note has no signature of the log's key, so either the key or the log is the wrong one."""


class TooFewWitnesses(SignatureError):
    """Fewer witnesses have signed a checkpoint lately than the policy requires."""


class LogSourceUnreachable(LogError):
    """The log could not be read, for example because its server is down."""


class MissingFile(LogError):
    """The log does not serve a file that its checkpoint implies."""


class NoCheckpoint(MissingFile):
    """There is no checkpoint at the address, so nothing that the log has signed was read."""


class RollbackError(LogError):
    """The log's checkpoint is older than the remembered one."""


class ForkError(LogError):
    """The log's checkpoint does not extend the remembered one."""
