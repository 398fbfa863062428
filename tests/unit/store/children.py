"""What the child processes of these tests do, to be killed, to race, or to run out of space.

`python -m tests.unit.store.children <what> <folder> ...` says on stdout what it has achieved.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from papaya.aggregator.shards import blob_key
from papaya.errors import OperatorError
from papaya.messages.storage import EpochRow, Transaction, VersionRow, version_key
from papaya.store.blobs import FolderBlobs
from papaya.store.state import SqliteState

TASK = "task"
LONG_S = 300.0  # another child that has the write lock may get no processor
ROOT = Path(__file__).resolve().parents[3]


def start(what: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.unit.store.children", what, str(folder), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def content(version: int) -> bytes:
    return version.to_bytes(8, "little") * 20_000


def write_for_ever(folder: Path) -> None:
    """Versions, each with its blob first, and their number in a row of the same transaction."""
    state, blobs = (
        SqliteState(folder / "state.sqlite", busy_timeout_s=LONG_S),
        FolderBlobs(folder / "blobs"),
    )
    before = state.read(("count",)).get("count")
    version = before.epoch if isinstance(before, EpochRow) else 0
    while True:
        data = content(version)
        key = blob_key(TASK, 1, f"version-{version}", data)
        blobs.put(key, data)
        row = VersionRow(version, key, seq=1, created=0.0)
        after = EpochRow(version + 1)
        change = Transaction(
            require=(("count", before),),
            put=((version_key(TASK, version), row), ("count", after)),
        )
        assert state.transact(change) == "committed"
        before, version = after, version + 1
        say(version)


def count(folder: Path, times: int) -> None:
    """Add one by compare-and-set, again and again, whoever else does so."""
    state = SqliteState(folder / "state.sqlite", busy_timeout_s=LONG_S)
    done = 0
    while done < times:
        before = state.read(("count",)).get("count")
        after = EpochRow(before.epoch + 1 if isinstance(before, EpochRow) else 1)
        change = Transaction(require=(("count", before),), put=(("count", after),))
        done += state.transact(change) == "committed"
    state.close()
    say(done)


def run_out_of_space(folder: Path, limit: int) -> None:
    """Write rows and a blob that do not fit; then say what was heard and what is there."""
    state, blobs = (
        SqliteState(folder / "state.sqlite", busy_timeout_s=LONG_S),
        FolderBlobs(folder / "blobs"),
    )
    fits = state.transact(Transaction(put=(("small", EpochRow(1)),)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    large = VersionRow(0, "x" * 2 * limit, seq=0, created=0.0)
    say(fits, state.transact(Transaction(put=(("a", EpochRow(1)), ("large", large)))))
    say(*state.read(("",)))
    data = bytes(2 * limit)
    key = blob_key(TASK, 1, "version-0", data)
    try:
        blobs.put(key, data)
    except OperatorError as error:
        say(error)
    say(blobs.keys(TASK), [path.name for path in (folder / "blobs").iterdir()])
    state.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", folder]:
            write_for_ever(Path(folder))
        case ["count", folder, times]:
            count(Path(folder), int(times))
        case ["fill", folder, limit]:
            run_out_of_space(Path(folder), int(limit))
