"""What all state stores share: transactions and rows as bytes, and when two rows are the same.

Keys of rows are UTF-8. Keys that begin with 0xff are the store's own; no prefix reaches them.
"""

from __future__ import annotations

import secrets

from papaya.errors import OperatorError, ProtocolError
from papaya.messages import wire
from papaya.messages.storage import Row, Transaction

AFTER_UTF8 = b"\xff"  # not used in UTF-8, and sorts after every byte that is
CLUSTER_ID_KEY = AFTER_UTF8 + b"cluster"  # the row of the cluster's id

RawRows = dict[bytes, bytes]


def new_cluster_id() -> str:
    return secrets.token_hex(16)


class EncodedTransaction:
    """A transaction as bytes, encoded before any lock is taken."""

    __slots__ = ("delete", "put", "require")

    def __init__(self, transaction: Transaction) -> None:
        self.require = [
            (key.encode(), None if row is None else wire.encode_row(row))
            for key, row in transaction.require
        ]
        self.put = [(key.encode(), wire.encode_row(row)) for key, row in transaction.put]
        self.delete = [key.encode() for key in transaction.delete]


def is_same_row(found: bytes | None, expected: bytes | None) -> bool:
    """Do both encode the same row? An earlier version wrote rows without fields that are new."""
    if found == expected:
        return True
    if found is None or expected is None:
        return False
    try:
        return wire.decode_row(found) == wire.decode_row(expected)
    except ProtocolError:
        return False  # a damaged row equals nothing


def decode_rows(found: RawRows, store: object) -> dict[str, Row]:
    """The rows of a read, ordered by key. `store` says where a damaged one is."""
    return {key.decode(): _decode(key, found[key], store) for key in sorted(found)}


def _decode(key: bytes, row: bytes, store: object) -> Row:
    try:
        return wire.decode_row(row)
    except ProtocolError as error:
        raise OperatorError(
            f"the row {key.decode()} of {store} is damaged: {error}",
            hint=f"restore {store} and the blobs from the same backup",
        ) from error
