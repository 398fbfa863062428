"""Signs what an owner submits: manifests, leases, and the program that devices run.

The private key never leaves the owner's machine. It is a file of 64 hex digits that only its user
can read; beside it, FILE.statements has what the owner has signed about earlier keys.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import UNSET, structs

from papaya.bundle import archive
from papaya.bundle.head import PROGRAM_FILE, BundleHead
from papaya.bundle.manifest import (
    LEASE_S,
    BlobRef,
    Lease,
    Participation,
    SecureTerms,
    TaskManifest,
    run_id,
)
from papaya.bundle.owner import KeySuccessor, SignedStatement, key_id
from papaya.config import Staleness, TaskConfig
from papaya.credentials.token_files import read as read_secret
from papaya.device.executor import EngineName
from papaya.errors import ConfigError, OperatorError
from papaya.learning.definition import ClientSGD
from papaya.learning.executorch.program_file import EXECUTORCH_VERSION

if TYPE_CHECKING:
    from papaya.learning.task import LoadedTask

# The oldest engine version that runs a program. Compiled programs have no stable format.
_ENGINE_VERSIONS = {"torch": "2.6", "executorch": EXECUTORCH_VERSION}


class OwnerSigner(NamedTuple):
    """An owner's key, the id under which devices know the owner, and its statements."""

    key: Ed25519PrivateKey
    owner: str
    statements: tuple[SignedStatement, ...]

    def head(self, manifest: TaskManifest, program: str, frozen_file: str = "") -> bytes:
        """`program` and `frozen_file`: where the server keeps the blobs of the manifest."""
        now = time.time()
        lease = Lease(manifest.digest, now, now + LEASE_S).sign(self.key)
        signed = (manifest.sign(self.key), lease)
        return BundleHead(*signed, program, self.statements, frozen_file).encode()


def default_key() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "papaya" / "owner.key"


def add_owner_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--owner",
        type=Path,
        metavar="FILE",
        help=f"sign with the key in this file (default: {default_key()})",
    )


def statements_beside(path: Path) -> tuple[SignedStatement, ...]:
    beside = path.with_name(path.name + ".statements")
    try:
        return msgspec.json.decode(beside.read_bytes(), type=tuple[SignedStatement, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        raise OperatorError(
            f"cannot read {beside}: {error}", hint="restore it from a backup"
        ) from error


def signer(path: Path) -> OwnerSigner:
    """The key in this file. OperatorError if it is missing, readable by others, or no key."""
    if not path.exists():
        raise OperatorError(
            f"there is no key {path}", hint="create one: papaya owner key, or pass --owner FILE"
        )
    text = read_secret(path).reveal()
    try:
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))
    except ValueError as error:
        raise OperatorError(
            f"{path} is not an owner's key", hint="create one: papaya owner key"
        ) from error
    statements = statements_beside(path)
    public = key.public_key().public_bytes_raw()
    return OwnerSigner(key, _first_owner(public, statements), statements)


def _first_owner(public: bytes, statements: Sequence[SignedStatement]) -> str:
    """The id that devices have pinned: of the first key, followed back from this one."""
    predecessors = {}
    for signed in statements:
        if _names_successor(signed):
            successor = KeySuccessor.verify(signed)
            predecessors[successor.new] = successor.old
    name = key_id(public)
    for _ in statements:
        name = predecessors.get(name, name)
    return name


def _names_successor(signed: SignedStatement) -> bool:
    return signed.body.startswith(b'{"new":')


def program_files(path: Path) -> dict[str, bytes]:
    """The files of a program: one task file, or a folder with a task.py and what it imports."""
    if not path.is_dir():
        return {PROGRAM_FILE: path.read_bytes()}
    found = {
        file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*.py"))
    }
    if PROGRAM_FILE not in found:
        raise OperatorError(
            f"{path} has no {PROGRAM_FILE}", hint=f"name the file with the task {PROGRAM_FILE}"
        )
    return found


class BundleBlobs(NamedTuple):
    """What devices fetch beside the manifest: the archive, and the frozen tensors, if any."""

    program: bytes
    frozen: bytes = b""


def blob_ref(data: bytes) -> BlobRef:
    return BlobRef(archive.digest(data), len(data))


def first_manifest(
    owner: str, loaded: LoadedTask, config: TaskConfig, blobs: BundleBlobs
) -> TaskManifest:
    """The first revision of a new run; `config.task` is the name of the task."""
    engine: EngineName = "torch" if config.requirements.engine == "torch" else "executorch"
    return TaskManifest(
        owner=owner,
        task=config.task,
        run=int(time.time() * 1000),
        revision=1,
        engine=engine,
        engine_version=_ENGINE_VERSIONS[engine],
        program=blob_ref(blobs.program),
        frozen=loaded.frozen.hex() or None,
        frozen_file=blob_ref(blobs.frozen) if blobs.frozen else UNSET,
        layout=loaded.manifest.tensors,
        client=structs.replace(loaded.task.client, max_examples=config.max_examples),
        examples=loaded.task.examples,
        evaluation_clients=config.evaluation_clients,
        metrics=config.metrics or UNSET,
        **_limits(config),
    )


def next_manifest(
    manifest: TaskManifest, config: TaskConfig, client: ClientSGD, revision: int
) -> TaskManifest:
    """The revision with this number and these settings."""
    return structs.replace(
        manifest,
        revision=revision,
        client=structs.replace(client, max_examples=config.max_examples),
        evaluation_clients=config.evaluation_clients,
        **_limits(config),
    )


def _limits(config: TaskConfig) -> dict[str, Any]:
    threshold, privacy = config.threshold, config.privacy
    return {
        "weighting": config.weighting.kind if privacy is None else privacy.weighting,
        "weight_cap": config.weighting.cap or UNSET,
        "staleness": UNSET if config.staleness == Staleness() else config.staleness,
        "privacy": None if privacy is None else privacy.terms,
        "training_timeout_s": float(config.training_timeout_s),
        "upload_timeout_s": float(config.upload_timeout_s),
        "secure": None if threshold is None else SecureTerms(config.aggregation_goal, threshold),
        "clip": None if config.clip is None else float(config.clip),
        "upload_bits": UNSET if config.upload_bits == 32 else config.upload_bits,
        "max_staleness": config.max_staleness,
        "participation": Participation(
            float(config.participation_gap_s), config.max_participations, "task"
        ),
    }


def run_of(manifest: TaskManifest) -> str:
    return run_id(manifest.owner, manifest.task, manifest.run)


def own_manifest(found: OwnerSigner, head: BundleHead) -> TaskManifest:
    """The manifest, if it was signed by this owner: never continue from what a server made up."""
    manifest, signer_id = TaskManifest.verify(head.manifest), key_id(head.manifest.key)
    named = [KeySuccessor.verify(s).new for s in found.statements if _names_successor(s)]
    if manifest.owner != found.owner or signer_id not in (found.owner, *named):
        raise ConfigError(
            f"the newest revision of {manifest.task} was signed by another key, {signer_id}",
            hint="use the key of its owner: --owner FILE",
        )
    return manifest
