"""Calls a server's admin API: one request, one answer, or an error with a hint.

Address and token come from the options and from PAPAYA_ADMIN_TOKEN; else from the profile that
`papaya login` has stored; else from the data folder of a server that runs here. The token is sent
as a header and never printed. Answers are typed JSON (`papaya/server/admin/views.py`). Every
request has a timeout, and every answer a size limit.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import ssl
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from papaya.cli.output import FormatOptions, add_format, printable
from papaya.cli.profiles import PROFILE_VARIABLE, load
from papaya.config.checks import as_written
from papaya.credentials.tls import explain
from papaya.errors import OperatorError
from papaya.server.admin.views import BeginRollout, NewTask, Revision

DEFAULT_URL = "http://127.0.0.1:8751"
DEFAULT_TOKEN_FILE = Path("papaya-data/admin.token")
TOKEN_VARIABLE = "PAPAYA_ADMIN_TOKEN"
TIMEOUT_S = 30.0
MAX_JSON_BYTES = 64 << 20
T = TypeVar("T")
# Commands in hints that accept connection options.
_COMMAND = re.compile(
    r"\bpapaya (?:status|whoami|audit-trail (?!check)[a-z]+|maintenance [a-z]+|token revoked?|"
    r"account [a-z]+|task (?!compile)[a-z]+)\b"
    r"(?! --)"
)


class ServerUnreachable(OperatorError):
    """The server did not answer."""


class _ErrorBody(msgspec.Struct):
    """An error of the admin API, or of the HTTP layer below it."""

    error: str = ""
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions(FormatOptions):
    """The options of every command that calls the admin API; `add_connection` describes them."""

    admin: str | None = None
    token_file: Path | None = None
    ca: str | None = None
    profile: str | None = None

    def repeated(self, text: str) -> str:
        given = {
            "--admin": self.admin,
            "--token-file": self.token_file,
            "--ca": self.ca,
            "--profile": self.profile,
        }
        options = [f"{name} {shlex.quote(str(value))}" for name, value in given.items() if value]
        return _COMMAND.sub(lambda command: " ".join([command[0], *options]), text)


@dataclass(frozen=True, kw_only=True)
class OneTaskOptions(ConnectionOptions):
    task: str


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ConnectionOptions`."""
    parser.add_argument(
        "--admin",
        metavar="URL",
        help=f"address of the admin API (default: that of `papaya login`, else {DEFAULT_URL})",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the token (default: ${TOKEN_VARIABLE} if it is set, else the token of "
        f"`papaya login`, else {DEFAULT_TOKEN_FILE})",
    )
    parser.add_argument(
        "--ca",
        metavar="FILE",
        help="PEM file of the certificate authority to trust for https (default: that of "
        "`papaya login`, else the system's authorities)",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help=f"profile of `papaya login` (default: ${PROFILE_VARIABLE} if it is set, else the "
        "last one that was logged in)",
    )
    add_format(parser)


def add_reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reason",
        "--why",
        dest="why",
        metavar="TEXT",
        help="why you make this change; kept in the audit trail",
    )


def client_for(options: ConnectionOptions) -> AdminClient:
    profile = load().chosen(options.profile, options.admin)
    if profile is None:
        url = options.admin or DEFAULT_URL
        _parts(url)  # whoever mistypes it should not be asked for a token
        return AdminClient(url, given_token(options.token_file), authority_file(options.ca))
    authority = profile.authority if options.ca is None else authority_file(options.ca)
    token = given_token(options.token_file, profile.token)
    return AdminClient(profile.admin, token, authority)


def _parts(url: str) -> tuple[bool, str, int | None]:
    """Whether it is https, the host, and the port."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise OperatorError(f"{url!r} is not an address", hint=f"--admin {DEFAULT_URL}")
    return parts.scheme == "https", parts.hostname, port


def authority_file(path: str | None) -> str:
    """The certificates in a PEM file; empty if none is given."""
    try:
        pem = "" if path is None else Path(path).read_text(encoding="ascii")
        if pem:
            ssl.create_default_context(cadata=pem)
    except (OSError, UnicodeDecodeError) as error:  # an SSLError is an OSError
        problem = getattr(error, "strerror", None) or str(error)
        raise OperatorError(
            f"cannot use the certificate file {path}: {problem}",
            hint="check the path after --ca; the file is PEM",
        ) from error
    return pem


def task_path(task: str, *rest: str) -> str:
    return "/".join(["/admin/tasks", quote(task, safe=""), *rest])


class AdminClient:
    """The admin API of one server. Each request opens its own connection."""

    def __init__(self, url: str, token: str, authority: str = "") -> None:
        """`authority`: PEM certificates to trust; empty means the system's authorities."""
        self.url = url
        self._token = token
        self._is_secure, self._host, self._port = _parts(url)
        self._authority = authority

    def get(self, path: str, kind: type[T]) -> T:
        return self._decode(self._ask("GET", path)[0], kind)

    def post(self, path: str, body: object, kind: type[T]) -> T:
        return self._decode(self._ask("POST", path, _encoded(body))[0], kind)

    def put(self, path: str, data: bytes, kind: type[T]) -> T:
        return self._decode(self._ask("PUT", path, data)[0], kind)

    def download(self, path: str, limit: int) -> tuple[bytes, dict[str, str]]:
        """The body, and the headers by lower-case name."""
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
        except (OSError, HTTPException) as error:
            problem, hint = explain(error, self.url)
            hint = hint or (
                "start the server with `papaya serve`, or use another one with --admin URL"
            )
            if isinstance(error, ssl.SSLError):
                message = f"no secure connection to {self.url}: {problem}"
                raise OperatorError(message, hint=hint) from error
            message = f"no answer from {self.url}: {problem}"
            raise ServerUnreachable(message, hint=hint) from error
        if len(data) > limit:
            raise OperatorError(
                f"the answer to {path} is longer than {limit:,} bytes",
                hint=f"check that {self.url} is the admin API: `papaya serve` prints its address",
            )
        if response.status >= 300:
            raise self._refused(response.status, data)
        return data, found

    def _connect(self) -> HTTPConnection:
        if not self._is_secure:
            return HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        context = ssl.create_default_context(cadata=self._authority or None)
        return HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)

    def _refused(self, status: int, data: bytes) -> OperatorError:
        if status == 401:
            return OperatorError(
                f"{self.url} does not accept this token",
                hint=f"log in again: papaya login {self.url}; or use the token in the server's "
                "data folder: --token-file DATA/admin.token",
            )
        try:
            body = msgspec.json.decode(data, type=_ErrorBody)
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = _ErrorBody()
        if status == 404 and not body.error:  # errors of the admin API are in `error`
            return OperatorError(
                f"{self.url} is not the admin API of a coordinator",
                hint="`papaya serve` prints the address of its admin API; the default port is 8751",
            )
        problem = body.error or body.reason or f"{self.url} answered with status {status}"
        return OperatorError(printable(problem), hint=printable(body.hint))

    def _decode(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.convert(_on_one_line(msgspec.json.decode(data)), kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OperatorError(
                f"{self.url} did not answer like an admin API of this version: {error}",
                hint="check the address: `papaya serve` prints that of its admin API",
            ) from error


def _encoded(body: object) -> bytes:
    """The body of a request. Settings that have their default values are left out: a server of the
    last release may not know them, and refuses what it does not know.
    """
    if isinstance(body, NewTask | Revision | BeginRollout):
        body = msgspec.to_builtins(body) | {"config": as_written(body.config)}
    return msgspec.json.encode(body)


def _on_one_line(value: object) -> object:
    """Server text must not fake a line of our own output."""
    match value:
        case str():
            return " ".join(value.splitlines()) if not value.isprintable() else value
        case list():
            return [_on_one_line(each) for each in value]
        case dict():
            return {name: _on_one_line(each) for name, each in value.items()}
    return value


def given_token(file: Path | None, stored: str = "") -> str:
    """The token in this file, or in the environment, or the stored one, or that of this folder."""
    given = os.environ.get(TOKEN_VARIABLE, "").strip()
    if file is None and given:
        return checked_token(given, f"${TOKEN_VARIABLE}")
    if file is None and stored:
        return checked_token(stored, "the profile")
    path = file or DEFAULT_TOKEN_FILE
    try:
        return checked_token(path.read_text(encoding="ascii").strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise OperatorError(
            f"no token: {path}: {problem}",
            hint="log in: papaya login URL; the server keeps its admin token in its data folder, "
            "which `papaya serve` prints when it starts: --token-file DATA/admin.token",
        ) from error


def checked_token(token: str, source: str) -> str:
    """The token, if it can be one. The message does not quote it: it is a secret."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise OperatorError(
            f"{source} does not contain a token",
            hint="copy admin.token from the server's data folder",
        )
    return token
