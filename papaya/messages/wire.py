"""The only parser of untrusted bytes. It raises ProtocolError and nothing else.

Messages are JSON. Unknown fields are ignored, so that newer peers can talk to older ones.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from papaya.errors import ConfigError, ProtocolError
from papaya.messages import audit_trail, control, participation, selection, storage
from papaya.messages.base import Message

MAX_MESSAGE_BYTES = 4 << 20
_QUOTED = 200

FromDevice = selection.CheckIn | participation.Request
ToDevice = selection.Accepted | selection.Rejected | participation.Answer
BetweenServers = control.Control

FROM_DEVICE_TYPES = get_args(FromDevice)

_encoder = msgspec.json.Encoder()
_rows = msgspec.json.Decoder(
    storage.LeaderRow
    | storage.BootRow
    | storage.FormatRow
    | storage.EpochRow
    | storage.TaskRow
    | storage.FenceRow
    | storage.RecordRow
    | storage.VersionRow
    | storage.OptimizerRow
    | storage.ConsumedRow
    | storage.ManifestRow
    | storage.TicketKeyRow
    | storage.ClusterKeyRow
    | storage.TsaRow
    | storage.RevokedRow
    | storage.RunRow
    | storage.PointRow
    | storage.RevisionRow
    | storage.EndingsRow
    | storage.DeletedRow
    | storage.AdminAddressRow
    | storage.MaintenanceRow
    | audit_trail.AuditRow
    | audit_trail.AuditHeadRow
    | audit_trail.AuditStartRow
    | storage.AccountRow
    | storage.QuotaRow
    | storage.ShareRow
    | storage.RolloutRow
    | storage.EventRow
)


class Parser:
    """Parses one direction of one conversation, and refuses messages of another."""

    def __init__(self, union: object, what: str) -> None:
        self._decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(union)
        self._what = what

    def parse(self, data: bytes | memoryview) -> Message:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"{self._what} has {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}"
            )
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"invalid message, expected {self._what}: {str(error)[:_QUOTED]}"
            ) from error


from_device = Parser(FromDevice, "a device's request")
to_device = Parser(ToDevice, "an answer to a device")
located = Parser(selection.Located, "the place of a blob")
between_servers = Parser(BetweenServers, "a message between servers")


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def encode_row(row: storage.Row) -> bytes:
    return _encoder.encode(row)


def decode_row(data: bytes) -> storage.Row:
    """Decode a row of the state store. Raises ProtocolError if it is damaged."""
    try:
        row: storage.Row = _rows.decode(data)
        return row
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        problem = str(error)[:_QUOTED]
        raise ProtocolError(f"damaged row in the state store: {problem}") from error
