"""`papaya log` and `papaya audit`: from a key to an audited log, and what each refuses."""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import ssl
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from papaya.cli import audit, tsa
from papaya.cli.log import log
from papaya.cli.log.source import LogRefused, LogUnreachable
from papaya.cli.tsa import NoGit, from_folder
from papaya.errors import OperatorError, ProtocolError
from papaya.server.public_log import own_record
from papaya.tsa.measurement import LOCK, EnclaveLock, measure
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.note import SignerKey
from papaya.verifiable_log.record import NO_REVISION, Record
from tests.system.tls import make_certificates
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
from tests.unit.verifiable_log.hosts import serving

REPOSITORY = "https://example.org/papaya"


class World:
    """One log, one witness, one clone with a release."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self.clone = make_sources(folder / "clone")
        self.revision = commit(self.clone)
        self.artifact = measure(from_folder(self.clone)).hex()
        self.wheels = make_wheels(folder / "wheels")
        self.log = folder / "log"
        self.key = folder / "log.key"
        self.log_key = self.out("log", "key", "--name", "example.org/log", "--output", self.key)
        self.out("log", "create", "--log", self.log, "--key", self.key)

    def out(self, *arguments: object) -> str:
        parser = argparse.ArgumentParser()
        commands = parser.add_subparsers()
        log.add_to(commands)
        audit.add_to(commands)
        options = parser.parse_args([str(argument) for argument in arguments])
        try:
            assert options.run(options) == 0
        finally:
            self.captured = self._capsys.readouterr()
        return self.captured.out.strip()

    def append(self, *more: object) -> str:
        options = ["--repository", REPOSITORY, "--revision", self.revision, "--software"]
        where = ["--log", self.log, "--key", self.key, "--source", self.clone]
        return self.out("log", "append", *where, *options, *more)

    def read(self, action: str, *more: object) -> Any:
        words = [action] if action == "audit" else ["log", action]
        text = self.out(*words, self.log, "--log-key", self.log_key, *more, "--format", "json")
        return msgspec.json.decode(text)


@pytest.fixture
def world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> World:
    return World(tmp_path, capsys)


def test_the_head_of_an_audit_trail_is_anchored(world: World) -> None:
    """Beside releases: a log with an anchor is still verified as a whole."""
    world.append()
    head = f"17:{'ab' * 32}"
    where = ("--log", world.log, "--key", world.key)
    told = world.out("log", "anchor", *where, "--head", head)
    assert told == f"record 1: head {head} of an audit trail"
    assert world.read("show")["records"][1] == {"index": 1, "audit trail": head}
    assert world.read("verify")["records"] == 2
    for wrong in ("17", f"0:{'ab' * 32}", f"17:{'AB' * 32}", "x:y"):
        with pytest.raises(OperatorError, match="an anchor needs"):
            world.out("log", "anchor", *where, "--head", wrong)


def test_a_release_is_appended_shown_and_verified(world: World) -> None:
    assert world.append() == f"record 0: {world.artifact}"
    shown = world.read("show")
    [record] = shown["records"]
    assert record["artifact"] == record["software mrenclave"] == world.artifact
    assert record["revision"] == world.revision
    assert world.read("verify")["checkpoint"] == shown["checkpoint"]
    assert "no --witness was given" in world.captured.err


def test_measurements_of_hardware_are_recorded(world: World) -> None:
    registers = ("mrtd", "rtmr0", "rtmr1", "rtmr2", "rtmr3")
    tdx = ",".join(f"{name}={'cd' * 48}" for name in registers)
    world.append("--sgx", "ab" * 32, "--tdx", tdx)
    [record] = world.read("show")["records"]
    assert record["sgx mrenclave"] == "ab" * 32
    assert [record[f"tdx {name}"] for name in registers] == ["cd" * 48] * 5


@pytest.mark.parametrize("wrong", [["--sgx", "nonsense"], ["--tdx", "mrtd=ab"]])
def test_a_record_that_says_too_little_is_not_appended(world: World, wrong: list[str]) -> None:
    with pytest.raises(OperatorError):
        world.append(*wrong)
    assert world.read("verify")["records"] == 0


def test_the_private_key_is_its_owners_alone(world: World) -> None:
    assert world.key.stat().st_mode & 0o777 == 0o600
    assert not [path for path in world.log.rglob("*") if "PRIVATE" in path.read_text()]


def test_a_key_may_be_given_as_a_file(world: World) -> None:
    public = world.folder / "log.key.pub"
    world.out("log", "verify", world.log, "--log-key", public)


def test_a_witness_signs_and_its_signature_is_demanded(world: World) -> None:
    world.append()
    witness = world.folder / "witness.key"
    key = world.out("log", "key", "--witness", "--name", "witness", "--output", witness)
    seen = world.folder / "seen"
    reading = [world.log, "--log-key", world.log_key, "--remember", seen]
    with pytest.raises(LogRefused, match="only 0 valid cosignatures"):
        world.read("verify", "--witness", key)
    line = world.out("log", "cosign", *reading, "--key", witness)
    where = ["--log", world.log, "--key", world.key]
    world.out("log", "add-cosignature", *where, "--witness", key, "--line", line)
    assert world.read("verify", "--witness", key)["records"] == 1
    world.append()
    with pytest.raises(LogRefused, match="only 0 valid cosignatures"):
        world.read("verify", "--witness", key)


def test_a_witness_does_not_sign_a_fork(world: World) -> None:
    world.append()
    witness, seen = world.folder / "witness.key", world.folder / "seen"
    world.out("log", "key", "--witness", "--name", "witness", "--output", witness)
    cosign = ["cosign", world.log, "--log-key", world.log_key, "--key", witness]
    with pytest.raises(OperatorError, match="must remember"):
        world.out("log", *cosign)
    world.out("log", *cosign, "--remember", seen)
    world.log.rename(world.folder / "gone")
    world.out("log", "create", "--log", world.log, "--key", world.key)
    LogFolder(world.log).append([b"another past"], SignerKey.parse(world.key.read_text()))
    with pytest.raises(LogRefused, match="does not extend"):
        world.out("log", *cosign, "--remember", seen)
    assert world.captured.out == ""


def test_verify_remembers_and_refuses_a_roll_back(world: World) -> None:
    seen = world.folder / "seen"
    world.append()
    world.read("verify", "--remember", seen)
    world.append()
    world.read("verify", "--remember", seen)
    assert seen.read_bytes() == (world.log / "checkpoint").read_bytes()
    world.log.rename(world.folder / "gone")
    world.out("log", "create", "--log", world.log, "--key", world.key)
    before = seen.read_bytes()
    with pytest.raises(LogRefused, match="0 entries now, but had 2"):
        world.read("verify", "--remember", seen)
    assert seen.read_bytes() == before


def test_verify_refuses_an_entry_that_is_no_record(world: World) -> None:
    LogFolder(world.log).append([b"\x1b[2Jhidden"], SignerKey.parse(world.key.read_text()))
    with pytest.raises(LogRefused, match="record 0: the record is not JSON"):
        world.read("verify")
    assert "\x1b" not in world.out("log", "show", world.log, "--log-key", world.log_key)


def test_a_log_that_is_not_there_is_told(world: World) -> None:
    with pytest.raises(OperatorError, match="there is no log"):
        world.out("log", "show", world.folder / "typo", "--log-key", world.log_key)
    with pytest.raises(OperatorError, match="neither a public key"):
        world.out("log", "show", world.log, "--log-key", "typo")


def test_mistakes_of_the_log_s_own_operator_are_no_reason_to_distrust_it(world: World) -> None:
    empty = world.folder / "empty"
    empty.mkdir()
    other = world.folder / "other.key"
    world.out("log", "key", "--name", "example.org/other", "--output", other)
    record = ["--repository", REPOSITORY, "--revision", world.revision, "--software"]
    source = ["--source", world.clone]
    for command, problem, hint in (
        (("create", "--log", world.log, "--key", world.key), "already contains a log", "append"),
        (("append", "--log", empty, "--key", world.key, *record, *source), "no log", "log create"),
        (("append", "--log", world.log, "--key", other, *record, *source), "known key", "--key"),
    ):
        with pytest.raises(OperatorError, match=problem) as caught:
            world.out("log", *command)
        assert hint in caught.value.hint
        assert "trust" not in caught.value.hint


def test_a_log_behind_a_private_authority_is_read(world: World) -> None:
    made = make_certificates(world.folder / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    world.append()
    with serving(world.log, context) as address:
        read = ["verify", address, "--log-key", world.log_key]
        with pytest.raises(OperatorError, match="certificate"):
            world.out("log", *read)
        assert "1 record" in world.out("log", *read, "--ca", made.authority)


# --- papaya audit


def outcomes(steps: list[dict[str, Any]]) -> dict[str, str]:
    return {step["name"]: step["outcome"] for step in steps}


def test_a_log_that_cannot_be_read_is_no_reason_to_distrust_it(world: World) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # reserved, and nobody listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        for command in (("log", "verify"), ("audit",)):
            with pytest.raises(LogUnreachable, match="cannot read") as caught:
                world.out(*command, url, "--log-key", world.log_key)
            assert "the log itself was not checked" in caught.value.hint
            assert caught.value.exit_code == 2
    assert "checkpoint  not done" in world.captured.out


def test_a_folder_without_a_log_is_told_from_a_log_that_lies(world: World) -> None:
    (world.folder / "empty").mkdir()
    with pytest.raises(LogUnreachable) as caught:
        world.out("log", "show", world.folder / "empty", "--log-key", world.log_key)
    assert "check the address" in caught.value.hint


def test_a_wrong_address_accuses_nobody_even_if_the_log_was_seen_before(world: World) -> None:
    world.append()
    seen = world.folder / "seen"
    world.read("verify", "--remember", seen)
    with serving(world.log) as address:
        for command in (("log", "verify"), ("audit",), ("audit", "--remember", seen)):
            with pytest.raises(LogUnreachable, match="/logs/checkpoint does not exist") as caught:
                world.out(*command, f"{address}/logs", "--log-key", world.log_key)
            assert caught.value.exit_code == 2
            assert "check the address" in caught.value.hint
            assert "trust" not in caught.value.hint
    assert "the remembered one has size 1" in world.captured.out


def test_an_audit_with_the_key_of_another_log_says_to_check_the_key(world: World) -> None:
    world.append()
    other = world.out("log", "key", "--name", "example.org/log", "--output", world.folder / "other")
    with pytest.raises(ProtocolError, match="1 step of the audit failed") as caught:
        world.out("audit", world.log, "--log-key", other)
    assert caught.value.hint.startswith("check --log-key; if it still fails, do not ")
    for key in (world.log_key, other):
        assert key.split("+")[1] in world.captured.out
    with pytest.raises(LogRefused, match="no known key has signed") as caught:
        world.out("log", "verify", world.log, "--log-key", other)
    assert caught.value.hint.startswith("check --log-key; if it still fails, do not trust ")


def test_a_key_that_has_verified_a_remembered_checkpoint_is_not_doubted(world: World) -> None:
    world.append()
    reading = ["--log-key", world.log_key, "--remember", world.folder / "seen"]
    world.out("log", "verify", world.log, *reading)
    other, key = world.folder / "another", world.folder / "another.key"
    world.out("log", "key", "--name", "example.org/log", "--output", key)
    world.out("log", "create", "--log", other, "--key", key)
    with pytest.raises(ProtocolError, match="1 step of the audit failed") as caught:
        world.out("audit", other, *reading)
    assert caught.value.hint.startswith("check the address of the log; if it still fails, ")


def test_a_failed_checkpoint_with_the_log_s_signature_is_blamed_on_the_log(world: World) -> None:
    """The key is right, so the hint must not be to check --log-key."""
    world.append()
    seen, witness = world.folder / "seen", world.folder / "witness.key"
    world.read("verify", "--remember", seen)
    cosigner = world.out("log", "key", "--witness", "--name", "witness", "--output", witness)

    def hint_of(*options: object) -> str:
        with pytest.raises(ProtocolError, match="1 step of the audit failed") as caught:
            world.out("audit", world.log, "--log-key", world.log_key, *options)
        assert "checkpoint  failed" in world.captured.out
        return caught.value.hint

    accusation = "do not trust this log, and publish what you found"
    # The witness may not have signed yet, and a web server may answer with a page of its own.
    assert hint_of("--witness", cosigner).startswith("check --witness, --quorum, --max-age and ")
    checkpoint = world.log / "checkpoint"
    signed = checkpoint.read_bytes()
    checkpoint.write_bytes(signed.replace(b"\n1\n", b"\n2\n"))
    assert hint_of() == accusation
    checkpoint.write_bytes(b"<html>Log in</html>\n")
    assert hint_of().startswith("check the address of the log; if it still fails, do not ")
    checkpoint.write_bytes(signed)
    world.log.rename(world.folder / "gone")
    world.out("log", "create", "--log", world.log, "--key", world.key)
    LogFolder(world.log).append([b"another past"], SignerKey.parse(world.key.read_text()))
    assert hint_of("--remember", seen) == accusation
    assert "does not extend" in world.captured.out


def test_an_audit_with_a_wrong_key_and_the_right_witness_says_to_check_the_key(
    world: World,
) -> None:
    world.append()
    witness = world.folder / "witness.key"
    cosigner = world.out("log", "key", "--witness", "--name", "witness", "--output", witness)
    reading = [world.log, "--log-key", world.log_key, "--remember", world.folder / "seen"]
    line = world.out("log", "cosign", *reading, "--key", witness)
    where = ["--log", world.log, "--key", world.key]
    world.out("log", "add-cosignature", *where, "--witness", cosigner, "--line", line)
    other = world.out("log", "key", "--name", "example.org/log", "--output", world.folder / "other")
    with pytest.raises(ProtocolError, match="1 step of the audit failed") as caught:
        world.out("audit", world.log, "--log-key", other, "--witness", cosigner)
    assert caught.value.hint.startswith("check --log-key; if it still fails, do not ")
    for key in (world.log_key, other):
        assert key.split("+")[1] in world.captured.out


def test_a_public_key_s_file_that_is_not_there_is_told(world: World) -> None:
    with pytest.raises(OperatorError, match=r"'no\.pub' is neither .*: there is no such file"):
        world.out("log", "show", world.log, "--log-key", "no.pub")
    world.folder.joinpath("not.pub").write_text("no key\n")
    for wrong in (world.folder / "not.pub", world.log_key[:-20]):
        with pytest.raises(OperatorError, match="is neither a public key nor a file") as caught:
            world.out("log", "show", world.log, "--log-key", wrong)
        assert "no such file" not in str(caught.value)


def test_a_key_is_never_replaced(world: World) -> None:
    before = world.key.read_bytes()
    with pytest.raises(OperatorError, match="keys are not overwritten"):
        world.out("log", "key", "--name", "example.org/log", "--output", world.key)
    assert world.key.read_bytes() == before


def test_a_revision_must_be_a_full_id_and_how_to_get_it_is_told(world: World) -> None:
    with pytest.raises(OperatorError, match="full id") as caught:
        world.append("--revision", "HEAD")
    assert "git rev-parse HEAD" in caught.value.hint


def test_an_audit_rebuilds_every_release_of_a_clone(world: World) -> None:
    world.append("--sgx", "ab" * 32)
    make_sources(world.clone, "the next release\n")
    world.revision = commit(world.clone)
    world.append()
    clone = ["--source", world.clone, "--wheels", world.wheels]
    steps = world.read("audit", *clone, *skipping("witnesses", "consistency", "measurement"))
    rebuilt = [(s["index"], s["outcome"]) for s in steps if s["name"] == "rebuild"]
    assert rebuilt == [(0, "passed"), (1, "passed")]
    assert outcomes(steps) == {
        "checkpoint": "passed",
        "witnesses": "not done",
        "consistency": "not done",
        "entries": "passed",
        "record": "passed",
        "rebuild": "passed",
        "dependencies": "passed",
        "measurement": "not done",
    }
    assert "no step failed; 3 steps skipped" in world.captured.err
    assert "not checked: measurement; you trust that the logged" in world.captured.err


def test_a_measurement_is_compared_or_the_audit_is_not_complete(world: World) -> None:
    """Before, an audit exited with 0 although no measurement had been compared."""
    world.append("--sgx", "ab" * 32)
    clone = ["--source", world.clone, "--wheels", world.wheels]
    rest = skipping("witnesses", "consistency")
    with pytest.raises(audit.NotChecked, match=r"did not check: measurement\n") as caught:
        world.read("audit", *clone, *rest)
    assert caught.value.exit_code == 4
    assert caught.value.hint.endswith("--skip measurement")
    steps = world.read("audit", *clone, *rest, "--measured", f"0:sgx.mrenclave={'ab' * 32}")
    assert outcomes(steps)["measurement"] == "passed"
    with pytest.raises(ProtocolError, match="1 step of the audit failed"):
        world.read("audit", *clone, *rest, "--measured", f"0:sgx.mrenclave={'cd' * 32}")
    with pytest.raises(OperatorError, match=r"is not RECORD:PLATFORM\.FIELD=HEX"):
        world.read("audit", *clone, "--measured", "sgx=AB")
    for second in ("cd", "ab"):
        twice = [f"--measured=0:sgx.mrenclave={value * 32}" for value in ("ab", second)]
        with pytest.raises(OperatorError, match=r"sgx\.mrenclave of record 0 was given twice"):
            world.read("audit", *clone, *twice)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("0:sgx.mrenclave=00", "sgx.mrenclave has 64 hexadecimal digits, not 2"),
        (f"0:tdx.mrtd={'ab' * 32}", "tdx.mrtd has 96 hexadecimal digits, not 64"),
        (f"0:sgx.mrtd={'ab' * 48}", "unknown hardware measurement: sgx.mrtd"),
        (f"0:software.mrenclave={'ab' * 32}", "unknown hardware measurement: software.mrenclave"),
        (f"0:sev.measurement={'ab' * 48}", "unknown hardware measurement: sev.measurement"),
    ],
)
def test_a_measurement_that_no_record_can_have_is_a_mistake_of_the_auditor(
    world: World, given: str, problem: str
) -> None:
    world.append("--sgx", "ab" * 32)
    with pytest.raises(OperatorError, match=problem) as caught:
        world.read("audit", "--measured", given)
    assert caught.value.exit_code == 2
    assert world.captured.out == ""


@pytest.mark.parametrize(
    "given", [f"1:sgx.mrenclave={'ab' * 32}", f"0:tdx.mrtd={'ab' * 48}"], ids=["record", "platform"]
)
def test_a_measurement_that_no_record_has_is_a_mistake_of_the_auditor(
    world: World, given: str
) -> None:
    """Before, it was ignored, and the auditor could think that it had been compared."""
    world.append("--sgx", "ab" * 32)
    name = given.partition("=")[0]
    index, _, field = name.partition(":")
    everything = skipping("witnesses", "consistency", *BUILT, "measurement")
    with pytest.raises(OperatorError, match=f"record {index} has no {field}: nothing") as caught:
        world.read("audit", "--measured", given, *everything)
    assert caught.value.exit_code == 2
    steps = msgspec.json.decode(world.captured.out)
    assert (steps[-1]["name"], steps[-1]["outcome"]) == ("unused measurement", "not done")


def test_a_folder_that_is_not_there_is_a_mistake_of_the_auditor(world: World) -> None:
    world.append()
    empty = world.folder / "empty"
    empty.mkdir()
    unreadable = world.folder / "unreadable"  # as if the clone belonged to another user
    (unreadable / ".git").mkdir(parents=True)
    for options, problem in (
        (("--source", unreadable), "git cannot use .*unreadable: fatal: not a git repository"),
        (("--source", world.folder / "typo"), "--source .*typo: there is no such folder"),
        (("--source", world.key), "--source .*log.key: there is no such folder"),
        (("--source", empty), "neither a git clone nor a folder with the sources"),
        (("--wheels", world.folder / "typo"), "--wheels .*typo: there is no such folder"),
    ):
        with pytest.raises(OperatorError, match=problem) as caught:
            world.read("audit", *options, *skipping("witnesses", "consistency", *BUILT))
        assert caught.value.exit_code == 2
        assert world.captured.out == ""


BUILT = ("rebuild", "dependencies")  # what needs the sources


def skipping(*steps: str) -> list[str]:
    return [word for step in steps for word in ("--skip", step)]


def append_another_binary(world: World) -> None:
    """A good record 0, and a record 1 whose source gives another artifact."""
    make_sources(world.clone, "what was published\n")
    published = commit(world.clone)
    make_sources(world.clone, "what was run\n")
    world.revision = commit(world.clone)
    # The record names the published revision, and the hash of what was run.
    key = SignerKey.parse(world.key.read_text())
    world.append()
    entry = LogFolder(world.log).fetch("tile/entries/000.p/1")[2:]
    LogFolder(world.log).append([entry.replace(world.revision.encode(), published.encode())], key)


def test_an_audit_finds_a_binary_that_the_source_does_not_give(world: World) -> None:
    append_another_binary(world)
    with pytest.raises(ProtocolError, match="1 step of the audit failed"):
        world.read("audit", "--source", world.clone, "--wheels", world.wheels)
    steps = msgspec.json.decode(world.captured.out)
    assert [(s["name"], s["index"]) for s in steps if s["outcome"] == "failed"] == [("rebuild", 1)]


def test_an_audit_without_the_source_says_so(world: World) -> None:
    world.append()
    with pytest.raises(audit.NotChecked, match=r"did not check: .*rebuild") as caught:
        world.read("audit")
    assert caught.value.exit_code == 4
    steps = msgspec.json.decode(world.captured.out)
    [step] = [step for step in steps if step["name"] == "rebuild"]
    assert step["outcome"] == "not done"
    assert world.revision in step["detail"]
    assert world.read("audit", *skipping("witnesses", "consistency", *BUILT)) == steps


def test_dependencies_that_were_not_checked_must_be_named(world: World) -> None:
    """Before, an audit exited with 0 if only `rebuild` was skipped, and did not mention them."""
    world.append()
    with pytest.raises(audit.NotChecked, match=r"did not check: dependencies\n") as caught:
        world.read("audit", *skipping("witnesses", "consistency", "rebuild"))
    assert caught.value.hint.endswith("--skip dependencies")
    assert outcomes(msgspec.json.decode(world.captured.out))["dependencies"] == "not done"
    world.read("audit", *skipping("witnesses", "consistency", *BUILT))
    assert "not checked: dependencies; you trust that the dep" in world.captured.err


@pytest.mark.parametrize("allowed", [(), ("--skip", "rebuild")])
def test_an_audit_fails_for_a_revision_that_the_clone_does_not_have(
    world: World, allowed: tuple[str, ...]
) -> None:
    """A log that nobody can rebuild: the record's source is nowhere."""
    world.append()
    entry = LogFolder(world.log).fetch("tile/entries/000.p/1")[2:]
    nowhere = entry.replace(world.revision.encode(), b"de" * 20)
    LogFolder(world.log).append([nowhere], SignerKey.parse(world.key.read_text()))
    with pytest.raises(ProtocolError, match="1 step of the audit failed") as caught:
        world.read("audit", "--source", world.clone, "--wheels", world.wheels, *allowed)
    steps = msgspec.json.decode(world.captured.out)
    [failed] = [step for step in steps if step["outcome"] == "failed"]
    assert (failed["name"], failed["index"]) == ("rebuild", 1)
    assert "run git fetch" in failed["check_first"]
    assert caught.value.hint.startswith(f"{failed['check_first']}; if it still fails, ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('python = "3.11"', f"python = 0x{'f' * 5_000}"),
        ('python = "3.11"', f"python.{'a.' * 1_200}a = 1"),
        # Longer than an argument of a program can be: git cannot be asked for it.
        ('"papaya/__init__.py"', f'"papaya/{"a" * 200_000}.py"'),
    ],
    ids=["hexadecimal", "dotted", "path"],
)
def test_an_audit_fails_for_a_revision_whose_lock_is_made_to_stop_it(
    world: World, old: str, new: str
) -> None:
    world.append()
    lock = world.clone / LOCK
    lock.write_text(lock.read_text().replace(old, new))
    published = commit(world.clone)
    entry = LogFolder(world.log).fetch("tile/entries/000.p/1")[2:]
    changed = entry.replace(world.revision.encode(), published.encode())
    LogFolder(world.log).append([changed], SignerKey.parse(world.key.read_text()))
    options = ["--source", world.clone, "--wheels", world.wheels, *skipping("rebuild")]
    with pytest.raises(ProtocolError, match="1 step of the audit failed"):
        world.read("audit", *options)
    steps = msgspec.json.decode(world.captured.out)
    [failed] = [step for step in steps if step["outcome"] == "failed"]
    assert (failed["name"], failed["index"]) == ("rebuild", 1)
    assert failed["check_first"] == "run git fsck in the clone"
    assert steps[-1]["name"] == "dependencies"


@pytest.mark.parametrize("path", [LOCK, SOURCES[0]])
def test_an_audit_fails_for_a_revision_with_a_source_that_fills_the_memory(
    world: World, path: str
) -> None:
    world.append()
    with (world.clone / path).open("ab") as file:
        file.truncate(20_000_000)
    published = commit(world.clone)
    entry = LogFolder(world.log).fetch("tile/entries/000.p/1")[2:]
    changed = entry.replace(world.revision.encode(), published.encode())
    LogFolder(world.log).append([changed], SignerKey.parse(world.key.read_text()))
    with pytest.raises(ProtocolError, match="1 step of the audit failed"):
        world.read("audit", "--source", world.clone, "--wheels", world.wheels)
    [failed] = [s for s in msgspec.json.decode(world.captured.out) if s["outcome"] == "failed"]
    assert (failed["name"], failed["index"]) == ("rebuild", 1)
    assert f"{path} of revision {published} is longer than" in failed["detail"]


def test_a_machine_without_git_says_nothing_about_a_revision(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.append()
    monkeypatch.setenv("PATH", str(world.folder / "no-programs"))
    with pytest.raises(audit.NotChecked):
        world.read("audit", "--source", world.clone, "--wheels", world.wheels)
    assert "cannot run git" in world.captured.out


def test_a_log_that_failed_an_audit_must_be_continued_all_the_same(world: World) -> None:
    """What was seen is evidence: the same past has to be there when the audit is repeated."""
    seen = world.folder / "seen"
    LogFolder(world.log).append([b"no record"], SignerKey.parse(world.key.read_text()))
    with pytest.raises(ProtocolError, match="1 step of the audit failed"):
        world.read("audit", "--remember", seen)
    assert seen.read_bytes() == (world.log / "checkpoint").read_bytes()


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint\n"])
def test_a_damaged_memory_is_told_and_not_replaced(world: World, damage: bytes) -> None:
    seen = world.folder / "seen"
    seen.write_bytes(damage)
    with pytest.raises(OperatorError, match="not a checkpoint of this log"):
        world.read("verify", "--remember", seen)
    assert seen.read_bytes() == damage


def test_a_memory_that_cannot_be_written_is_told(world: World) -> None:
    with pytest.raises(OperatorError, match="No such file") as caught:
        world.read("verify", "--remember", world.folder / "nowhere" / "seen")
    assert "--remember" in caught.value.hint


def rebuild_of(world: World, *options: object) -> tuple[str, str]:
    with pytest.raises(audit.NotChecked):
        world.read("audit", *options)
    steps = msgspec.json.decode(world.captured.out)
    [step] = [step for step in steps if step["name"] == "rebuild"]
    return step["outcome"], step["detail"]


def test_sources_without_a_revision_show_nothing_about_the_recorded_one(world: World) -> None:
    """The same artifact from somewhere else: the revision may not even exist."""
    world.append()
    plain = make_sources(world.folder / "plain")
    outcome, detail = rebuild_of(world, "--source", plain, "--wheels", world.wheels)
    assert outcome == "not done"
    assert f"plain gives the same artifact, but revision {world.revision} was not checked" in detail
    make_sources(plain, "another release\n")
    outcome, detail = rebuild_of(world, "--source", plain, "--wheels", world.wheels)
    assert outcome == "not done"
    assert "gives another artifact" in detail


def test_a_revision_that_was_not_measured_is_a_claim_when_logged_and_when_audited(
    world: World,
) -> None:
    where = ["--log", world.log, "--key", world.key, "--repository", REPOSITORY]
    world.out("log", "append", *where, "--revision", "de" * 20, "--software")
    assert f"it was not verified to be revision {'de' * 20}" in world.captured.err
    outcome, detail = rebuild_of(world)
    assert outcome == "not done"
    assert f"this installation gives the same artifact, but revision {'de' * 20} was not" in detail
    world.append()
    assert "not verified" not in world.captured.err


def test_the_log_of_a_demonstration_names_no_revision_and_has_not_failed(world: World) -> None:
    """As the server writes it: there is no commit that a clone could lack."""
    own_record(world.folder, bytes.fromhex(world.artifact))
    for options, where in (
        ((), "this installation gives another artifact"),
        (("--source", world.clone, "--wheels", world.wheels), "clone gives the same artifact"),
    ):
        outcome, detail = rebuild_of(world, *options)
        assert outcome == "not done"
        assert f"{where}, but the record names no revision" in detail
        world.read("audit", *options, *skipping("witnesses", "consistency", *BUILT))


def test_a_release_for_hardware_must_name_a_revision(world: World) -> None:
    measured = {"software": {"mrenclave": world.artifact}, "sgx": {"mrenclave": "ab" * 32}}
    record = Record(world.artifact, measured, REPOSITORY, NO_REVISION, "build")
    LogFolder(world.log).append([record.encode()], SignerKey.parse(world.key.read_text()))
    with pytest.raises(ProtocolError, match="1 step of the audit failed"):
        world.read("audit", "--source", world.clone, "--wheels", world.wheels)


def test_a_record_for_software_is_called_insecure(world: World) -> None:
    """Its evidence proves nothing, whatever the audit finds."""
    world.append("--sgx", "ab" * 32)
    head = ("--head", f"17:{'ab' * 32}")
    world.out("log", "anchor", "--log", world.log, "--key", world.key, *head)
    skipped = skipping("witnesses", "consistency", *BUILT, "measurement")
    steps = world.read("audit", *skipped)
    assert [(s["name"], s["index"]) for s in steps if s["insecure"]] == [("record", 0)]
    assert "INSECURE: 1 record for software evidence (index 0): anyone" in world.captured.err
    text = world.out("audit", world.log, "--log-key", world.log_key, *skipped)
    [line] = [line for line in text.splitlines() if "INSECURE" in line]
    assert line.startswith("record 0  record")


def test_a_record_for_hardware_only_is_not_called_insecure(world: World) -> None:
    record = Record(
        world.artifact, {"sgx": {"mrenclave": "ab" * 32}}, REPOSITORY, world.revision, "build"
    )
    LogFolder(world.log).append([record.encode()], SignerKey.parse(world.key.read_text()))
    steps = world.read("audit", *skipping("witnesses", "consistency", *BUILT, "measurement"))
    assert not [step for step in steps if step["insecure"]]
    assert "INSECURE" not in world.captured.out + world.captured.err


def test_an_audit_without_dependencies_says_so(world: World) -> None:
    world.append()
    (world.folder / "empty").mkdir()
    options = ["--source", world.clone, "--wheels", world.folder / "empty"]
    skipped = skipping("witnesses", "consistency", "dependencies")
    steps = world.read("audit", *options, *skipped)
    assert outcomes(steps)["rebuild"] == "passed"
    assert outcomes(steps)["dependencies"] == "not done"


@pytest.mark.parametrize("allowed", [(), ("--skip", "dependencies")])
def test_an_audit_fails_for_a_wheel_with_another_hash_and_prints_every_step(
    world: World, allowed: tuple[str, ...]
) -> None:
    """The operator of the log chooses the hash in the lock: that of a wheel with a trojan must not
    hide what failed in other records.
    """
    append_another_binary(world)
    (world.wheels / WHEEL).write_bytes(b"not the wheel in the lock")
    with pytest.raises(ProtocolError, match="3 steps of the audit failed") as caught:
        world.read("audit", "--source", world.clone, "--wheels", world.wheels, *allowed)
    assert caught.value.exit_code == 3
    checks = "download the wheels again and run git fsck in the clone; if it still fails, do not "
    assert caught.value.hint.startswith(checks)
    steps = msgspec.json.decode(world.captured.out)
    assert [(step["index"], step["name"], step["outcome"]) for step in steps] == [
        (None, "checkpoint", "passed"),
        (None, "witnesses", "not done"),
        (None, "consistency", "not done"),
        (None, "entries", "passed"),
        (0, "record", "passed"),
        (0, "rebuild", "passed"),
        (0, "dependencies", "failed"),
        (1, "record", "passed"),
        (1, "rebuild", "failed"),
        (1, "dependencies", "failed"),
    ]
    assert f"{WHEEL} does not have the SHA-256" in steps[-1]["detail"]
    assert "download it again" in steps[-1]["detail"]


@pytest.mark.parametrize("allowed", [(), ("--skip", "dependencies")])
def test_an_audit_fails_if_pip_downloads_a_wheel_with_another_hash(
    world: World, monkeypatch: pytest.MonkeyPatch, allowed: tuple[str, ...]
) -> None:
    """Whatever an auditor skips: a wrong wheel is not a missing one."""
    world.append()
    pip = FakePip(world.folder / "pip", monkeypatch, "1d" * 32, "1d" * 32)
    skipped = skipping("witnesses", "consistency")
    with pytest.raises(ProtocolError, match="1 step of the audit failed") as caught:
        world.read("audit", "--source", world.clone, *skipped, *allowed)
    assert caught.value.hint.startswith("download the wheels again; if it still fails, do not ")
    steps = msgspec.json.decode(world.captured.out)
    assert outcomes(steps)["rebuild"] == "passed"
    [failed] = [step for step in steps if step["outcome"] == "failed"]
    assert (failed["name"], failed["index"]) == ("dependencies", 0)
    assert "nosuchthing==1.0 from https://example.org/" in failed["detail"]
    assert f"Got {'1d' * 32}" in failed["detail"]
    assert "\n" not in failed["detail"]
    assert len(pip.calls) == 2


def test_an_audit_fails_for_a_wheel_with_another_hash_after_one_that_no_index_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip stops at the first wheel that it cannot get. So an operator could list a wheel that
    nobody has before the one with a trojan, for auditors who skip the step.
    """
    add_wheel(world.clone, "a0")
    world.revision = commit(world.clone)
    world.append()
    pip = FakePip(world.folder / "pip", monkeypatch, "1d" * 32, "1d" * 32)
    skipped = skipping("witnesses", "consistency", "dependencies")
    with pytest.raises(ProtocolError, match="1 step of the audit failed"):
        world.read("audit", "--source", world.clone, *skipped)
    assert outcomes(msgspec.json.decode(world.captured.out))["dependencies"] == "failed"
    assert pip.calls[0] == "a0==1.0"


@pytest.mark.parametrize("answers", [(), ("1d" * 32, "2d" * 32)], ids=["missing", "interrupted"])
def test_a_wheel_that_pip_cannot_get_is_not_checked(
    world: World, monkeypatch: pytest.MonkeyPatch, answers: tuple[str, ...]
) -> None:
    world.append()
    pip = FakePip(world.folder / "pip", monkeypatch, *answers)
    options = ["--source", world.clone, *skipping("witnesses", "consistency")]
    with pytest.raises(audit.NotChecked, match=r"did not check: dependencies\n"):
        world.read("audit", *options)
    [step] = [s for s in msgspec.json.decode(world.captured.out) if s["name"] == "dependencies"]
    assert step["outcome"] == "not done"
    assert f"pip could not download {WHEEL}" in step["detail"]
    world.read("audit", *options, "--skip", "dependencies")
    assert len(pip.calls) == (3 if answers else 2)


def test_an_audit_does_not_hold_wheels_in_memory(world: World) -> None:
    """Whoever writes a lock chooses how large its wheels are."""
    large = bytes(50_000_000)
    (world.wheels / WHEEL).write_bytes(large)
    give_wheel(world, hashlib.sha256(large).hexdigest())
    del large
    options = ["--source", world.clone, "--wheels", world.wheels]
    tracemalloc.start()
    try:
        steps = world.read("audit", *options, *skipping("witnesses", "consistency"))
        assert tracemalloc.get_traced_memory()[1] < 30_000_000  # tiles of logs need 16 MiB
    finally:
        tracemalloc.stop()
    assert outcomes(steps)["dependencies"] == "passed"


def test_a_wheel_that_is_a_pipe_is_not_read(world: World) -> None:
    world.append()
    (world.wheels / WHEEL).unlink()
    os.mkfifo(world.wheels / WHEEL)
    options = ["--source", world.clone, "--wheels", world.wheels]
    with pytest.raises(audit.NotChecked, match=r"did not check: dependencies\n"):
        world.read("audit", *options, *skipping("witnesses", "consistency"))
    [step] = [s for s in msgspec.json.decode(world.captured.out) if s["name"] == "dependencies"]
    assert step["detail"] == f"cannot read from {world.wheels}: {WHEEL}: not a regular file"


@pytest.mark.parametrize("source", ["folder", "pip"])
def test_an_audit_fails_for_wheels_that_are_too_large_in_total(
    world: World, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The operator chooses the wheels, so --skip must not hide that they are too large."""
    give_wheel(world, hashlib.sha256(WHEEL_BYTES).hexdigest())
    FakePip(world.folder / "pip", monkeypatch, WHEEL)
    monkeypatch.setattr(tsa, "MAX_WHEELS_BYTES", len(WHEEL_BYTES) - 1)
    options = ["--source", world.clone, *skipping("witnesses", "consistency", "dependencies")]
    if source == "folder":
        options += ["--wheels", world.wheels]
    with pytest.raises(ProtocolError, match="1 step of the audit failed") as caught:
        world.read("audit", *options)
    accusation = "do not trust this log, and publish what you found"
    mistake = "check the files in --wheels; if it still fails, " if source == "folder" else ""
    assert caught.value.hint == f"{mistake}{accusation}"
    [failed] = [s for s in msgspec.json.decode(world.captured.out) if s["outcome"] == "failed"]
    assert failed["name"] == "dependencies"
    assert f"larger than {len(WHEEL_BYTES) - 1} bytes in total" in failed["detail"]


def give_wheel(world: World, digest: str) -> None:
    """Append a release whose lock has this hash for its wheel."""
    lock = world.clone / LOCK
    lock.write_text(f"# a release\n{lock.read_text()}")
    lock.write_text(lock.read_text().replace(hashlib.sha256(WHEEL_BYTES).hexdigest(), digest))
    world.revision = commit(world.clone)
    world.append()


def test_an_audit_goes_on_without_a_temporary_folder(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.append()
    monkeypatch.setattr(tempfile, "tempdir", str(world.folder / "missing"))
    with pytest.raises(audit.NotChecked, match=r"did not check: .*dependencies\n"):
        world.read("audit", "--source", world.clone)
    steps = outcomes(msgspec.json.decode(world.captured.out))
    assert (steps["rebuild"], steps["dependencies"]) == ("passed", "not done")


def test_an_audit_goes_on_if_git_fails_during_a_build(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked_lock(read: object) -> EnclaveLock:
        raise NoGit("cannot run git: too many processes")

    world.append()
    monkeypatch.setattr(audit, "checked_lock", checked_lock)
    with pytest.raises(audit.NotChecked, match=r"did not check: .*dependencies"):
        world.read("audit", "--source", world.clone, "--wheels", world.wheels)
    steps = outcomes(msgspec.json.decode(world.captured.out))
    assert (steps["rebuild"], steps["dependencies"]) == ("passed", "not done")


def test_an_audit_prints_its_steps_for_people(world: World) -> None:
    world.append()
    skipped = skipping("witnesses", "consistency", *BUILT)
    text = world.out("audit", world.log, "--log-key", world.log_key, *skipped)
    assert "log       checkpoint" in text
    assert "record 0  rebuild" in text


def test_a_private_key_given_for_a_public_one_is_never_printed(world: World) -> None:
    secret = world.key.read_text().strip().split("+", 4)[4]  # base64 may contain a "+"
    with pytest.raises(OperatorError, match=r"private key; use the file that ends with \.pub") as e:
        world.out("log", "show", world.log, "--log-key", world.key)
    assert secret not in f"{e.value} {e.value.hint} {e.value.__cause__}"
