"""The artifact that `papaya tsa build` makes: one zip file, the same bytes wherever it is built.

    MANIFEST.sha256       SHA-256 of every other file; its own SHA-256 is the artifact's hash
    papaya/…              the enclave's sources, by the table in papaya/tsa/enclave.toml
    wheels/…              its dependencies, as they were published

Files are stored in the order of their names, with one fixed time and mode. Wheels come from pip
with `--require-hashes`, or from a folder; whatever does not have its hash is refused. A revision of
a git repository can be built without checking it out, which is how an audit rebuilds old releases.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from papaya.errors import OperatorError
from papaya.tsa.measurement import (
    MANIFEST,
    WHEELS,
    EnclaveLock,
    LockError,
    ReadSource,
    manifest,
    read_lock,
)

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
