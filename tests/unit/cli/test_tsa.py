"""`papaya tsa`: the same bytes wherever it is built, and nothing that does not have its hash."""

from __future__ import annotations

import argparse
import errno
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from papaya.cli import tsa
from papaya.cli.serve import ServeOptions, run_tsa
from papaya.cli.tsa import (
    Dependencies,
    NotInClone,
    NoWheels,
    WrongWheel,
    build,
    checked_lock,
    from_folder,
    from_revision,
)
from papaya.errors import OperatorError
from papaya.tsa.measurement import LOCK, max_bytes, measure
from tests.unit.cli.enclave_sources import (
    SOURCES,
    WHEEL,
    WHEEL_BYTES,
    FakePip,
    add_wheel,
    commit,
    make_sources,
    make_wheels,
)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    tsa.add_to(parser.add_subparsers())
    options = parser.parse_args(["tsa", *arguments])
    return int(options.run(options))


def test_measure_is_what_software_evidence_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("measure") == 0
    assert capsys.readouterr().out.strip() == measure().hex()


def test_building_twice_anywhere_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = make_wheels(tmp_path / "wheels")
    first = build(from_folder(make_sources(tmp_path / "here")), wheels)
    elsewhere = make_sources(tmp_path / "else/where")
    before = os.umask(0o077)
    try:
        for path in (*SOURCES, "papaya/tsa/enclave.toml"):
            os.utime(elsewhere / path, (1, 1))
            (elsewhere / path).chmod(0o755)
        (elsewhere / "papaya/not_measured.py").write_text("never in the enclave")
        monkeypatch.chdir(elsewhere)
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
        second = build(from_folder(Path()), wheels)
    finally:
        os.umask(before)
    assert first == second


def test_the_artifact_holds_what_its_manifest_says_and_no_more(tmp_path: Path) -> None:
    sources = make_sources(tmp_path / "sources")
    data = build(from_folder(sources), make_wheels(tmp_path / "wheels"))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        files = {name: archive.read(name) for name in names}
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert names == ["MANIFEST.sha256", *sorted(names[1:])]
    assert names[1:] == [*SOURCES[:1], *SOURCES[1:], "papaya/tsa/enclave.toml", f"wheels/{WHEEL}"]
    manifest = files.pop("MANIFEST.sha256")
    listed = dict(line.split("  ")[::-1] for line in manifest.decode().splitlines())
    assert listed == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert hashlib.sha256(manifest).digest() == measure(from_folder(sources))


def test_build_writes_the_artifact_and_prints_its_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources, wheels = make_sources(tmp_path / "sources"), make_wheels(tmp_path / "wheels")
    output = tmp_path / "tsa.zip"
    options = ["--source", str(sources), "--wheels", str(wheels), "--output", str(output)]
    assert run("build", *options) == 0
    assert capsys.readouterr().out.strip() == measure(from_folder(sources)).hex()
    assert run("build", *options, "--format", "json") == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert found["artifact"] == measure(from_folder(sources)).hex()
    assert found["file_sha256"] == hashlib.sha256(output.read_bytes()).hexdigest()


def test_a_revision_is_built_without_checking_it_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = make_sources(tmp_path / "clone")
    expected = measure(from_folder(clone)).hex()
    revision = commit(clone)
    make_sources(clone, "changed since\n")
    assert run("measure", "--source", str(clone), "--revision", revision) == 0
    assert capsys.readouterr().out.strip() == expected
    assert measure(from_folder(clone)).hex() != expected


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    wheels = make_wheels(tmp_path / "wheels")
    (wheels / WHEEL).write_bytes(WHEEL_BYTES + b"!")
    with pytest.raises(WrongWheel, match="does not have the SHA-256") as refused:
        build(from_folder(make_sources(tmp_path / "sources")), wheels)
    assert "download it again" in refused.value.hint


def test_a_missing_wheel_does_not_hide_one_with_another_hash(tmp_path: Path) -> None:
    sources, wheels = make_sources(tmp_path / "sources"), make_wheels(tmp_path / "wheels")
    (wheels / WHEEL).write_bytes(WHEEL_BYTES + b"!")
    add_wheel(sources, "a")
    with pytest.raises(WrongWheel, match=WHEEL):
        build(from_folder(sources), wheels)


@pytest.mark.parametrize("missing", [(), ("a0",)])
def test_a_download_with_another_hash_is_not_a_failed_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    """With the real pip, because only its message tells the two apart."""
    pytest.importorskip("pip")
    sources, served = make_sources(tmp_path / "sources"), make_wheels(tmp_path / "served")
    for name in missing:
        add_wheel(sources, name)
    (served / WHEEL).write_bytes(WHEEL_BYTES + b"!")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(served))
    with pytest.raises(WrongWheel, match=r"nosuchthing==1\.0 .* Got [0-9a-f]{64}\n"):
        build(from_folder(sources))


def test_a_wheel_that_no_index_has_does_not_hide_one_with_another_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = make_sources(tmp_path / "sources")
    add_wheel(sources, "a0")
    pip = FakePip(tmp_path / "pip", monkeypatch, "5" * 64, "5" * 64)
    with pytest.raises(WrongWheel, match=f"nosuchthing==1.0 .* Got {'5' * 64}"):
        build(from_folder(sources))
    assert pip.calls == ["a0==1.0", "nosuchthing==1.0", "nosuchthing==1.0"]


def test_every_wheel_that_pip_cannot_get_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = make_sources(tmp_path / "sources")
    add_wheel(sources, "a0")
    pip = FakePip(tmp_path / "pip", monkeypatch)
    problems = rf"a0-1\.0-.*\.whl: .* for a0==1\.0; {WHEEL}: .* for nosuchthing==1\.0\n"
    with pytest.raises(NoWheels, match=f"could not download {problems}"):
        build(from_folder(sources))
    assert pip.calls == ["a0==1.0", "nosuchthing==1.0"]


def test_a_download_that_succeeds_the_second_time_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, wheels = make_sources(tmp_path / "sources"), make_wheels(tmp_path / "wheels")
    pip = FakePip(tmp_path / "pip", monkeypatch, "5" * 64, WHEEL)
    assert build(from_folder(sources)) == build(from_folder(sources), wheels)
    assert pip.calls == ["nosuchthing==1.0"] * 2


@pytest.mark.parametrize(
    ("second", "reason"),
    [("6" * 64, "of two downloads differ: 5{64} and 6{64}"), ("ERROR: timed out", "timed out")],
)
def test_an_interrupted_download_is_not_a_wrong_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str, reason: str
) -> None:
    """pip reports it as a mismatch of hashes too."""
    sources = make_sources(tmp_path / "sources")
    pip = FakePip(tmp_path / "pip", monkeypatch, "5" * 64, second)
    with pytest.raises(NoWheels, match=f"could not download {WHEEL}.*{reason}"):
        build(from_folder(sources))
    assert len(pip.calls) == 2


def test_the_hash_of_another_file_of_the_same_version_is_a_wrong_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip takes any file with the hash in the lock; nobody could build with this one."""
    other = "nosuchthing-1.0-cp311-abi3-manylinux_2_28_x86_64.whl"
    FakePip(tmp_path / "pip", monkeypatch, other)
    with pytest.raises(WrongWheel, match=f"the SHA-256 in {LOCK} for {WHEEL} is that of {other}"):
        build(from_folder(make_sources(tmp_path / "sources")))


def test_pip_is_not_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be the clone of the sources, which a stranger wrote."""
    sources = make_sources(tmp_path / "sources")
    (sources / "pip.py").write_text("open('imported', 'w')\nraise SystemExit(1)\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.chdir(sources)
    with pytest.raises(NoWheels, match=r"No matching distribution found for nosuchthing==1\.0"):
        build(from_folder(Path()))
    assert not (sources / "imported").exists()


def test_what_pip_downloads_is_deleted_with_its_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was ended: whoever wrote the lock chooses how much pip downloads."""
    python, scratch = tmp_path / "python", tmp_path / "scratch"
    python.write_text('#!/bin/sh\necho half > "$TMPDIR/half"\npwd > "$0.pwd"\nkill -9 $$\n')
    python.chmod(0o755)
    scratch.mkdir()
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with pytest.raises(NoWheels, match="pip gave no reason"):
        build(from_folder(make_sources(tmp_path / "sources")))
    assert Path(f"{python}.pwd").read_text().startswith(f"{scratch}/papaya-wheels-")
    assert list(scratch.iterdir()) == []


def test_all_downloads_share_one_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator of a log chooses how many wheels an auditor has to download."""
    sources = make_sources(tmp_path / "sources")
    for name in ("a2", "a1", "a0"):
        add_wheel(sources, name)
    limits = slow_pip(monkeypatch)
    with pytest.raises(NoWheels, match=f"; a1-1.0-.*, a2-1.0-.*, {WHEEL}: .* more than 600 s"):
        build(from_folder(sources))
    assert limits == [600, 200]


def slow_pip(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each run takes 400 s and fails. Returns the limits of the runs."""
    now, limits = [1000.0], []

    def slow(
        command: list[str], *, timeout: float, **_: object
    ) -> subprocess.CompletedProcess[str]:
        limits.append(timeout)
        now[0] += min(timeout, 400)
        if timeout < 400:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: not found")

    monkeypatch.setattr(tsa, "monotonic", lambda: now[0])
    monkeypatch.setattr(subprocess, "run", slow)
    return limits


def test_the_downloads_for_all_locks_of_an_audit_share_one_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an audit of a log with many records could take a week."""
    limits = slow_pip(monkeypatch)
    dependencies = Dependencies(None)
    for name in ("a0", "a1", "a2"):
        sources = make_sources(tmp_path / name)
        add_wheel(sources, name)
        with pytest.raises(NoWheels):
            dependencies.check(checked_lock(from_folder(sources)))
    assert limits == [600, 200]


def test_a_wheel_of_several_locks_is_downloaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(tmp_path / "pip", monkeypatch, WHEEL)
    dependencies = Dependencies(None)
    first, second = (make_sources(tmp_path / name) for name in ("first", "second"))
    add_wheel(second, "a0")
    dependencies.check(checked_lock(from_folder(first)))
    for _ in range(2):
        with pytest.raises(NoWheels, match=r"could not download a0-1\.0"):
            dependencies.check(checked_lock(from_folder(second)))
    assert pip.calls == ["nosuchthing==1.0", "a0==1.0"]


@pytest.mark.parametrize("broken", ["no folder", "full"])
def test_a_temporary_folder_that_cannot_be_used_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def write_text(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    sources = make_sources(tmp_path / "sources")
    if broken == "full":
        monkeypatch.setattr(Path, "write_text", write_text)
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(NoWheels, match=r"temporary folder: .*(No such file|No space left)") as told:
        build(from_folder(sources))
    assert "TMPDIR" in told.value.hint


def test_without_dependencies_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    sources = from_folder(make_sources(tmp_path / "sources"))
    with pytest.raises(NoWheels, match="pip could not download") as refused:
        build(sources)
    assert "--wheels DIR" in refused.value.hint
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoWheels, match=f"missing from .*empty: {WHEEL}"):
        build(sources, tmp_path / "empty")


def test_sources_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="cannot read the sources of the enclave"):
        run("measure", "--source", str(tmp_path))


def test_a_lock_that_makes_no_sense_is_told(tmp_path: Path) -> None:
    sources = make_sources(tmp_path / "sources")
    (sources / "papaya/tsa/enclave.toml").write_text("nonsense")
    with pytest.raises(OperatorError, match="is not a valid lock"):
        run("measure", "--source", str(sources))


@pytest.mark.parametrize("revision", ["0" * 40, "--help", "-c"])
def test_a_revision_that_is_not_there_is_told(tmp_path: Path, revision: str) -> None:
    clone = make_sources(tmp_path / "clone")
    commit(clone)
    with pytest.raises(OperatorError, match="revision"):
        from_revision(clone, revision)("papaya/__init__.py")


def test_fetch_is_advised_only_for_a_revision_that_the_clone_lacks(tmp_path: Path) -> None:
    clone = make_sources(tmp_path / "a clone")
    revision = commit(clone)
    with pytest.raises(NotInClone, match=f"revision {'de' * 20} is missing in {clone}") as told:
        from_revision(clone, "de" * 20)("papaya/__init__.py")
    assert told.value.hint.startswith(f"git -C '{clone}' fetch")
    for path in ("papaya/no.py", "papaya/tsa"):
        with pytest.raises(OperatorError, match=f"no file {path} of revision {revision}") as other:
            from_revision(clone, revision)(path)
        assert "fetch" not in other.value.hint
    (clone / ".git/HEAD").unlink()
    with pytest.raises(OperatorError, match=r"git cannot read .*fatal: not a git repo"):
        from_revision(clone, revision)("papaya/__init__.py")


def test_objects_that_replace_others_are_not_read(tmp_path: Path) -> None:
    """With `git replace`, a revision would have other files than everywhere else."""
    clone = make_sources(tmp_path / "clone")
    published = commit(clone)
    make_sources(clone, "altered\n")
    altered = commit(clone)
    subprocess.run(["git", "-C", str(clone), "replace", published, altered], check=True)
    assert from_revision(clone, published)(SOURCES[0]) == b"pass\n"


def test_a_source_that_is_no_clone_is_told(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"git cannot use .*: fatal: not a git") as told:
        run("measure", "--source", str(tmp_path), "--revision", "HEAD")
    assert "--source CLONE" in told.value.hint


def test_a_short_revision_that_two_objects_have_is_told(tmp_path: Path) -> None:
    clone = make_sources(tmp_path / "clone")
    for text in ("142", "784"):  # the SHA-1 of both blobs begins with 8324
        (clone / text).write_text(text)
    commit(clone)
    with pytest.raises(NotInClone, match="revision 8324 is ambiguous in") as told:
        from_revision(clone, "8324")("papaya/__init__.py")
    assert "all digits" in told.value.hint


@pytest.mark.parametrize("path", [LOCK, SOURCES[0]])
def test_a_long_source_is_refused_before_it_is_read(tmp_path: Path, path: str) -> None:
    clone = make_sources(tmp_path / "clone")
    with (clone / path).open("r+b") as file:
        file.truncate(max_bytes(path))
    longest = from_revision(clone, commit(clone)), from_folder(clone)
    assert [len(read(path)) for read in longest] == [max_bytes(path)] * 2
    os.truncate(clone / path, 40_000_000)
    too_long = from_revision(clone, commit(clone)), from_folder(clone)
    tracemalloc.start()
    try:
        for read in too_long:
            with pytest.raises(OperatorError, match=f"is longer than {max_bytes(path)} bytes"):
                read(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_source_that_is_a_device_is_refused(tmp_path: Path) -> None:
    """A clone may contain a link to a device, and an audit reads the files that are checked out."""
    sources = make_sources(tmp_path / "sources")
    (sources / LOCK).unlink()
    (sources / LOCK).symlink_to("/dev/zero")
    with pytest.raises(OperatorError, match="not a regular file"):
        run("measure", "--source", str(sources))


@pytest.mark.parametrize("platform", ["sgx", "tdx"])
def test_a_tsa_without_its_platform_does_not_start(platform: Literal["sgx", "tdx"]) -> None:
    """No device would believe it; found out at the first task it would be a riddle."""
    options = ServeOptions(platform=platform, listen="tcp:127.0.0.1:0")
    with pytest.raises(OperatorError, match=f"no {platform} evidence here") as caught:
        run_tsa(options)
    assert "docs/deploy-tsa.md" in caught.value.hint
