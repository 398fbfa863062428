"""`papaya tsa`: build the TSA binary, or say what hash it has.

Both follow from the sources and the lock alone, so anyone can repeat them and compare with the log.
`measure` needs no network; `build` fetches the dependencies, unless it is given a folder with them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from papaya.cli.output import Commands, add_format, note, print_data, print_json, writing
from papaya.errors import OperatorError
from papaya.tsa.measurement import (
    MANIFEST,
    WHEELS,
    EnclaveLock,
    LockError,
    ReadSource,
    installed,
    manifest,
    read_lock,
)

_DEFAULT_OUTPUT = Path("papaya-tsa.zip")


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "tsa",
        description="The TSA of secure aggregation, as anyone can build it.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    building = actions.add_parser(
        "build",
        help="make the artifact",
        description="Make the artifact that an enclave runs, with its dependencies, byte for byte.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    building.set_defaults(run=run_build)
    building.add_argument(
        "--output", type=Path, default=_DEFAULT_OUTPUT, metavar="FILE", help="the zip file to write"
    )
    building.add_argument(
        "--wheels", type=Path, metavar="DIR", help="take the dependencies from here, not from pip"
    )
    measuring = actions.add_parser(
        "measure",
        help="print the artifact's hash",
        description="Print the hash that the artifact has: what `software` evidence reports.",
    )
    measuring.set_defaults(run=run_measure)
    for action in (building, measuring):
        action.add_argument(
            "--source", type=Path, metavar="DIR", help="sources: this installation's by default"
        )
        action.add_argument(
            "--revision", metavar="REV", help="a git revision of the sources, which must be a clone"
        )
        add_format(action)


def run_build(options: argparse.Namespace) -> int:
    read = reading(options.source, options.revision)
    data = build(read, options.wheels)
    with writing(options.output):
        options.output.write_bytes(data)
    found = {
        "artifact": artifact_hash(read),
        "file": str(options.output),
        "file_sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
    }
    if options.format == "json":
        print_json(found)
    else:
        print_data(str(found["artifact"]))
        note(f"{options.output}: {len(data):,} bytes, file SHA-256 {found['file_sha256']}")
    return 0


def run_measure(options: argparse.Namespace) -> int:
    found = artifact_hash(reading(options.source, options.revision))
    if options.format == "json":
        print_json({"artifact": found})
    else:
        print_data(found)
    return 0


def reading(source: Path | None, revision: str | None) -> ReadSource:
    if revision is not None:
        return from_revision(source or Path(), revision)
    return installed if source is None else from_folder(source)


_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16
_UNIX = 3


class NoWheels(OperatorError):
    """The dependencies could not be fetched."""

    default_hint = "fetch them where there is a network, then: papaya tsa build --wheels DIR"


class NoGit(OperatorError):
    """Git could not be asked, which says nothing about a revision."""

    default_hint = "install git, or build from a checkout of that revision"


def from_folder(root: Path) -> ReadSource:
    """`ReadSource` for a checkout."""
    return lambda path: (root / path).read_bytes()


def from_revision(repository: Path, revision: str) -> ReadSource:
    """`ReadSource` for one revision of a git repository; nothing is checked out, nothing is run."""
    if revision.startswith("-"):
        raise OperatorError(f"{revision!r} is not a revision")

    # Under a git hook, GIT_DIR would name the repository of the hook.
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("GIT_")}

    def read(path: str) -> bytes:
        command = ["git", "-C", str(repository), "cat-file", "blob", f"{revision}:{path}"]
        try:
            return subprocess.run(
                command, check=True, capture_output=True, timeout=60, env=environment
            ).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoGit(f"git could not be run in {repository}: {error}") from error
        except subprocess.SubprocessError as error:
            message = f"{repository} cannot show {path} of revision {revision[:60]}"
            raise OperatorError(message, hint="fetch that revision, or name its clone") from error

    return read


def checked_manifest(read: ReadSource) -> bytes:
    """The manifest, with whatever is wrong told to the operator."""
    try:
        return manifest(read)
    except OSError as error:
        message = f"the enclave's sources are not there: {error}"
        raise OperatorError(message, hint="name the folder that holds papaya/") from error
    except (LockError, UnicodeDecodeError) as error:
        raise OperatorError(str(error), hint="mend papaya/tsa/enclave.toml") from error


def artifact_hash(read: ReadSource) -> str:
    return hashlib.sha256(checked_manifest(read)).hexdigest()


def build(read: ReadSource, wheels: Path | None = None) -> bytes:
    """The whole artifact; `wheels` is a folder that has them already."""
    listed = checked_manifest(read)
    lock = read_lock(read)
    with tempfile.TemporaryDirectory(prefix="papaya-wheels-") as scratch:
        folder = wheels
        if folder is None:
            folder = Path(scratch)
            _download(lock, folder)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            _store(archive, MANIFEST, listed)
            for line in listed.decode().splitlines():
                expected, _, path = line.partition("  ")
                data = _content(path, read, folder)
                if hashlib.sha256(data).hexdigest() != expected:
                    message = f"{path} does not have the SHA-256 {expected}"
                    raise OperatorError(message, hint="the file was changed: get it anew")
                _store(archive, path, data)
    return buffer.getvalue()


def _content(path: str, read: ReadSource, wheels: Path) -> bytes:
    if not path.startswith(f"{WHEELS}/"):
        return read(path)
    try:
        return (wheels / path.removeprefix(f"{WHEELS}/")).read_bytes()
    except OSError as error:
        raise NoWheels(f"{path} is not in {wheels}") from error


def _store(archive: zipfile.ZipFile, path: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(path, _TIME)
    entry.external_attr = _MODE
    entry.create_system = _UNIX
    archive.writestr(entry, data)


def _download(lock: EnclaveLock, folder: Path) -> None:
    requirements = folder / "requirements.txt"
    lines = [f"{w.name}=={w.version} --hash=sha256:{w.sha256}\n" for w in lock.wheels]
    requirements.write_text("".join(lines))
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    command += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    command += ["--python-version", lock.python, "--implementation", "cp"]
    for platform in lock.platforms:
        command += ["--platform", platform]
    for abi in (f"cp{lock.python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or ["pip gave no reason"]
        raise NoWheels(f"pip could not fetch the enclave's dependencies: {last[0]}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise NoWheels(f"pip could not be run: {error}") from error
