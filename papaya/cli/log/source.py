"""What the commands about logs share: where a log is, whose it is, and what was seen of it before.

A log is a folder or an HTTP address, read the same way. Its public key is always asked for: a log
without one is only a rumour. What a log does wrong becomes an error of the peer, exit code 3; one
that cannot be reached has done nothing wrong, exit code 2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from papaya.cli.output import positive, whole
from papaya.errors import OperatorError, ProtocolError
from papaya.verifiable_log.checkpoint import LogPolicy
from papaya.verifiable_log.errors import LogError, LogSourceUnreachable, MissingFile
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.memory import CheckpointFile, RememberingReader
from papaya.verifiable_log.note import SignerKey, VerifierKey
from papaya.verifiable_log.over_http import over_http
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.tiles import Fetch


class LogRefused(ProtocolError):
    """A log, a proof or a signature does not hold."""

    default_hint = "do not trust this log; keep what it served, and tell whoever runs it"


class LogUnreachable(OperatorError):
    """A log could not be read, which says nothing about it."""

    default_hint = "check the address and the network: this says nothing about the log yet"


def add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="its folder or its HTTP address")
    parser.add_argument(
        "--log-key", required=True, metavar="KEY", help="its public key, or a file that holds it"
    )
    parser.add_argument(
        "--witness", action="append", default=[], metavar="KEY", help="a witness's public key"
    )
    parser.add_argument(
        "--quorum", type=whole(1), metavar="N", help="witnesses that must have signed (default all)"
    )
    parser.add_argument(
        "--max-age", type=positive, metavar="S", help="seconds after which a cosignature is too old"
    )
    parser.add_argument(
        "--remember",
        type=Path,
        metavar="FILE",
        help="the last checkpoint seen: the log must continue it",
    )


def policy_of(options: argparse.Namespace) -> LogPolicy:
    witnesses = tuple(public_key(key) for key in options.witness)
    quorum = len(witnesses) if options.quorum is None else options.quorum
    try:
        return LogPolicy(public_key(options.log_key), witnesses, quorum, options.max_age)
    except LogError as error:
        raise OperatorError(str(error), hint="see --log-key, --witness and --quorum") from error


def reader_of(options: argparse.Namespace, policy: LogPolicy) -> LogReader:
    """From what `--remember` has on; whatever is accepted is there before it is made use of."""
    fetch = fetch_of(options.log)
    if options.remember is None:
        return LogReader(fetch, policy)
    try:
        return RememberingReader(fetch, policy, CheckpointFile(options.remember, policy))
    except (LogError, OSError) as error:
        hint = "name the file that an earlier command wrote for this log, or one that is not there"
        raise OperatorError(f"--remember {options.remember}: {error}", hint=hint) from error


def fetch_of(log: str) -> Fetch:
    if log.startswith(("http://", "https://")):
        return over_http(log)
    return folder_of(Path(log)).fetch


def folder_of(path: Path) -> LogFolder:
    if not path.is_dir():
        hint = f"name its folder or address; to begin one: papaya log create --log {path} --key KEY"
        raise OperatorError(f"there is no log in {path}", hint=hint)
    return LogFolder(path)


def public_key(text: str) -> VerifierKey:
    try:
        return VerifierKey.parse(_text_or_file(text))
    except LogError as error:
        hint = "give name+id+base64, or the file that `papaya log key` wrote beside the private key"
        found = (
            f"{text!r} is no file, and not a public key" if "+" not in text else "not a public key"
        )
        raise OperatorError(f"{found}: {error}", hint=hint) from error


def private_key(path: Path) -> SignerKey:
    try:
        return SignerKey.parse(path.read_text())
    except OSError as error:
        hint = f"papaya log key --name NAME --output {path}"
        raise OperatorError(
            f"the key {path} cannot be read: {error.strerror}", hint=hint
        ) from error
    except (LogError, UnicodeDecodeError) as error:
        raise OperatorError(f"{path}: {error}", hint="name the private key's file") from error


@contextmanager
def refusals() -> Iterator[None]:
    """Around whatever believes or disbelieves a log."""
    try:
        yield
    except LogSourceUnreachable as error:
        raise LogUnreachable(str(error)) from error
    except MissingFile as error:
        hint = "a log has its files below LOG/checkpoint and LOG/tile: is this its address?"
        raise LogRefused(str(error), hint=hint) from error
    except LogError as error:
        raise LogRefused(str(error)) from error


@contextmanager
def keeping() -> Iterator[None]:
    """Around whatever refreshes a reader: with `--remember` that writes a file."""
    try:
        yield
    except OSError as error:
        hint = "the log must be there to read, and the file of --remember to be written"
        raise OperatorError(f"{error.filename}: {error.strerror}", hint=hint) from error


def now() -> float:
    return time.time()


def _text_or_file(text: str) -> str:
    path = Path(text)
    try:
        return path.read_text() if path.is_file() else text
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"{text} cannot be read: {error}") from error
