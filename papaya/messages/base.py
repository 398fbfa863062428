"""What all messages have in common: they are frozen, typed, tagged and bounded in size."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

PROTOCOL_VERSION = 2
OLDEST_PROTOCOL = 1
"""Devices of this version and later may take part."""
SIGNED_TASKS_SINCE = 2
"""Devices of earlier versions get only tasks that nobody has signed."""

TaskId: TypeAlias = str
NodeId: TypeAlias = str
SessionId: TypeAlias = str
BlobKey: TypeAlias = str
# The number of a node's start, from its row `boot/<node>`. In rows and messages of earlier versions
# it is a float, in those of 0.3.0 even a time.
Boot: TypeAlias = int | float

# Limits on what an untrusted peer can make a server hold.
MAX_EXCLUDED = 64
ShortText = Annotated[str, Meta(max_length=128)]
Name = Annotated[str, Meta(max_length=64, pattern=r"\A[A-Za-z0-9._:/+=@ -]*\Z")]
Url = Annotated[str, Meta(max_length=2048, pattern=r"\Ahttps?://[!-~]+\Z")]
Names = Annotated[tuple[Name, ...], Meta(max_length=32)]
Excluded = Annotated[tuple[Name, ...], Meta(max_length=MAX_EXCLUDED)]
SealedTicket = Annotated[bytes, Meta(max_length=1024)]
SealedSeed = Annotated[bytes, Meta(max_length=256)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Crc32 = Annotated[int, Meta(ge=0, lt=2**32)]
Seconds = Annotated[float, Meta(ge=0)]


class Message(Struct, frozen=True, gc=False, tag=True):
    """One message. `gc=False` is safe: a frozen message cannot refer to itself."""
