"""`papaya tsa`: build the TSA binary, or print its hash.

Both depend only on the sources and the lock, so anyone can repeat them and compare the hash with
the public log. `measure` needs no network; `build` downloads the dependencies unless --wheels names
a folder that has them. The artifact is one zip file with the same bytes wherever it is built:

    MANIFEST.sha256       SHA-256 of every other file; its own SHA-256 is the artifact's hash
    papaya/…              the enclave's sources, by the table in papaya/tsa/enclave.toml
    wheels/…              its dependencies, as they were published

Files are stored in the order of their names, with one fixed time and mode. Wheels come from pip
with `--require-hashes`, or from a folder; a file with another hash is refused, with an error of its
own, because an audit must not mistake it for a failed download. A wheel that cannot be had does not
hide another one with a wrong hash. A revision of a git repository can be built without checking it
out, which is how an audit rebuilds old releases.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from papaya.cli.output import (
    Commands,
    FormatOptions,
    add_format,
    bind,
    note,
    print_data,
    print_json,
    writing,
)
from papaya.errors import OperatorError
from papaya.tsa.measurement import (
    LOCK,
    MANIFEST,
    WHEELS,
    EnclaveLock,
    LockError,
    ReadSource,
    Wheel,
    installed,
    manifest,
    max_bytes,
    read_lock,
)

_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16
_UNIX = 3
# pip's message is the only sign of a wrong hash.
_PIP_MISMATCH = re.compile(
    r"DO NOT MATCH THE HASHES[^\n]*\n(?P<file>.*?Got\s+(?P<got>[0-9a-f]{64}))", re.DOTALL
)
_BLOB = re.compile(rb"(?P<id>[0-9a-f]{40,64}) blob (?P<size>[0-9]+)")
_SHOWN_CHARACTERS = 300  # of what git printed
# Of one release in an audit, because whoever writes the lock chooses what an auditor downloads and
# reads. An enclave holds the dependencies in memory; today's need less than a twentieth of this.
MAX_WHEELS_BYTES = 1024**3
# For all runs of pip in one build or audit, because whoever writes the locks and the log chooses
# how many wheels there are.
_PIP_LIMIT_S = 600


class NoWheels(OperatorError):
    """The dependencies could not be downloaded."""

    default_hint = "download them where there is a network, then: papaya tsa build --wheels DIR"


class WrongWheel(OperatorError):
    """A dependency does not have the hash in the lock."""

    default_hint = "download it again; if the hash is still different, do not trust these sources"


class LargeWheels(OperatorError):
    """The dependencies are larger than an audit accepts."""

    default_hint = "do not trust a TSA with dependencies of this size"


class NotInClone(OperatorError):
    """The clone lacks a revision."""


class NoGit(OperatorError):
    """Git could not be run, which says nothing about a revision."""

    default_hint = "install git, or build from a checkout of that revision"


@dataclass(frozen=True, kw_only=True)
class TsaMeasureOptions(FormatOptions):
    source: Path | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class TsaBuildOptions(TsaMeasureOptions):
    output: Path = Path("papaya-tsa.zip")
    wheels: Path | None = None


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "tsa",
        description="Build the TSA binary of secure aggregation, or print its hash.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    building = actions.add_parser(
        "build",
        help="build the TSA binary",
        description="Build the zip file that an enclave runs, with its dependencies. The "
        "build is reproducible: every machine produces the same bytes.",
    )
    building.add_argument("--output", type=Path, metavar="FILE", help="zip file to write")
    building.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="folder with the dependency wheels (default: download them with pip)",
    )
    measuring = actions.add_parser(
        "measure",
        help="print the hash of the TSA binary",
        description="Print the hash of the TSA binary. `software` evidence reports this hash "
        "as its measurement.",
    )
    for action in (building, measuring):
        action.add_argument(
            "--source",
            type=Path,
            metavar="DIR",
            help="folder that contains papaya/ (default: this installation; with --revision: "
            "the current folder)",
        )
        action.add_argument(
            "--revision",
            metavar="REV",
            help="git revision to use; the source folder must be a git clone",
        )
        add_format(action)
    bind(building, TsaBuildOptions, run_build)
    bind(measuring, TsaMeasureOptions, run_measure)


def run_build(options: TsaBuildOptions) -> int:
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
    if options.is_json:
        print_json(found)
    else:
        print_data(str(found["artifact"]))
        note(f"{options.output}: {len(data):,} bytes, file SHA-256 {found['file_sha256']}")
    return 0


def run_measure(options: TsaMeasureOptions) -> int:
    found = artifact_hash(reading(options.source, options.revision))
    if options.is_json:
        print_json({"artifact": found})
    else:
        print_data(found)
    return 0


def reading(source: Path | None, revision: str | None) -> ReadSource:
    if revision is not None:
        require_repository(source or Path())
        return from_revision(source or Path(), revision)
    return installed if source is None else from_folder(source)


def from_folder(root: Path) -> ReadSource:
    """`ReadSource` of a checkout."""

    def read(path: str) -> bytes:
        file, limit = root / path, max_bytes(path)
        # A revision may contain a link to a device or a pipe, and reading that may never end.
        if file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        with file.open("rb") as opened:
            data = opened.read(limit + 1)
        if len(data) > limit:
            raise _too_long(str(file), limit)
        return data

    return read


def _too_long(where: str, limit: int) -> OperatorError:
    hint = "no source file of the enclave is that long: check where this file comes from"
    return OperatorError(f"{where} is longer than {limit} bytes", hint=hint)


def require_repository(folder: Path) -> None:
    """Refuse a folder that git cannot use, for example because another user owns it."""
    try:
        _git(folder, "rev-parse", "--git-dir")
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip()
        raise OperatorError(
            f"git cannot use {folder}: {why}", hint="pass a clone that git can read: --source CLONE"
        ) from error


def from_revision(repository: Path, revision: str) -> ReadSource:
    """`ReadSource` of one revision of a git repository, without a checkout."""
    if revision.startswith("-") or not revision.isprintable():
        raise OperatorError(f"{revision!r} is not a git revision", hint="git rev-parse HEAD")

    def read(path: str) -> bytes:
        where = f"{path} of revision {revision[:60]}"
        git = f"git -C {shlex.quote(str(repository))}"
        names = f"{revision}\n{revision}:{path}\n"
        try:
            known, found = _git(repository, "cat-file", "--batch-check", given=names).splitlines()
            if known.endswith((b" missing", b" ambiguous")):
                why = known.decode(errors="replace").rpartition(" ")[2]
                raise NotInClone(
                    f"revision {revision[:60]} is {why} in {repository}",
                    hint=f"{git} fetch, or give all digits of the revision",
                )
            blob = _BLOB.fullmatch(found)
            if blob is None:
                raise OperatorError(f"there is no file {where}", hint="choose another revision")
            # The size is checked before reading: publishing gigabytes of zeros costs nothing.
            if int(blob["size"]) > max_bytes(path):
                raise _too_long(where, max_bytes(path))
            return _git(repository, "cat-file", "blob", blob["id"].decode())
        except subprocess.CalledProcessError as error:
            # In a partial clone, the remote may have written a part of git's error output.
            reason = error.stderr.decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
            raise OperatorError(
                f"git cannot read {where}: {reason!r}", hint=f"check the clone: {git} fsck"
            ) from error

    return read


def _git(repository: Path, *arguments: str, given: str = "") -> bytes:
    # In a git hook, GIT_DIR would name the repository of the hook.
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("GIT_")}
    # A replaced object has the id of another one.
    environment |= {"LC_ALL": "C", "GIT_NO_REPLACE_OBJECTS": "1"}
    command = ["git", "-C", str(repository), *arguments]
    try:
        return subprocess.run(
            command,
            check=True,
            input=given.encode(),
            capture_output=True,
            timeout=60,
            env=environment,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoGit(f"cannot run git in {repository}: {error}") from error


def checked_manifest(read: ReadSource) -> bytes:
    """The manifest, or an OperatorError that says what is wrong with the sources."""
    with _refusals():
        return manifest(read)


def checked_lock(read: ReadSource) -> EnclaveLock:
    """As `checked_manifest`."""
    with _refusals():
        return read_lock(read)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot read the sources of the enclave: {error}"
        raise OperatorError(
            message, hint="pass the folder that contains papaya/: --source DIR"
        ) from error
    except LockError as error:
        raise OperatorError(str(error), hint="correct papaya/tsa/enclave.toml") from error


def artifact_hash(read: ReadSource) -> str:
    return hashlib.sha256(checked_manifest(read)).hexdigest()


class Dependencies:
    """Checks the wheels in the locks of an audit, in a folder or downloaded.

    The operator of the log wrote the locks. So a wheel is never in memory as a whole, a downloaded
    one is deleted when its hash is known, all downloads share one time limit, and what was found
    for a wheel is used again for other locks.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._pip = _Pip()
        # (wheel, Python version, platforms) -> size in bytes, or the error.
        self._found: dict[tuple[Wheel, str, tuple[str, ...]], int | NoWheels | WrongWheel] = {}

    def check(self, lock: EnclaveLock) -> None:
        """Raises `WrongWheel`, `LargeWheels`, or if only some could not be obtained, `NoWheels`."""
        total = 0
        missing: dict[str, list[str]] = {}  # by reason
        for wheel in lock.wheels:
            asked = wheel, lock.python, lock.platforms
            if asked not in self._found:
                self._found[asked] = self._find(lock, wheel)
            found = self._found[asked]
            if isinstance(found, WrongWheel):
                raise WrongWheel(str(found))
            if isinstance(found, NoWheels):  # must not hide a wrong one
                missing.setdefault(str(found), []).append(wheel.file)
            else:
                total += found
            if total > MAX_WHEELS_BYTES:
                raise LargeWheels(f"the wheels are larger than {MAX_WHEELS_BYTES:,} bytes in total")
        if missing:
            if self._folder is None:
                raise NoWheels(f"pip could not download {_by_reason(missing)}")
            raise NoWheels(f"cannot read from {self._folder}: {_by_reason(missing)}")

    def _find(self, lock: EnclaveLock, wheel: Wheel) -> int | NoWheels | WrongWheel:
        try:
            if self._folder is not None:
                return _require_hash(self._folder, wheel)
            with _scratch() as scratch:
                self._pip.download(lock, wheel, scratch)
                return _require_hash(scratch, wheel)
        except (NoWheels, WrongWheel) as error:
            return error


def build(read: ReadSource, wheels: Path | None = None) -> bytes:
    """The artifact's bytes. Without the folder `wheels`, the dependencies are downloaded.

    Raises `WrongWheel` if a dependency does not have the hash in the lock, `NoWheels` if one could
    not be obtained.
    """
    listed = checked_manifest(read)
    lock = read_lock(read)
    dependencies = _downloaded(lock) if wheels is None else _read_wheels(lock, wheels)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        _store(archive, MANIFEST, listed)
        for line in listed.decode().splitlines():
            expected, _, path = line.partition("  ")
            data = dependencies[path] if path in dependencies else read(path)
            if hashlib.sha256(data).hexdigest() != expected:
                message = f"{path} does not have the SHA-256 {expected}"
                raise OperatorError(message, hint="the file changed during the build: build again")
            _store(archive, path, data)
    return buffer.getvalue()


def _read_wheels(lock: EnclaveLock, folder: Path) -> dict[str, bytes]:
    """By path in the artifact. Reads all of them: a missing wheel must not hide a wrong one."""
    found: dict[str, bytes] = {}
    missing: list[str] = []
    for wheel in lock.wheels:
        try:
            data = (folder / wheel.file).read_bytes()
        except OSError:
            missing.append(wheel.file)
            continue
        digest = hashlib.sha256(data).hexdigest()
        if digest != wheel.sha256:
            raise _wrong(wheel, digest)
        found[f"{WHEELS}/{wheel.file}"] = data
    if missing:
        raise NoWheels(f"missing from {folder}: {', '.join(missing)}")
    return found


def _require_hash(folder: Path, wheel: Wheel) -> int:
    """The size of the wheel's file. A file above the limit is not read: its size is wrong."""
    path = folder / wheel.file
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise NoWheels("not a regular file")
        if about.st_size > MAX_WHEELS_BYTES:
            return about.st_size
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise NoWheels(str(error.strerror)) from error
    if digest != wheel.sha256:
        raise _wrong(wheel, digest)
    return about.st_size


def _wrong(wheel: Wheel, digest: str) -> WrongWheel:
    return WrongWheel(
        f"{wheel.file} does not have the SHA-256 in {LOCK}: expected {wheel.sha256}, got {digest}"
    )


def _by_reason(missing: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{', '.join(files)}: {reason}" for reason, files in missing.items())


def _store(archive: zipfile.ZipFile, path: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(path, _TIME)
    entry.external_attr = _MODE
    entry.create_system = _UNIX
    archive.writestr(entry, data)


def _downloaded(lock: EnclaveLock) -> dict[str, bytes]:
    with _scratch() as scratch:
        _download(lock, scratch)
        return _read_wheels(lock, scratch)


@contextmanager
def _scratch() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(
            prefix="papaya-wheels-", ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder)
    except OSError as error:
        raise NoWheels(
            f"cannot use a temporary folder: {error}",
            hint="free some space there, or choose another folder with TMPDIR",
        ) from error


def _download(lock: EnclaveLock, folder: Path) -> None:
    """Run pip for one wheel after the other, because it stops at the first one it cannot get."""
    pip = _Pip()
    missing: dict[str, list[str]] = {}  # by reason
    for wheel in lock.wheels:
        try:
            pip.download(lock, wheel, folder)
        except NoWheels as error:
            missing.setdefault(str(error), []).append(wheel.file)
    if missing:
        raise NoWheels(f"pip could not download {_by_reason(missing)}")


class _Pip:
    """Runs pip until all runs together have taken `_PIP_LIMIT_S`.

    A stranger may have written the lock and the files of the current folder. So pip is not imported
    from there (-P) and runs in the folder of the download, which also takes its temporary files and
    is deleted even if pip is ended. Without a cache, nothing that it downloads is kept.
    """

    def __init__(self) -> None:
        self._left_s = float(_PIP_LIMIT_S)

    def download(self, lock: EnclaveLock, wheel: Wheel, folder: Path) -> None:
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
        command = [sys.executable, "-P", "-m", "pip", "--quiet", "--disable-pip-version-check"]
        command += ["download", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
        command += ["--no-input", "--no-cache-dir", "--ignore-requires-python"]
        command += ["--dest", str(folder), "--requirement", str(requirements)]
        command += ["--python-version", lock.python, "--implementation", "cp"]
        for platform in lock.platforms:
            command += ["--platform", platform]
        for abi in (lock.abi, "abi3", "none"):
            command += ["--abi", abi]
        before = set(folder.glob("*.whl"))
        problem = self._run(command, folder)
        if first := _PIP_MISMATCH.search(problem):
            # Some versions of pip say the same after an interrupted download.
            problem = self._run(command, folder)
            if second := _PIP_MISMATCH.search(problem):
                if first["got"] != second["got"]:
                    got = f"{first['got']} and {second['got']}"
                    raise NoWheels(f"the SHA-256 of two downloads differ: {got}")
                details = " ".join(second["file"].split())
                raise WrongWheel(
                    f"pip got a file whose SHA-256 is not the one in {LOCK}: {details}"
                )
        if problem:
            raise NoWheels(problem.splitlines()[-1])
        # pip takes any file of this version that has the hash.
        for other in set(folder.glob("*.whl")) - before:
            if other.name != wheel.file:
                raise WrongWheel(f"the SHA-256 in {LOCK} for {wheel.file} is that of {other.name}")

    def _run(self, command: Sequence[str], folder: Path) -> str:
        """What pip printed if it failed, otherwise nothing."""
        started = monotonic()
        try:
            if self._left_s <= 0:
                raise subprocess.TimeoutExpired(command, 0)
            ran = subprocess.run(
                command,
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._left_s,
                cwd=folder,
                env=os.environ | {"TMPDIR": str(folder)},
            )
        except subprocess.TimeoutExpired as error:
            raise NoWheels(f"all downloads together took more than {_PIP_LIMIT_S} s") from error
        except OSError as error:
            raise NoWheels(f"cannot run pip: {error}") from error
        finally:
            self._left_s -= monotonic() - started
        return (ran.stderr.strip() or "pip gave no reason") if ran.returncode else ""
