"""The errors of this package, by what is wrong with the log.

    LogError                    malformed data
    ├── ProofError
    ├── SignatureError
    │   └── UnknownSigner       the configured key may be the wrong one
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


class ProofError(LogError):
    """A Merkle proof is invalid."""


class SignatureError(LogError):
    """A note lacks a required signature, or has a wrong one."""


class UnknownSigner(SignatureError):
    """A note has no signature of the log's key, so either the key or the log is the wrong one."""


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
