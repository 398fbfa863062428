"""How `papaya log` and `papaya audit` read a log: its address, its keys, its last checkpoint.

A log is a folder or an HTTP address, and both are read in the same way. The public key is required,
because nothing in a log can be trusted without it. A log whose signatures, proofs or records are
wrong is an error of the peer (exit code 3); a log that cannot be reached, or an address without a
checkpoint, is not (exit code 2).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from papaya.cli.output import FormatOptions, positive, whole
from papaya.credentials.tls import client_context
from papaya.errors import OperatorError, ProtocolError
from papaya.verifiable_log.auditor import check_first
from papaya.verifiable_log.checkpoint import MAX_COSIGNATURE_AGE_S, LogPolicy
from papaya.verifiable_log.errors import (
    LogError,
    LogSourceUnreachable,
    MissingFile,
    NoCheckpoint,
)
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.note import SignerKey, VerifierKey
from papaya.verifiable_log.over_http import over_http
from papaya.verifiable_log.reader import CheckpointFile, LogReader, RememberingReader
from papaya.verifiable_log.tiles import Fetch


class LogRefused(ProtocolError):
    """A log, a proof or a signature is wrong."""

    default_hint = "do not trust this log; save what it served and report it to its operator"


class LogUnreachable(OperatorError):
    """A log could not be read, which says nothing about its contents."""

    default_hint = (
        "check the address and the network: a log has a file LOG/checkpoint and a folder LOG/tile; "
        "the log itself was not checked"
    )


@dataclass(frozen=True, kw_only=True)
class LogReadOptions:
    """The options of every command that reads a log; `add_reading` describes them."""

    log: str
    log_key: str
    witness: Sequence[str] = ()
    quorum: int | None = None
    max_age: float = MAX_COSIGNATURE_AGE_S
    remember: Path | None = None
    ca: Path | None = None


@dataclass(frozen=True, kw_only=True)
class LogShowOptions(LogReadOptions, FormatOptions):
    """The options of `papaya log show` and `papaya log verify`."""


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the options of `LogReadOptions`."""
    parser.add_argument("log", metavar="LOG", help="folder or HTTP address of the log")
    parser.add_argument(
        "--log-key",
        required=True,
        metavar="KEY",
        help="public key of the log, or a file with it",
    )
    parser.add_argument(
        "--witness",
        action="append",
        metavar="KEY",
        help="public key of a witness, or a file with it; may be repeated",
    )
    parser.add_argument(
        "--quorum",
        type=whole(1),
        metavar="N",
        help="number of witnesses that must have signed the checkpoint (default: all of them)",
    )
    parser.add_argument(
        "--max-age",
        type=positive,
        metavar="S",
        help="maximum age of a witness's signature, in seconds",
    )
    parser.add_argument(
        "--remember",
        type=Path,
        metavar="FILE",
        help="file with the last checkpoint seen; fail if the log does not extend it",
    )

    parser.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="PEM file of the certificate authority to trust for https "
        "(default: the system's authorities)",
    )


def policy_of(options: LogReadOptions) -> LogPolicy:
    witnesses = tuple(public_key(key) for key in options.witness)
    quorum = len(witnesses) if options.quorum is None else options.quorum
    try:
        return LogPolicy(public_key(options.log_key), witnesses, quorum, options.max_age)
    except LogError as error:
        raise OperatorError(str(error), hint="check --log-key, --witness and --quorum") from error


def reader_of(options: LogReadOptions, policy: LogPolicy) -> LogReader:
    """With `--remember`, a new checkpoint is saved to the file before it is used."""
    fetch = fetch_of(options.log, options.ca)
    if options.remember is None:
        return LogReader(fetch, policy)
    try:
        return RememberingReader(fetch, policy, CheckpointFile(options.remember, policy))
    except (LogError, OSError) as error:
        hint = "use a file that an earlier command wrote for this log, or a new file"
        raise OperatorError(f"--remember {options.remember}: {error}", hint=hint) from error


def fetch_of(log: str, authority: Path | None = None) -> Fetch:
    if log.startswith(("http://", "https://")):
        return over_http(log, tls=client_context(None if authority is None else str(authority)))
    return folder_of(Path(log)).fetch


def folder_of(path: Path) -> LogFolder:
    if not path.is_dir():
        hint = f"check the folder; to create a new log: papaya log create --log {path} --key FILE"
        raise OperatorError(f"there is no log in {path}", hint=hint)
    return LogFolder(path)


def public_key(text: str) -> VerifierKey:
    try:
        return VerifierKey.parse(_text_or_file(text))
    except LogError as error:
        hint = "use NAME+ID+BASE64, or the .pub file that `papaya log key` wrote"
        is_path = text.count("+") < 2 and not Path(text).exists()
        why = "there is no such file" if is_path else error
        raise OperatorError(
            f"{text!r} is neither a public key nor a file with one: {why}", hint=hint
        ) from error


def private_key(path: Path) -> SignerKey:
    try:
        return SignerKey.parse(path.read_text())
    except OSError as error:
        hint = f"papaya log key --name NAME --output {path}"
        raise OperatorError(
            f"cannot read the private key {path}: {error.strerror}", hint=hint
        ) from error
    except (LogError, UnicodeDecodeError) as error:
        raise OperatorError(
            f"{path} is not a private key: {error}", hint="pass a file that `papaya log key` wrote"
        ) from error


@contextmanager
def refusals() -> Iterator[None]:
    """Turn errors of a log into errors of the command line."""
    try:
        yield
    except (LogSourceUnreachable, NoCheckpoint) as error:
        raise LogUnreachable(str(error)) from error
    except LogError as error:
        first = check_first(error, is_key_right=False)
        hint = f"{first}; if it still fails, {LogRefused.default_hint}" if first else None
        raise LogRefused(str(error), hint=hint) from error


@contextmanager
def own_log(path: Path) -> Iterator[None]:
    """As `refusals`, for whoever writes the log: a mistake or a damaged disk, no attack."""
    try:
        yield
    except MissingFile as error:
        hint = f"papaya log create --log {path} --key FILE"
        raise OperatorError(f"there is no log in {path}: {error}", hint=hint) from error
    except LogError as error:
        hint = (
            "nothing was published; check --log and --key, and restore a damaged log from a backup"
        )
        raise OperatorError(str(error), hint=hint) from error


@contextmanager
def keeping() -> Iterator[None]:
    """Explain an OSError while a log is read and the file of `--remember` is written."""
    try:
        yield
    except OSError as error:
        hint = "the log must be readable, and the file of --remember writable"
        raise OperatorError(f"{error.filename}: {error.strerror}", hint=hint) from error


def now() -> float:
    return time.time()


def _text_or_file(text: str) -> str:
    path = Path(text)
    try:
        return path.read_text() if path.is_file() else text
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(
            f"cannot read the key file {text}: {error}", hint="pass a file with a public key"
        ) from error
