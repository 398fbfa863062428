"""An audit names every step, and what it could not do."""

from __future__ import annotations

from pathlib import Path

from papaya.verifiable_log.auditor import AuditStep, Built, CannotBuild, NoSource, audit
from papaya.verifiable_log.checkpoint import LogPolicy
from papaya.verifiable_log.errors import LogSourceUnreachable
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.reader import LogReader
from papaya.verifiable_log.record import Record
from tests.unit.verifiable_log.builders import (
    ARTIFACT,
    KEY,
    NOW,
    POLICY,
    WITNESSES,
    Served,
    a_log,
    a_reader,
    a_record,
)


def audited(
    log: LogFolder, built: str = ARTIFACT, remembered: bytes | None = None
) -> dict[tuple[str, int | None], AuditStep]:
    reader = a_reader(log, remembered)
    steps = audit(reader, POLICY, lambda record: Built(built), NOW)
    return {(step.name, step.index): step for step in steps}


def test_a_log_in_order_passes_and_says_what_was_not_done(tmp_path: Path) -> None:
    steps = audited(a_log(tmp_path, [a_record().encode()]))
    assert {key: step.outcome for key, step in steps.items()} == {
        ("checkpoint", None): "passed",
        ("witnesses", None): "not done",
        ("consistency", None): "not done",
        ("entries", None): "passed",
        ("record", 0): "passed",
        ("rebuild", 0): "passed",
        ("dependencies", 0): "passed",
        ("measurement", 0): "not done",
    }
    assert "sgx" in steps["measurement", 0].detail


def test_a_binary_that_the_source_does_not_give_fails(tmp_path: Path) -> None:
    steps = audited(a_log(tmp_path, [a_record().encode()]), built="00" * 32)
    assert steps["rebuild", 0].outcome == "failed"
    assert ARTIFACT in steps["rebuild", 0].detail
    assert "00" * 32 in steps["rebuild", 0].detail


def test_a_record_that_is_not_one_fails_and_the_others_are_checked(tmp_path: Path) -> None:
    steps = audited(a_log(tmp_path, [b"hidden", a_record().encode()]))
    assert steps["record", 0].outcome == "failed"
    assert ("rebuild", 0) not in steps
    assert steps["rebuild", 1].outcome == "passed"


def test_a_log_that_cannot_be_reached_has_not_failed(tmp_path: Path) -> None:
    log = a_log(tmp_path, [a_record().encode()])

    def fetching(reachable: str) -> LogReader:
        def fetch(path: str) -> bytes:
            if path != reachable:
                raise LogSourceUnreachable(f"{path} cannot be read")
            return log.fetch(path)

        return LogReader(fetch, POLICY)

    for reachable, last in (("nothing", "checkpoint"), ("checkpoint", "entries")):
        steps = list(audit(fetching(reachable), POLICY, lambda record: Built(ARTIFACT), NOW))
        assert (steps[-1].name, steps[-1].outcome) == (last, "not done")
        assert not [step for step in steps if step.outcome == "failed"]


def test_a_missing_checkpoint_is_not_done_but_a_missing_tile_fails(tmp_path: Path) -> None:
    log = a_log(tmp_path, [a_record().encode()])
    seen = a_reader(log)
    seen.refresh(NOW)
    log.append([a_record("ef" * 32).encode()], KEY)
    served = Served(log)
    for removed, outcome in (("checkpoint", "not done"), ("tile/0/000.p/2", "failed")):
        served.removed = {removed}
        reader = LogReader(served.fetch, POLICY, seen.remembered)
        [step] = audit(reader, POLICY, lambda record: Built(ARTIFACT), NOW)
        assert (step.name, step.outcome) == ("checkpoint", outcome)


def test_a_build_that_cannot_be_tried_is_not_done(tmp_path: Path) -> None:
    def cannot(record: Record) -> Built:
        raise CannotBuild(f"no source of {record.revision[:4]}")

    reader = a_reader(a_log(tmp_path, [a_record().encode()]))
    steps = {step.name: step for step in audit(reader, POLICY, cannot, NOW)}
    assert steps["rebuild"].outcome == steps["dependencies"].outcome == "not done"
    assert steps["rebuild"].detail == "no source of 1212"


def test_a_source_that_does_not_have_the_revision_fails(tmp_path: Path) -> None:
    def nowhere(record: Record) -> Built:
        raise NoSource(f"there is no {record.revision[:4]}")

    reader = a_reader(a_log(tmp_path, [a_record().encode()]))
    [step] = [step for step in audit(reader, POLICY, nowhere, NOW) if step.name == "rebuild"]
    assert (step.outcome, step.detail) == ("failed", "there is no 1212")


def test_a_build_without_dependencies_says_so(tmp_path: Path) -> None:
    reader = a_reader(a_log(tmp_path, [a_record().encode()]))
    steps = audit(reader, POLICY, lambda record: Built(ARTIFACT, "no network"), NOW)
    [step] = [step for step in steps if step.name == "dependencies"]
    assert (step.outcome, step.detail) == ("not done", "no network")


def test_a_build_with_a_wrong_dependency_fails(tmp_path: Path) -> None:
    reader = a_reader(a_log(tmp_path, [a_record().encode()]))
    built = Built(ARTIFACT, "no network", wrong_dependency="another hash")
    steps = {step.name: step for step in audit(reader, POLICY, lambda record: built, NOW)}
    assert steps["rebuild"].outcome == "passed"
    found = steps["dependencies"]
    assert (found.outcome, found.detail, found.index) == ("failed", "another hash", 0)


def test_a_log_that_does_not_continue_stops_the_audit(tmp_path: Path) -> None:
    seen = a_reader(a_log(tmp_path / "seen", [b"one", b"two"]))
    seen.refresh(NOW)
    other = a_log(tmp_path / "other", [b"one", b"deux"])
    [step] = audited(other, remembered=seen.remembered).values()
    assert (step.name, step.outcome) == ("checkpoint", "failed")


def test_a_log_that_continues_is_said_to(tmp_path: Path) -> None:
    log = a_log(tmp_path, [a_record().encode()])
    reader = a_reader(log)
    reader.refresh(NOW)
    log.append([a_record("ef" * 32).encode()], KEY)
    steps = audited(log, remembered=reader.remembered)
    assert steps["consistency", None].outcome == "passed"
    assert "size 1" in steps["consistency", None].detail


def test_entries_that_are_withheld_fail_the_audit(tmp_path: Path) -> None:
    log = a_log(tmp_path, [a_record().encode()])
    (tmp_path / "tile/entries/000.p/1").unlink()
    steps = audited(log)
    assert steps["entries", None].outcome == "failed"
    assert ("record", 0) not in steps


def test_witnesses_that_are_named_must_have_signed(tmp_path: Path) -> None:
    log = a_log(tmp_path, [a_record().encode()])
    policy = LogPolicy(KEY.verifier, (WITNESSES[0].verifier,), 1)
    text = a_reader(log).refresh(NOW).text
    line = WITNESSES[0].signature_line(text, NOW)

    def outcomes() -> list[tuple[str, str]]:
        steps = audit(a_reader(log, policy=policy), policy, lambda _: Built(ARTIFACT), NOW)
        return [(step.name, step.outcome) for step in steps]

    assert outcomes() == [("checkpoint", "failed")]
    log.add_cosignature(line, WITNESSES[0].verifier, KEY)
    assert ("witnesses", "passed") in outcomes()
