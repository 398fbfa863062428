"""Secrets in the data folder: one file each, created at the first start, readable by the owner.

    admin.token     opens the admin API
    server.token    servers show it to each other
    device.token    all devices show it, when `device_tokens` is "shared"
    device.key      signs the tokens of single devices, when `device_tokens` is "signed"

To use your own secret, write the file before the first start. A file that the group may write, or
that others may read or write, is refused, as in ssh; a file that the group may read is accepted,
because orchestrators mount secrets that way. Secrets are never printed, logged or quoted.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import tempfile
from pathlib import Path
from typing import Literal

from papaya.errors import OperatorError
from papaya.store.folders import make_folder, sync_folder, unusable

SecretName = Literal["admin.token", "server.token", "device.token", "device.key"]

MAX_TOKEN_CHARS = 512
# What RFC 6750 allows after `Bearer`. Shorter tokens can be guessed.
TOKEN_FORM = re.compile(rf"(?=.{{16,{MAX_TOKEN_CHARS}}}\Z)[A-Za-z0-9._~+/-]+=*")
_TOO_OPEN = 0o027


class Secret:
    """A text that only `reveal` returns."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def matches(self, presented: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self._text.encode(), presented.encode())

    def replace(self, other: Secret) -> bool:
        """Become another secret, wherever this one is used; False if it is the same."""
        is_same = self.matches(other.reveal())
        self._text = other.reveal()
        return not is_same

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> str:
        raise TypeError("a secret cannot be pickled")


def read_or_make(folder: Path, name: SecretName) -> Secret:
    """Read the secret of that name; create 32 random bytes in hex if there is none."""
    make_folder(folder)
    path = folder / name
    if not path.exists():
        try:
            _make(path)
        except OSError as error:
            raise unusable(folder, error) from error
    return read(path)


def replace(folder: Path, name: SecretName) -> Path:
    """Write a new secret in place of an existing one."""
    path = folder / name
    read(path)  # refuses a folder without this secret
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as temporary:
        made = Path(temporary) / name
        _make(made)
        made.replace(path)
    sync_folder(folder)
    return path


def read_private(path: Path, most_bytes: int) -> bytes:
    """The beginning of a file that others may not read."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(most_bytes)
    except OSError as error:
        raise OperatorError(
            f"cannot read {path}: {error.strerror}",
            hint="check the path, and that the user who runs papaya may read the file",
        ) from error
    if mode & _TOO_OPEN:
        raise OperatorError(
            f"{path} is readable by other users (mode {mode & 0o777:04o})",
            hint=f"run chmod 600 {path}; if someone may have read the secret, replace it",
        )
    return data


def read(path: Path) -> Secret:
    data = read_private(path, MAX_TOKEN_CHARS + 3)
    text = data.decode("latin-1").removesuffix("\n").removesuffix("\r")
    if TOKEN_FORM.fullmatch(text) is None:
        raise OperatorError(
            f"invalid secret in {path}: expected one line of 16 to {MAX_TOKEN_CHARS} "
            "characters A-Z a-z 0-9 . _ ~ + / -",
            hint=f"delete it (rm {path}); the server creates a new one at the next start",
        )
    return Secret(text)


def _make(path: Path) -> None:
    """Create the file atomically: two processes that start at once read the same secret."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process has created it
    finally:
        os.unlink(temporary)
    sync_folder(path.parent)
