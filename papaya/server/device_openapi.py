"""The device API as OpenAPI: what `device_api.py`, `uploads.py` and `public_log.py` serve.

A client in another language needs this and the dialogue in `papaya/messages/participation.py`. A
client needs only the message in the body; the status is for proxies and logs. Every request may be
repeated.
"""

from __future__ import annotations

from papaya import __version__
from papaya.config.server import MAX_CHUNK_BYTES
from papaya.messages.base import Message
from papaya.messages.participation import (
    MAX_CHUNKS,
    Aborted,
    Alive,
    ChunkReceived,
    Complete,
    Completed,
    Heartbeat,
    Incomplete,
    Join,
    Joined,
    Leave,
    Left,
    Refused,
    Report,
    Retry,
    UploadGranted,
)
from papaya.messages.paths import CHUNK_PATH, CRC32_HEADER, PATHS, TICKET_HEADER
from papaya.messages.selection import Accepted, CheckIn, Located, Rejected
from papaya.server.openapi import Api, ApiAnswer, ApiParameter, ApiRoute, Json, Raw, document

DEVICE_TOKEN = "deviceToken"
MAX_TICKET_CHARS = 1368

_RETRY_AFTER = ApiParameter(
    "Retry-After", "header", {"type": "integer", "minimum": 0}, "In seconds."
)
_TAG = ApiParameter("ETag", "header", {"type": "string"}, "The hash in the key.")
_CACHING = ApiParameter("Cache-Control", "header", {"type": "string"}, "For a year, immutable.")
_ACCEPTS = ApiParameter("Accept-Ranges", "header", {"const": "bytes"}, "Ranges are served.")
_PART = ApiParameter("Content-Range", "header", {"type": "string"}, "Which bytes these are.")
_RANGE = ApiParameter(
    "Range", "header", {"type": "string"}, "One range, such as bytes=500-.", required=False
)
_IF_RANGE = ApiParameter(
    "If-Range", "header", {"type": "string"}, "The ETag of the first part.", required=False
)

_MALFORMED = ApiAnswer(400, "Malformed: sending it again will not help.", (Refused,))
_TOO_LARGE = ApiAnswer(413, "The body is too long; it was not read.", (Refused,))
_REFUSED = ApiAnswer(403, "Forged, expired or against the protocol.", (Refused,))
_BUSY = ApiAnswer(
    503, "Not now or not here: try again, maybe elsewhere.", (Retry,), (_RETRY_AFTER,)
)
_BEHIND = ApiAnswer(416, "The range begins past the end.", (Refused,), (_PART,))
_OTHER = ApiAnswer(None, "HTTP itself went wrong; the message says what to do.", (Refused, Retry))

_ENDS = (Completed, Aborted)
"""Any request of a session may learn how the session ended."""

_ANSWERS: dict[type[Message], tuple[str, tuple[type[Message], ...]]] = {
    CheckIn: ("Ask for a task; the answer may take as long as the server holds it.", (
        Accepted, Rejected)),
    Join: ("Take the assigned place and learn what to download.", (Joined, *_ENDS)),
    Heartbeat: ("Keep the session.", (Alive, *_ENDS)),
    Report: ("Training is finished: freeze the staleness, get an upload ticket.", (
        UploadGranted, *_ENDS)),
    Complete: ("All chunks are sent; answered when the update is durable.", (
        Incomplete, *_ENDS)),
    Leave: ("Give the place back.", (Left, Incomplete, *_ENDS)),
}  # fmt: skip


def _message_route(request: type[Message], path: str) -> ApiRoute:
    summary, answers = _ANSWERS[request]
    shows_token = request is CheckIn
    refusal = ApiAnswer(401, "The device token is missing or not valid.", (Refused,))
    return ApiRoute(
        "POST",
        path,
        path.rpartition("/")[2],
        summary,
        (
            ApiAnswer(200, "The message tells how it went on.", answers),
            _MALFORMED,
            *((refusal,) if shows_token else ()),
            _REFUSED,
            _TOO_LARGE,
            _BUSY,
            _OTHER,
        ),
        request=request,
        token=DEVICE_TOKEN if shows_token else None,
    )


def _text(pattern: str) -> Json:
    return {"type": "string", "pattern": f"^{pattern}$"}


_CHUNK = ApiRoute(
    "PUT",
    CHUNK_PATH,
    "chunk",
    "Send one chunk: late, twice or out of order. All but the last have chunk_bytes.",
    (
        ApiAnswer(200, "It is there, or the session is over.", (ChunkReceived, *_ENDS)),
        _MALFORMED,
        _REFUSED,
        _TOO_LARGE,
        _BUSY,
        _OTHER,
    ),
    request=Raw("Little-endian float32 numbers.", MAX_CHUNK_BYTES),
    parameters=(
        ApiParameter("upload", "path", _text("[A-Za-z0-9_-]{1,64}"), "Drawn anew for each update."),
        ApiParameter(
            "index",
            "path",
            {"type": "integer", "minimum": 0, "maximum": MAX_CHUNKS - 1},
            "Counted from 0.",
        ),
        ApiParameter(
            TICKET_HEADER,
            "header",
            {**_text("(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"),
             "minLength": 4, "maxLength": MAX_TICKET_CHARS},
            "The upload ticket, base64.",
        ),
        ApiParameter(CRC32_HEADER, "header", _text("[0-9a-f]{8}"), "crc32 of the chunk."),
    ),
)  # fmt: skip

_KEY = (
    ApiParameter("task", "path", _text("[a-z0-9][a-z0-9_-]{0,63}"), "First part of the key."),
    ApiParameter("sequence", "path", _text("[0-9]{1,12}"), "Second part of the key."),
    ApiParameter(
        "version", "path", _text("version-[0-9]{1,12}-[0-9a-f]{32}"), "Last part of the key."
    ),
)

_URL = ApiRoute(
    "GET",
    "/v1/urls/{task}/{sequence}/{version}",
    "url",
    "Ask for a URL from which parameters can be downloaded, of another host.",
    (
        ApiAnswer(200, "The URL.", (Located,)),
        ApiAnswer(404, "There is no URL of this key: use /v1/parameters.", (Refused,)),
        _BUSY,
        _OTHER,
    ),
    parameters=_KEY,
)

_PARAMETERS = ApiRoute(
    "GET",
    "/v1/parameters/{task}/{sequence}/{version}",
    "parameters",
    "Download parameters under the key that `Joined` names. Any CDN may stand in front.",
    (
        ApiAnswer(200, "The parameters.", Raw("A safetensors file."), (_TAG, _CACHING, _ACCEPTS)),
        ApiAnswer(206, "A part.", Raw("Bytes of the file."), (_TAG, _CACHING, _ACCEPTS, _PART)),
        ApiAnswer(304, "The copy with this ETag is good.", headers=(_TAG, _CACHING)),
        ApiAnswer(404, "There are no parameters under this key, or no longer.", (Refused,)),
        _BEHIND,
        _BUSY,
        _OTHER,
    ),
    parameters=(
        *_KEY,
        ApiParameter(
            "If-None-Match", "header", {"type": "string"}, "The ETag of a copy.", required=False
        ),
        _RANGE,
        _IF_RANGE,
    ),
)

_LEVEL = ApiParameter(
    "level", "path", _text("(?:entries|[0-9]{1,2})"), "Level of the tree, or the entries."
)
_TILE = ApiParameter(
    "tile",
    "path",
    _text("[0-9]{3}"),
    "Index of the tile. From 1,000 on, segments x001 and so on come before it.",
)
_WIDTH = ApiParameter(
    "width", "path", _text("[1-9][0-9]{0,2}"), "Hashes or entries in a tile that is not full."
)


def _log_route(path: str, operation: str, summary: str, *placed: ApiParameter) -> ApiRoute:
    return ApiRoute(
        "GET",
        f"/v1/log/{path}",
        operation,
        summary,
        (
            ApiAnswer(200, "The file.", Raw("As C2SP defines it."), (_CACHING, _ACCEPTS)),
            ApiAnswer(206, "A part.", Raw("Bytes of the file."), (_CACHING, _ACCEPTS, _PART)),
            ApiAnswer(404, "There is no such file.", (Refused,)),
            _BEHIND,
            _BUSY,
            _OTHER,
        ),
        parameters=(*placed, _RANGE),
    )


_LOG = (
    _log_route("checkpoint", "checkpoint", "The newest checkpoint of the log (tlog-checkpoint)."),
    _log_route("tile/{level}/{tile}", "tile", "A full tile (tlog-tiles).", _LEVEL, _TILE),
    _log_route(
        "tile/{level}/{tile}.p/{width}",
        "partialTile",
        "A tile that is not full.",
        _LEVEL,
        _TILE,
        _WIDTH,
    ),
)

DEVICE_ROUTES: tuple[ApiRoute, ...] = (
    *(_message_route(request, path) for request, path in PATHS.items()),
    _CHUNK,
    _PARAMETERS,
    _URL,
    *_LOG,
)

_API = Api(
    "Papaya device API",
    __version__,
    "How a device takes part in federated learning: check in, join, download, train, report, "
    "upload in chunks, complete. Integers are written without a fraction; unknown fields are "
    "ignored.",
    ((DEVICE_TOKEN, "The device's token; only a check-in shows it, later requests have tickets."),),
)


def device_document() -> Json:
    return document(_API, DEVICE_ROUTES)
