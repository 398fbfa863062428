"""`papaya owner`: keys, what devices pin of them, and what replaces them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from papaya.bundle.head import BundleHead
from papaya.bundle.owner import OwnerKeys, OwnerPin
from papaya.cli.main import main
from papaya.cli.task.signing import own_manifest, program_files, signer
from papaya.device.owners import parse_owners
from papaya.errors import ConfigError, OperatorError
from tests.unit.bundle.builders import a_manifest


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert main(["owner", *map(str, arguments), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def a_key(capsys: pytest.CaptureFixture[str], folder: Path, name: str = "owner.key") -> Any:
    return run(capsys, "key", "--output", folder / name)


def test_a_key_is_private_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = a_key(capsys, tmp_path)
    path = tmp_path / "owner.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().strip() not in str(made)
    assert run(capsys, "show", "--key", path) == made
    assert main(["owner", "key", "--output", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_key_that_others_can_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_key(capsys, tmp_path)
    (tmp_path / "owner.key").chmod(0o644)
    with pytest.raises(OperatorError, match="readable by other users"):
        signer(tmp_path / "owner.key")


def test_a_successor_signs_for_the_same_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, path = a_key(capsys, tmp_path), tmp_path / "new.key"
    new = run(capsys, "successor", "--key", tmp_path / "owner.key", "--output", path, "--revoke")
    assert (new["owner"], new["key"] != old["key"]) == (old["owner"], True)
    keys = OwnerKeys(OwnerPin(bytes.fromhex(old["key"])), signer(path).statements)
    assert keys.current.hex() == new["key"]


def test_a_lost_key_is_replaced_with_the_recovery_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = a_key(capsys, tmp_path)
    recovery = a_key(capsys, tmp_path, "recovery.key")
    (tmp_path / "owner.key").unlink()
    new = run(
        capsys,
        *("successor", "--key", tmp_path / "owner.key", "--public", old["key"]),
        *("--recovery", tmp_path / "recovery.key", "--output", tmp_path / "new.key"),
    )
    pin = OwnerPin(bytes.fromhex(old["key"]), bytes.fromhex(recovery["key"]))
    keys = OwnerKeys(pin, signer(tmp_path / "new.key").statements)
    assert (keys.current.hex(), keys.recoveries) == (new["key"], 1)


def test_a_successor_continues_what_the_old_key_has_signed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_key(capsys, tmp_path)
    old = signer(tmp_path / "owner.key")
    manifest = a_manifest(owner=old.owner)
    head = BundleHead.decode(old.head(manifest, "run/0/program-0-0"))
    run(capsys, "successor", "--key", tmp_path / "owner.key", "--output", tmp_path / "new.key")
    assert own_manifest(signer(tmp_path / "new.key"), head) == manifest
    a_key(capsys, tmp_path, "stranger.key")
    with pytest.raises(ConfigError, match="signed by another key"):
        own_manifest(signer(tmp_path / "stranger.key"), head)


def test_a_folder_needs_a_task_file(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    with pytest.raises(OperatorError, match=r"has no task\.py"):
        program_files(tmp_path)
    (tmp_path / "task.py").write_text("task = 1")
    assert sorted(program_files(tmp_path)) == ["helper.py", "task.py"]


def test_what_devices_pin_does_not_guess_the_collection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text can be copied, and says what to put in."""
    path = tmp_path / "owner.key"
    assert main(["owner", "key", "--output", str(path)]) == 0
    text = capsys.readouterr().err.partition("FILE`:\n\n")[2]
    assert 'collections = ["COLLECTION"]' in text
    filled = text.replace("COLLECTION", "numbers")
    [policy] = parse_owners(filled.encode(), "owners.toml").values()
    assert policy.collections == ("numbers",)
