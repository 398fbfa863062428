"""Secrets in the data folder: one file each, made at the first start, readable by their owner.

    admin.token     opens the admin API
    server.token    servers show it to each other
    device.token    all devices show it, when `device_tokens` is "shared"
    device.key      signs the tokens of single devices, when `device_tokens` is "signed"

Whoever brings a secret of his own writes the file before the first start. A file that its group may
write or that others may touch is refused, as ssh does; one that its group may only read is taken,
for that is how orchestrators mount secrets. Nothing here prints, logs or quotes a secret.
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
# What RFC 6750 allows behind `Bearer`. Shorter ones can be guessed.
TOKEN_FORM = re.compile(rf"(?=.{{16,{MAX_TOKEN_CHARS}}}\Z)[A-Za-z0-9._~+/-]+=*")
_TOO_OPEN = 0o027


class Secret:
    """Text that shows itself only to who asks with `reveal`."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def matches(self, presented: str) -> bool:
        """In a time that says nothing about where they differ."""
        return hmac.compare_digest(self._text.encode(), presented.encode())

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not for copying around")


def read_or_make(folder: Path, name: SecretName) -> Secret:
    """The secret of that name; 32 random bytes in hex if there is none yet."""
    make_folder(folder)
    path = folder / name
    if not path.exists():
        try:
            _make(path)
        except OSError as error:
            raise unusable(folder, error) from error
    return read(path)


def read(path: Path) -> Secret:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_TOKEN_CHARS + 3)
    except OSError as error:
        raise OperatorError(
            f"the secret {path} cannot be read: {error.strerror}",
            hint=f"let the user that runs papaya read it: chown $USER {path}",
        ) from error
    if mode & _TOO_OPEN:
        raise OperatorError(
            f"the secret {path} is open to others (mode {mode & 0o777:04o})",
            hint=f"chmod 600 {path}, and replace what is in it if somebody may have read it",
        )
    text = data.decode("latin-1").removesuffix("\n").removesuffix("\r")
    if TOKEN_FORM.fullmatch(text) is None:
        raise OperatorError(
            f"the secret {path} is not one line of 16 to {MAX_TOKEN_CHARS} characters A-Z a-z 0-9"
            " . _ ~ + / -",
            hint=f"rm {path}: the next start makes a good one",
        )
    return Secret(text)


def _make(path: Path) -> None:
    """Whole or not at all: of two processes that start at once, both read the same one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process was faster
    finally:
        os.unlink(temporary)
    sync_folder(path.parent)
