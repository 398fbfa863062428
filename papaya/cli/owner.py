"""`papaya owner`: the key with which an owner signs tasks, and what devices pin of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.bundle.owner import KEY_BYTES, KeyRevocation, KeySuccessor, SignedStatement, key_id
from papaya.cli.output import (
    Commands,
    FormatOptions,
    add_format,
    bind,
    note,
    print_data,
    print_json,
)
from papaya.cli.task.signing import default_key, signer, statements_beside
from papaya.errors import OperatorError


@dataclass(frozen=True, kw_only=True)
class OwnerKeyOptions(FormatOptions):
    output: Path = field(default_factory=default_key)


@dataclass(frozen=True, kw_only=True)
class OwnerShowOptions(FormatOptions):
    key: Path = field(default_factory=default_key)


@dataclass(frozen=True, kw_only=True)
class OwnerSuccessorOptions(FormatOptions):
    output: Path
    key: Path = field(default_factory=default_key)
    recovery: Path | None = None
    public: str | None = None
    revoke: bool = False


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "owner",
        description="Create and show the key with which you sign tasks. Devices that have pinned "
        "its public half fetch and train your tasks; you do not have to copy files to them.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    key = actions.add_parser(
        "key",
        help="create a key",
        description="Create a key. `papaya task submit` then signs tasks with it. Keep a backup: "
        "without the key nobody can change or renew its tasks.",
    )
    key.add_argument("--output", type=Path, metavar="FILE", help="file for the private key")
    show = actions.add_parser(
        "show",
        help="show the key that devices pin",
        description="Show the id and the public key, as devices pin them.",
    )
    show.add_argument("--key", type=Path, metavar="FILE", help="file of the private key")
    successor = actions.add_parser(
        "successor",
        help="replace the key with a new one",
        description="Create a new key, and sign a statement that it replaces the old one. Devices "
        "learn of it with the next task or lease that the new key signs.",
    )
    successor.add_argument("--key", type=Path, metavar="FILE", help="file of the old private key")
    successor.add_argument(
        "--output", type=Path, metavar="FILE", required=True, help="file for the new private key"
    )
    successor.add_argument(
        "--recovery",
        type=Path,
        metavar="FILE",
        help="sign with the recovery key, if the old key is lost or was stolen; devices must have "
        "pinned its public half",
    )
    successor.add_argument(
        "--public",
        metavar="HEX",
        help="public half of the old key, if its file is lost; needs --recovery",
    )
    successor.add_argument("--revoke", action="store_true", help="also revoke the old key")
    for action in (key, show, successor):
        add_format(action)
    bind(key, OwnerKeyOptions, run_key)
    bind(show, OwnerShowOptions, run_show)
    bind(successor, OwnerSuccessorOptions, run_successor)


def run_key(options: OwnerKeyOptions) -> int:
    create_key(options.output)
    note(f"created {options.output}; keep a backup, and keep it secret")
    return _show(options, options.output)


def run_show(options: OwnerShowOptions) -> int:
    return _show(options, options.key)


def run_successor(options: OwnerSuccessorOptions) -> int:
    if options.recovery is None:
        authority = signer(options.key)
        old_public = authority.key.public_key().public_bytes_raw()
    else:
        authority = signer(options.recovery)
        old_public = _old_public(options)
    new = create_key(options.output)
    public, old_id = new.public_key().public_bytes_raw(), key_id(old_public)
    statements = [
        *statements_beside(options.key),
        KeySuccessor(old_id, key_id(public), public).sign(authority.key),
    ]
    if options.revoke:
        statements.append(KeyRevocation(old_id).sign(authority.key))
    _write_statements(options.output, statements)
    note(f"created {options.output}, which replaces {options.key}")
    note(f"to sign with it: papaya task submit FILE --owner {options.output}")
    return _show(options, options.output)


def _old_public(options: OwnerSuccessorOptions) -> bytes:
    if options.public is None:
        return signer(options.key).key.public_key().public_bytes_raw()
    try:
        found = bytes.fromhex(options.public)
    except ValueError:
        found = b""
    if len(found) != KEY_BYTES:
        raise OperatorError(
            "--public is not a public key", hint="give the 64 hex digits that devices have pinned"
        )
    return found


def _show(options: FormatOptions, path: Path) -> int:
    found = signer(path)
    public = found.key.public_key().public_bytes_raw().hex()
    if options.is_json:
        print_json({"owner": found.owner, "key": public, "file": str(path)})
        return 0
    print_data(f"owner {found.owner}\nkey   {public}")
    note(
        "\ndevices pin it in the file of `papaya client --owners FILE`:\n\n"
        f'[owners.me]\nkey = "{public}"\n'
        'collections = ["COLLECTION"]  # of your tasks: examples=Examples("COLLECTION")\n'
        'engines = ["torch", "executorch"]  # "torch" lets the device run your code'
    )
    return 0


def create_key(path: Path) -> Ed25519PrivateKey:
    """A new key, in a file that only its user can read."""
    key = Ed25519PrivateKey.generate()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(key.private_bytes_raw().hex() + "\n")
    except FileExistsError as error:
        raise OperatorError(
            f"{path} exists already", hint="papaya owner show; or choose another --output FILE"
        ) from error
    except OSError as error:
        raise OperatorError(
            f"cannot write {path}: {error.strerror}", hint="choose another --output FILE"
        ) from error
    return key


def _write_statements(path: Path, statements: list[SignedStatement]) -> None:
    path.with_name(path.name + ".statements").write_bytes(msgspec.json.encode(statements))
