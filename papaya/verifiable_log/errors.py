"""What this package raises: something of a log does not hold. The class says what.

    LogError                 malformed bytes of any kind
    ├── ProofError           a Merkle proof that does not prove what it should
    ├── SignatureError       a note without the signatures that were asked for
    ├── Unreachable          nothing was read: it says nothing about the log
    ├── MissingFile          the log does not serve a file that its checkpoint promises
    ├── RollbackError        an older checkpoint than the one that is remembered
    └── ForkError            a checkpoint that does not continue the one that is remembered

It stands apart from `papaya/errors.py` because this package imports nothing of Papaya.
"""

from __future__ import annotations


class LogError(Exception):
    """Something of a log is malformed or does not hold."""


class ProofError(LogError):
    """A Merkle proof does not prove what it should."""


class SignatureError(LogError):
    """A note lacks a signature that was asked for, or carries a wrong one."""


class LogSourceUnreachable(LogError):
    """The log could not be read at all: an address, a network, a server that is down."""


class MissingFile(LogError):
    """The log does not serve a file that its checkpoint promises."""


class RollbackError(LogError):
    """The log shows an older checkpoint than the one that is remembered."""


class ForkError(LogError):
    """The log's checkpoint does not continue the one that is remembered."""
