"""The auditor of secure aggregation: each rule fires on the smallest thing that breaks it."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from papaya.aggregator.masked_sum import MaskedSum
from papaya.client.work import Seal, Sealed
from papaya.errors import InvariantError
from papaya.learning.kernels import NUMPY
from papaya.learning.parameters import FLOAT32
from papaya.messages.participation import Chunk, Complete, Joined, SecureOffer
from papaya.messages.storage import (
    Member,
    OptimizerRow,
    RecordRow,
    Row,
    optimizer_key,
    record_key,
)
from papaya.secagg.words import WORD
from papaya.sim.protocol_updates import protocol_update, protocol_vector
from papaya.sim.secure_checks import SecureAuditor
from papaya.sim.tsa_twin import TsaTwin, sealed
from tests.unit.aggregator.secure_builders import MAX_EXAMPLES, a_secure_task
from tests.unit.client.builders import joined

LENGTH = 4
SESSIONS = ("a" * 24, "b" * 24)


class Clock:
    now = 0.0


class Audited:
    """Two devices, one TSA, and whatever the auditor is shown of them."""

    def __init__(self) -> None:
        self.config = a_secure_task(goal=2)
        self.parameters = self.config.public_parameters
        assert self.parameters is not None
        self.rows: dict[str, Row] = {}
        self.tsa = TsaTwin(Clock(), Random(1))
        self.auditor = SecureAuditor([self.config], self.rows, self.tsa)
        self.done: dict[str, Sealed] = {}
        self.index: dict[str, int] = {}

    def offer(self) -> tuple[int, SecureOffer]:
        assert self.parameters is not None
        [offer], terms = self.tsa.adapter.offers(self.parameters, 1)
        told = SecureOffer(
            terms.parameters, offer.message, terms.identity, terms.platform, b"", b"", -1
        )
        return offer.index, told

    def granted(self, session: str, version: int = 0) -> SecureOffer:
        self.index[session], told = self.offer()
        self.auditor.on_granted(session, self.index[session], version, told)
        return told

    def seal(self, session: str, told: SecureOffer, current: int = 0, lie: bool = False) -> None:
        update = protocol_update(session, LENGTH)
        work = Seal(self.config.task, told, update, MAX_EXAMPLES, 0, current)
        done = sealed(work, 0.0, Random(session))
        self.done[session] = done
        self.auditor.on_sealed(who(session), MAX_EXAMPLES, work, done, lie)

    def accept(self, session: str, group: int = 1) -> None:
        agreed = self.config.public_parameters
        assert agreed is not None
        self.tsa.adapter.accept(agreed, self.index[session], group, self.done[session].sealed)

    def record(self, *sessions: str, target: int = 1) -> tuple[RecordRow, bytes]:
        total = MaskedSum.zero(LENGTH + 2)
        total.add_all([[self.done[session].update] for session in sessions], NUMPY)
        members = tuple(Member(s, 0, 0, 1, 9.0, self.index[s]) for s in sessions)
        return RecordRow(target, "blob", members, total.weight), total.encode()

    def full(self) -> tuple[RecordRow, bytes]:
        """Both devices are in group 1, and in its record."""
        for session in SESSIONS:
            self.seal(session, self.granted(session))
            self.accept(session)
        row, blob = self.record(*SESSIONS)
        self.rows[record_key(self.config.task, 1)] = row
        return row, blob

    def release(self, members: list[int], group: int = 1) -> None:
        assert self.parameters is not None
        self.tsa.release(self.parameters, group, members, lambda start, masks: None)


def who(session: str) -> Joined:
    return joined(session=session, version=0, secure=True)


def broken(promise: str) -> pytest.RaisesExc[InvariantError]:
    return pytest.raises(InvariantError, match=promise)


def test_an_honest_run_breaks_nothing_and_its_mean_is_exact() -> None:
    audited = Audited()
    row, blob = audited.full()
    audited.auditor.check_record("words", row, blob)
    audited.release(sorted(audited.index.values()))
    vectors = np.array([protocol_vector(session, LENGTH) for session in SESSIONS])
    mean = audited.auditor.expected_mean("words", row)
    assert mean == pytest.approx(vectors.mean(axis=0), abs=1e-5)


def test_an_offer_is_given_to_one_session() -> None:
    audited = Audited()
    told = audited.granted(SESSIONS[0])
    with broken("was given to"):
        audited.auditor.on_granted(SESSIONS[1], audited.index[SESSIONS[0]], 0, told)
    with broken("names offer"):
        audited.auditor.on_granted(SESSIONS[0], 77, 0, told)
    with broken("without an offer"):
        audited.auditor.on_granted(SESSIONS[1], 1, 0, None)


def test_an_update_is_sealed_once_for_its_own_offer() -> None:
    audited = Audited()
    told = audited.granted(SESSIONS[0])
    with broken("was not given"):
        audited.seal(SESSIONS[1], told)
    audited.seal(SESSIONS[0], told)
    with broken("sealed twice"):
        audited.seal(SESSIONS[0], audited.granted(SESSIONS[0]))


def test_nan_does_not_go_under_a_mask() -> None:
    audited = Audited()
    told = audited.granted(SESSIONS[0])
    update = np.full(LENGTH, np.nan, FLOAT32).tobytes()
    work = Seal("words", told, update, 1, 0, 0)
    with broken("masked NaN"):
        audited.auditor.on_sealed(who(SESSIONS[0]), 1, work, Sealed(b"", b""), False)


def test_what_is_sent_is_what_was_sealed() -> None:
    audited = Audited()
    session = SESSIONS[0]
    with broken("has not masked"):
        audited.auditor.on_request(session, Chunk(b"", "u", 0, 0, b""), 8)
    audited.seal(session, audited.granted(session))
    done = audited.done[session]
    audited.auditor.on_request(session, Chunk(b"", "u", 1, 0, done.update[8:16]), 8)
    audited.auditor.on_request(session, Complete(b"", "u", done.sealed), 8)
    with broken("another masked update"):
        audited.auditor.on_request(session, Chunk(b"", "u", 0, 0, done.update[8:16]), 8)
    with broken("another sealed seed"):
        audited.auditor.on_request(session, Complete(b"", "u", done.sealed[::-1]), 8)


def test_a_seed_is_taken_into_one_group_and_only_for_an_offer_that_was_given() -> None:
    audited = Audited()
    audited.seal(SESSIONS[0], audited.granted(SESSIONS[0]))
    audited.accept(SESSIONS[0])
    with broken("taken into group 1 and into 2"):
        audited.tsa.on_accepted(audited.index[SESSIONS[0]], 2)
    with broken("given to no device"):
        audited.tsa.on_accepted(77, 1)


def test_masks_are_released_for_a_full_and_durable_record_only() -> None:
    audited = Audited()
    audited.full()
    row = audited.rows.pop(record_key("words", 1))
    members = sorted(audited.index.values())
    with broken("before it closed"):
        audited.release(members)
    audited.rows[record_key("words", 1)] = row
    audited.release(members)
    audited.rows.clear()
    audited.release(members)  # a late holder asks again: the same bytes
    with broken("were released, group 1"):
        digest, masks = audited.parameters.digest(), np.zeros(1, WORD)  # type: ignore[union-attr]
        audited.tsa.on_released(digest, 1, (members[0],), masks)


def test_a_record_is_the_sum_of_members_whose_seeds_are_in_its_group() -> None:
    audited = Audited()
    row, blob = audited.full()
    tensors = MaskedSum.decode(blob, LENGTH + 2)
    tensors.vector[0] ^= np.uint32(1)
    with broken("not that of its members"):
        audited.auditor.check_record("words", row, tensors.encode())
    elsewhere = RecordRow(2, "blob", row.members, 2.0)
    with broken("its seed in group 1"):
        audited.auditor.check_record("words", elsewhere, blob)
    first = row.members[0]
    for member in (
        Member(first.session, 0, 1, 1, 9.0, first.offer),
        Member(first.session, 0, 0, 1, 9.0, first.offer + 9),
    ):
        with broken("its record says"):
            audited.auditor.check_record("words", RecordRow(1, "blob", (member,), 1.0), blob)
    stranger = RecordRow(1, "blob", (Member("stranger", 0, 0, 1, 9.0, 0),), 1.0)
    with broken("masked nothing"):
        audited.auditor.check_record("words", stranger, blob)


def test_a_buffer_is_dropped_for_a_reason_and_changes_nothing_else() -> None:
    audited = Audited()
    row, _ = audited.full()
    before = OptimizerRow(0, "state")
    audited.rows[optimizer_key("words")] = OptimizerRow(1, "state")
    with broken("could be used"):
        audited.auditor.check_dropped("words", row, before)
    audited.tsa.crash()
    audited.auditor.check_dropped("words", row, before)
    audited.rows[optimizer_key("words")] = OptimizerRow(1, "another")
    with broken("changed the optimizer"):
        audited.auditor.check_dropped("words", row, before)


def test_a_lie_is_a_reason_to_drop_and_no_reason_to_step() -> None:
    audited = Audited()
    for session in SESSIONS:
        audited.seal(session, audited.granted(session), lie=session == SESSIONS[1])
    row, _ = audited.record(*SESSIONS)
    audited.rows[optimizer_key("words")] = OptimizerRow(1, "state")
    audited.auditor.check_dropped("words", row, OptimizerRow(0, "state"))
    with broken("lied about its seed"):
        audited.auditor.expected_mean("words", row)


def test_staleness_is_counted_from_what_the_server_said_to_be_current() -> None:
    audited = Audited()
    for session, version in zip(SESSIONS, (0, 3), strict=True):
        audited.seal(session, audited.granted(session, version), current=version)
    row, _ = audited.record(*SESSIONS)
    fresh, stale = (np.array(protocol_vector(session, LENGTH)) for session in SESSIONS)
    mean = audited.auditor.expected_mean("words", row)
    assert mean == pytest.approx((fresh + stale / 2) / 2, abs=1e-5)
    assert np.frombuffer(audited.done[SESSIONS[0]].update, WORD).size == LENGTH + 2
