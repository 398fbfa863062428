"""Whoever runs or serves the log lies: roll-backs, forks, withheld and changed files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.verifiable_log.checkpoint import Checkpoint, LogPolicy, sign_checkpoint
from papaya.verifiable_log.errors import (
    ForkError,
    LogError,
    MissingFile,
    ProofError,
    RollbackError,
    SignatureError,
)
from papaya.verifiable_log.note import SignerKey
from papaya.verifiable_log.reader import LogReader
from tests.unit.verifiable_log.builders import (
    KEY,
    NOW,
    POLICY,
    WITNESSES,
    Served,
    a_log,
    a_reader,
)

ENTRIES = [b"release %d" % i for i in range(300)]


def a_device(tmp_path: Path, seen: int, then: int) -> tuple[LogReader, Served]:
    """It has seen `seen` entries; the log has `then` by now."""
    log = a_log(tmp_path / "honest", ENTRIES[:seen])
    served = Served(log)
    reader = LogReader(served.fetch, POLICY)
    reader.refresh(NOW)
    if then > seen:
        log.append(ENTRIES[seen:then], KEY)
    return reader, served


def test_an_old_checkpoint_is_refused(tmp_path: Path) -> None:
    """A server that hides the newest releases, or goes back to before a revocation."""
    reader, served = a_device(tmp_path, 5, 5)
    older = a_log(tmp_path / "older", ENTRIES[:3])
    served.changed["checkpoint"] = older.fetch("checkpoint")
    remembered = reader.remembered
    with pytest.raises(RollbackError, match="3 entries now, but had 5"):
        reader.refresh(NOW)
    assert reader.remembered == remembered


def test_an_old_checkpoint_is_refused_after_a_restart(tmp_path: Path) -> None:
    reader, _ = a_device(tmp_path, 5, 5)
    older = a_log(tmp_path / "older", ENTRIES[:3])
    with pytest.raises(RollbackError):
        a_reader(older, reader.remembered).refresh(NOW)


def test_an_older_checkpoint_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    """A new device starts from the checkpoint in its package."""
    pinned = a_log(tmp_path / "pinned", ENTRIES[:4]).fetch("checkpoint")
    empty = a_log(tmp_path / "empty")
    with pytest.raises(RollbackError):
        a_reader(empty, pinned).refresh(NOW)


@pytest.mark.parametrize(("seen", "size"), [(3, 3), (3, 4), (3, 300), (256, 257), (299, 300)])
def test_a_forked_log_is_refused(tmp_path: Path, seen: int, size: int) -> None:
    """Signed by the true key, complete and consistent in itself, but with another past."""
    reader, _ = a_device(tmp_path, seen, seen)
    rewritten = [*ENTRIES[: seen - 1], b"a binary for you alone", *ENTRIES[seen:size]]
    fork = a_log(tmp_path / "fork", rewritten)
    victim = a_reader(fork, reader.remembered)
    with pytest.raises(ForkError, match="does not extend"):
        victim.refresh(NOW)
    assert victim.checkpoint.size == seen


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_fork_of_any_shape_is_accepted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    seen = data.draw(st.integers(1, 20))
    size = data.draw(st.integers(seen, 24))
    folder = tmp_path_factory.mktemp("logs")
    reader, _ = a_device(folder, seen, seen)
    rewritten = list(ENTRIES[:size])
    rewritten[data.draw(st.integers(0, seen - 1))] = b"another"
    with pytest.raises(ForkError):
        a_reader(a_log(folder / "fork", rewritten), reader.remembered).refresh(NOW)


def test_an_honest_server_cannot_be_made_to_prove_a_fork_by_changed_tiles(tmp_path: Path) -> None:
    """Tiles are not signed; proofs made from wrong ones fail."""
    reader, served = a_device(tmp_path, 5, 300)
    for path in ("tile/0/000", "tile/0/001.p/44"):
        raw = served.fetch(path)
        served.changed[path] = raw[:40] + bytes([raw[40] ^ 1]) + raw[41:]
        with pytest.raises((ForkError, ProofError)):
            reader.refresh(NOW)
        served.changed.clear()
    assert reader.refresh(NOW).size == 300


def test_a_changed_entry_is_refused(tmp_path: Path) -> None:
    reader, served = a_device(tmp_path, 5, 5)
    raw = served.fetch("tile/entries/000.p/5")
    served.changed["tile/entries/000.p/5"] = raw.replace(b"release 3", b"release X")
    with pytest.raises(ProofError):
        reader.entry(3)
    with pytest.raises(ProofError, match="do not give the root"):
        reader.entries()
    assert reader.entry(2) == b"release 2"


def test_an_entry_is_not_shown_at_another_place(tmp_path: Path) -> None:
    reader, served = a_device(tmp_path, 5, 5)
    raw = served.fetch("tile/entries/000.p/5")
    swapped = raw.replace(b"release 3", b"swap").replace(b"release 2", b"release 3")
    served.changed["tile/entries/000.p/5"] = swapped.replace(b"\x00\x09swap", b"\x00\x09release 2")
    with pytest.raises(ProofError):
        reader.entry(3)


@pytest.mark.parametrize("path", ["tile/0/000.p/5", "tile/entries/000.p/5"])
def test_a_withheld_file_is_a_refusal(tmp_path: Path, path: str) -> None:
    reader, served = a_device(tmp_path, 5, 5)
    served.removed = {path}
    with pytest.raises(MissingFile):
        reader.entry(3)


def test_a_checkpoint_by_another_key_is_refused(tmp_path: Path) -> None:
    reader, served = a_device(tmp_path, 5, 6)
    root = reader.checkpoint.root
    thief = SignerKey(KEY.name, b"t" * 32)
    served.changed["checkpoint"] = sign_checkpoint(Checkpoint(KEY.name, 6, root), thief)
    with pytest.raises(SignatureError, match="no known key"):
        reader.refresh(NOW)


def test_two_histories_need_accomplices_among_the_witnesses(tmp_path: Path) -> None:
    """A fork to a device that has seen nothing yet: the log alone can do it, if no one watches."""
    fork = a_log(tmp_path / "fork", [b"a binary for you alone"])
    a_reader(fork).refresh(NOW)  # without witnesses nobody can tell
    policy = LogPolicy(KEY.verifier, tuple(w.verifier for w in WITNESSES), 2)
    with pytest.raises(SignatureError, match="only 0 valid cosignatures"):
        a_reader(fork, policy=policy).refresh(NOW)


def test_a_cosignature_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    honest = a_log(tmp_path / "honest", ENTRIES[:3])
    witness = WITNESSES[0]
    text = a_reader(honest).refresh(NOW).text
    line = witness.signature_line(text, NOW)
    fork = a_log(tmp_path / "fork", [*ENTRIES[:2], b"another"])
    served = Served(fork)
    served.changed["checkpoint"] = fork.fetch("checkpoint") + line.encode()
    policy = LogPolicy(KEY.verifier, (witness.verifier,), 1)
    with pytest.raises(SignatureError, match="is wrong"):
        LogReader(served.fetch, policy).refresh(NOW)


def test_a_size_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Signed, but the tiles for it do not exist: nothing is believed on credit."""
    reader, served = a_device(tmp_path, 5, 5)
    huge = Checkpoint(KEY.name, 2**62, bytes(32))
    served.changed["checkpoint"] = sign_checkpoint(huge, KEY)
    with pytest.raises(LogError):
        reader.refresh(NOW)
    assert reader.checkpoint.size == 5


def test_an_empty_tree_has_one_root(tmp_path: Path) -> None:
    served = Served(a_log(tmp_path))
    served.changed["checkpoint"] = sign_checkpoint(Checkpoint(KEY.name, 0, bytes(32)), KEY)
    with pytest.raises(LogError, match="not that of an empty tree"):
        LogReader(served.fetch, POLICY).refresh(NOW)
