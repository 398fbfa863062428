"""The header Range (RFC 9110, section 14): one range of bytes of a file.

Everything that a server may ignore is ignored, and the whole file is sent: several ranges, another
unit, a malformed value, a method other than GET, and an `If-Range` that is not exactly the file's
ETag. A date in `If-Range` never matches, because no file has a Last-Modified.
"""

from __future__ import annotations

import re

from papaya.http.errors import HttpError
from papaya.http.head import RequestHead

# At most 18 digits: more would be slow to convert, and no file is that long.
_ONE_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII | re.IGNORECASE)


def requested_range(head: RequestHead, size: int, tag: str | None) -> range | None:
    """The positions that a request asks for; None for the whole file.

    Raises HttpError 416 if the range begins past the end of the file.
    """
    asked = head.headers.get("range")
    if asked is None or head.method != "GET":
        return None
    condition = head.headers.get("if-range")
    found = _ONE_RANGE.fullmatch(asked)
    if found is None or (condition is not None and condition != tag):
        return None
    first, last = found.groups()
    if not first:
        return _suffix(last, size)
    if last and int(last) < int(first):
        return None
    if int(first) >= size:
        raise _unsatisfiable(size)
    return range(int(first), min(size, int(last) + 1) if last else size)


def _suffix(length: str, size: int) -> range | None:
    """The last bytes of a file, `bytes=-500`."""
    if not length or not size:
        return None
    if not int(length):
        raise _unsatisfiable(size)
    return range(max(0, size - int(length)), size)


def _unsatisfiable(size: int) -> HttpError:
    where = (("Content-Range", f"bytes */{size}"),)
    return HttpError(416, f"the file has only {size} bytes", headers=where)
