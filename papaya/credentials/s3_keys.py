"""The file of `blobs_credentials`: the key with which servers use a bucket.

    aws_access_key_id = ...
    aws_secret_access_key = ...
    aws_session_token = ...          optional

Section headings such as `[default]` and comments are ignored, so that a file of the AWS tools with
one section can be used. The file is read for every request, so a new key needs no restart. It is
never quoted.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from papaya.credentials.token_files import read_private
from papaya.errors import OperatorError

if TYPE_CHECKING:
    from obstore.store import S3Credential

_MAX_BYTES = 16 << 10
# obstore asks again when less than five minutes are left: for every request.
_VALID = timedelta(minutes=1)


def s3_keys(path: Path) -> Callable[[], S3Credential]:
    """Reads the file now, to find errors at the start, and at every call."""

    def current() -> S3Credential:
        found = _read(path)
        return {
            "access_key_id": found["aws_access_key_id"],
            "secret_access_key": found["aws_secret_access_key"],
            "token": found.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + _VALID,
        }

    current()
    return current


def _read(path: Path) -> dict[str, str]:
    text = read_private(path, _MAX_BYTES).decode("utf-8", "replace")
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    found = {name.strip(): value.strip() for name, value in pairs}
    for name in ("aws_access_key_id", "aws_secret_access_key"):
        if not found.get(name):
            raise OperatorError(f"{path} has no {name}", hint=f"write one line: {name} = <the key>")
    return found
