"""Paths and headers of the device API (docs/spec/protocol.md), used by devices and servers."""

from __future__ import annotations

from papaya.messages.base import Message
from papaya.messages.participation import Complete, Heartbeat, Join, Leave, Report
from papaya.messages.selection import CheckIn

PATHS: dict[type[Message], str] = {
    CheckIn: "/v1/check-in",
    Join: "/v1/join",
    Heartbeat: "/v1/heartbeat",
    Report: "/v1/report",
    Complete: "/v1/complete",
    Leave: "/v1/leave",
}
CHUNK_PATH = "/v1/uploads/{upload}/chunks/{index}"
PARAMETERS_PATH = "/v1/parameters/{key...}"
URLS_PATH = "/v1/urls/{key...}"
TICKET_HEADER, CRC32_HEADER = "papaya-ticket", "papaya-crc32"
