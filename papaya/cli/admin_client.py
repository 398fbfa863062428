"""How commands talk to a server's admin API: one request, one answer, or an error with a hint.

The token comes from --token-file, from PAPAYA_ADMIN_TOKEN, or from the data folder of a server that
runs here; it is sent as a header and never printed. Answers are typed JSON (`papaya/server/admin/
views.py`). No answer is waited for without end, and none is read without a limit.
"""

from __future__ import annotations

import argparse
import os
import ssl
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from papaya.errors import OperatorError

DEFAULT_URL = "http://127.0.0.1:8751"
DEFAULT_TOKEN_FILE = Path("papaya-data/admin.token")
TOKEN_VARIABLE = "PAPAYA_ADMIN_TOKEN"
TIMEOUT_S = 30.0
MAX_JSON_BYTES = 64 << 20
T = TypeVar("T")


class ServerUnreachable(OperatorError):
    """Nobody answered."""


class _Told(msgspec.Struct):
    """The error of the admin API, or of the HTTP layer below it."""

    error: str = ""
    reason: str = ""
    hint: str = ""


def add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--admin", default=DEFAULT_URL, metavar="URL", help="of the admin API")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"with the admin token; default: ${TOKEN_VARIABLE}, else {DEFAULT_TOKEN_FILE}",
    )
    parser.add_argument("--ca", metavar="FILE", help="trust this certificate authority (https)")


def client_for(options: argparse.Namespace) -> AdminClient:
    return AdminClient(options.admin, _token(options.token_file), options.ca)


def task_path(task: str, *rest: str) -> str:
    return "/".join(["/admin/tasks", quote(task, safe=""), *rest])


class AdminClient:
    """One server. Each request has a connection of its own."""

    def __init__(self, url: str, token: str, authority: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise OperatorError(f"{url!r} is no address", hint=f"write --admin {DEFAULT_URL}")
        self.url = url
        self._token = token
        self._host, self._port = parts.hostname, port
        self._is_secure = parts.scheme == "https"
        self._authority = authority

    def get(self, path: str, kind: type[T]) -> T:
        return self._decode(self._ask("GET", path)[0], kind)

    def post(self, path: str, body: object, kind: type[T]) -> T:
        return self._decode(self._ask("POST", path, msgspec.json.encode(body))[0], kind)

    def put(self, path: str, data: bytes, kind: type[T]) -> T:
        return self._decode(self._ask("PUT", path, data)[0], kind)

    def download(self, path: str, limit: int) -> tuple[bytes, dict[str, str]]:
        """The bytes and the headers, by lower-case name."""
        return self._ask("GET", path, limit=limit)

    def _ask(
        self, method: str, path: str, body: bytes | None = None, limit: int = MAX_JSON_BYTES
    ) -> tuple[bytes, dict[str, str]]:
        try:
            connection = self._connect()
            try:
                headers = {"Authorization": f"Bearer {self._token}"}
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                data = response.read(limit + 1)
                found = {name.lower(): value for name, value in response.getheaders()}
            finally:
                connection.close()
        except ssl.SSLError as error:
            hint = "give the certificate authority of the server: --ca FILE"
            raise OperatorError(
                f"no secure connection to {self.url}: {error}", hint=hint
            ) from error
        except (OSError, HTTPException) as error:
            problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerUnreachable(
                f"no answer from {self.url}: {problem}",
                hint="start the server with `papaya serve`, or name another with --admin URL",
            ) from error
        if len(data) > limit:
            raise OperatorError(f"{self.url} answered more than {limit} bytes", hint=f"see {path}")
        if response.status >= 300:
            raise self._refused(response.status, data)
        return data, found

    def _connect(self) -> HTTPConnection:
        if not self._is_secure:
            return HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        context = ssl.create_default_context(cafile=self._authority)
        return HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)

    def _refused(self, status: int, data: bytes) -> OperatorError:
        if status == 401:
            return OperatorError(
                f"{self.url} does not know this admin token",
                hint="give the server's: --token-file DATA/admin.token, of its data folder",
            )
        try:
            told = msgspec.json.decode(data, type=_Told)
        except (msgspec.DecodeError, UnicodeDecodeError):
            told = _Told()
        problem = told.error or told.reason or f"{self.url} answered {status}"
        return OperatorError(problem, hint=told.hint)

    def _decode(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OperatorError(
                f"{self.url} does not answer like an admin API of this version: {error}",
                hint="is it the admin address? `papaya serve` prints it",
            ) from error


def _token(file: Path | None) -> str:
    given = os.environ.get(TOKEN_VARIABLE, "").strip()
    if file is None and given:
        return _checked(given, f"${TOKEN_VARIABLE}")
    path = file or DEFAULT_TOKEN_FILE
    try:
        return _checked(path.read_text(encoding="ascii").strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "it is not text"
        raise OperatorError(
            f"no admin token: {path}: {problem}",
            hint="run this where `papaya serve` runs, or give --token-file FILE",
        ) from error


def _checked(token: str, source: str) -> str:
    """Never quoted: it is a secret."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise OperatorError(f"{source} holds no token", hint="copy admin.token of the data folder")
    return token
