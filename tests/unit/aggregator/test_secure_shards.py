"""Masked sums in shards: many threads, cuts at any time, steps again after any crash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from random import Random
from threading import Event, Lock
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papaya.aggregator.masked_sum import MaskedSum, Tsa, TsaError
from papaya.aggregator.shards import NewBlobs, Shards, _Spares, initial_blobs
from papaya.aggregator.work import (
    UNREACHABLE,
    Fold,
    Folded,
    GetOffers,
    Restore,
    Snapshot,
    Step,
    Stepped,
)
from papaya.client.work import Seal, Sealed
from papaya.config import Requirements, TaskConfig
from papaya.learning import parameters
from papaya.learning.parameters import FLOAT32, Vector
from papaya.messages.base import BlobKey
from papaya.messages.participation import SecureOffer
from papaya.messages.storage import Member, RecordRow, VersionRow
from papaya.secagg.words import RING_16, WORD
from papaya.server.workers import FreeShards
from papaya.sim.tsa_twin import TsaTwin, sealed
from tests.unit.aggregator.builders import MODEL_LENGTH, TASK, in_turn
from tests.unit.aggregator.secure_builders import CLIP, MAX_EXAMPLES, STEP, a_secure_task, mean_of

SEQ, TARGET = 1, 1
PATIENCE_S = 60.0
ABC = (("a", 1.0), ("b", 2.0), ("c", 6.0))


class Clock:
    now = 0.0


class OneAtATime(TsaTwin):
    """As in a running server, where a lock guards the connection."""

    def __init__(self) -> None:
        self._lock = Lock()
        super().__init__(Clock(), Random(4))

    def accept(self, index: int, group: int, sealed: bytes) -> None:
        with self._lock:
            super().accept(index, group, sealed)


class Aggregation:
    """A TSA, the blobs of one task, and shards that may be replaced by a successor's."""

    def __init__(self, config: TaskConfig, shards: int = 1) -> None:
        self.config = config
        self.rng = Random(3)
        self.tsa = OneAtATime()
        self.count = shards
        first = initial_blobs(config, np.zeros(MODEL_LENGTH, FLOAT32))
        self.base = VersionRow(0, first[0][0], 0, 0.0)
        self.optimizer = first[1][0]
        self.blobs: dict[BlobKey, bytes] = dict(first)
        self.members: dict[str, Member] = {}
        self.crash()

    def crash(self) -> None:
        """All that is in the memory of the aggregator is gone."""
        take_shard = in_turn(range(self.count))
        self.shards = Shards(self.count, lock=Lock, take_shard=take_shard, tsa=self.tsa.adapter)

    def seal(self, session: str, *values: float, examples: int = MAX_EXAMPLES) -> Sealed:
        """What one device sends, and its place in a record."""
        offered = self.shards.get_offers(GetOffers(self.config, SEQ, 1))
        assert offered.terms is not None
        [offer] = offered.offers
        terms = offered.terms
        secure = SecureOffer(
            terms.parameters,
            offer.message,
            terms.identity,
            terms.platform,
            terms.evidence,
            terms.collateral,
            terms.leaf,
        )
        vector = np.zeros(MODEL_LENGTH, FLOAT32)
        vector[: len(values)] = values
        self.members[session] = Member(session, 0, 0, 1, 100.0, offer.index)
        return sealed(Seal(TASK, secure, vector.tobytes(), examples, 0, 0), 0.0, self.rng)

    def fold(self, session: str, done: Sealed, target: int = TARGET) -> Folded:
        offer = self.members[session].offer
        work = Fold(self.config, SEQ, target, session, 1, 0, offer, done.sealed)
        [folded] = self.shards.fold_all([(work, {0: done.update})])
        return folded

    def record(self, target: int = TARGET) -> RecordRow:
        snapshotted, blobs = self.shards.snapshot(Snapshot(TASK, SEQ, (target,)))
        self.write(blobs)
        [found] = snapshotted.sums
        members = tuple(self.members[session] for session in found.sessions)
        return RecordRow(target, found.blob, members, found.weight)

    def write(self, blobs: NewBlobs) -> None:
        self.blobs.update(blobs)

    def restore(self, record: RecordRow) -> None:
        self.shards.restore(Restore(self.config, SEQ, (record,), ()), self.blobs.__getitem__)

    def step(self, record: RecordRow) -> tuple[Stepped, NewBlobs]:
        work = Step(self.config, SEQ, self.base, self.optimizer, record)
        stepped, blobs = self.shards.step(work, self.blobs.__getitem__)
        assert isinstance(stepped, Stepped)
        return stepped, blobs

    def version(self, record: RecordRow) -> list[float]:
        """The parameters of the next version: with FedAvg from zero, the mean itself."""
        stepped, blobs = self.step(record)
        assert stepped.dropped == ""
        found: list[float] = parameters.decode(dict(blobs)[stepped.parameters], 4).tolist()
        return found


def masked_words(aggregation: Aggregation, record: RecordRow) -> list[int]:
    data = aggregation.blobs[record.sum]
    words: list[int] = MaskedSum.decode(data, MODEL_LENGTH + 2).vector.tolist()
    return words


updates = st.lists(
    st.tuples(st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4), st.integers(1, 150)),
    min_size=1,
    max_size=7,
)


@settings(max_examples=40)
@given(updates, st.integers(0, 7))
def test_the_step_is_that_of_the_clients_whatever_was_cut_when(
    clients: list[tuple[list[float], int]], cut_after: int
) -> None:
    """Within the derived bound of the float mean; a record cut half-way changes nothing."""
    aggregation = Aggregation(a_secure_task(len(clients)), shards=3)
    for number, (values, examples) in enumerate(clients):
        done = aggregation.seal(f"s{number}", *values, examples=examples)
        assert aggregation.fold(f"s{number}", done).refused is None
        if number == cut_after:
            aggregation.record()
    weights = [min(examples, MAX_EXAMPLES) / MAX_EXAMPLES for _, examples in clients]
    expected = mean_of([values for values, _ in clients], weights)
    found = aggregation.version(aggregation.record())
    error = len(clients) * STEP / sum(weights) + 1e-4
    assert found == pytest.approx(expected, abs=error, rel=1e-5)


def test_many_threads_fold_at_once_and_a_snapshot_comes_between() -> None:
    clients, workers = 64, 4
    aggregation = Aggregation(a_secure_task(clients), shards=workers)
    sent = {f"s{i}": aggregation.seal(f"s{i}", float(i % 7), -1.0) for i in range(clients)}
    halves = list(sent.items())[: clients // 2], list(sent.items())[clients // 2 :]
    records = []
    with ThreadPoolExecutor(workers) as threads:
        for half in halves:
            jobs = [threads.submit(aggregation.fold, session, done) for session, done in half]
            assert all(job.result().refused is None for job in jobs)
            records.append(aggregation.record())
    first, record = records
    assert {member.session for member in first.members} == dict(halves[0]).keys()
    assert {member.session for member in record.members} == sent.keys()
    expected = np.zeros(MODEL_LENGTH + 2, WORD)
    for done in sent.values():
        expected += np.frombuffer(done.update, WORD)
    assert masked_words(aggregation, record) == expected.tolist()
    mean = sum(i % 7 for i in range(clients)) / clients
    assert aggregation.version(record) == pytest.approx([mean, -1.0, 0.0, 0.0], abs=1e-4)


def test_steps_that_wait_for_the_tsa_hold_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tasks may wait for one TSA, so a step reads the model only when it has a place. No step
    holds a shard while it calls the TSA or reads a blob.
    """
    aggregation, held = Aggregation(a_secure_task(1)), Counter[str]()
    first, release = {aggregation.base.parameters, aggregation.optimizer}, aggregation.tsa.release
    decode = parameters.decode
    seen: list[tuple[str, int, int]] = []

    @contextmanager
    def take(what: str) -> Iterator[int]:
        held[what] += 1
        try:
            yield 0
        finally:
            held[what] -= 1

    def see(what: str) -> None:
        seen.append((what, held["place"], held["shard"]))

    def released(*arguments: Any) -> None:
        see("release")
        release(*arguments)

    def read(key: BlobKey) -> bytes:
        see("model" if key in first else "sum")
        return aggregation.blobs[key]

    def decoded(data: bytes, length: int) -> Vector:
        see("decode")
        return decode(data, length)

    monkeypatch.setattr(aggregation.tsa, "release", released)
    monkeypatch.setattr(parameters, "decode", decoded)
    aggregation.shards = Shards(
        tsa=aggregation.tsa.adapter,
        take_shard=partial(take, "shard"),
        take_place=partial(take, "place"),
    )
    aggregation.fold("a", aggregation.seal("a", 3.0))
    record = aggregation.record()
    work = Step(aggregation.config, SEQ, aggregation.base, aggregation.optimizer, record)
    stepped, _ = aggregation.shards.step(work, read)
    assert isinstance(stepped, Stepped)
    assert stepped.dropped == ""
    models = 2 * [("model", 1, 0)]
    assert seen == [("sum", 0, 0), ("release", 0, 0), *models, ("decode", 1, 1)]
    assert held.total() == 0


def test_no_more_threads_than_shards_apply_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, shards, guard, all_try = 3, FreeShards(1), Lock(), Event()
    decode, tries, now, most = parameters.decode, 0, 0, 0

    @contextmanager
    def take_shard() -> Iterator[int]:
        nonlocal tries
        with guard:
            tries += 1
            if tries == tasks + 1:  # a step takes one twice: for the mean, then for the model
                all_try.set()
        with shards() as number:
            yield number

    def decode_when_all_try(data: bytes, length: int) -> Vector:
        nonlocal now, most
        with guard:
            now += 1
            most = max(most, now)
        assert all_try.wait(PATIENCE_S)
        found = decode(data, length)
        with guard:
            now -= 1
        return found

    def step(aggregation: Aggregation) -> Stepped:
        aggregation.shards = Shards(tsa=aggregation.tsa.adapter, take_shard=take_shard)
        aggregation.fold("a", aggregation.seal("a", 3.0))
        return aggregation.step(aggregation.record())[0]

    monkeypatch.setattr(parameters, "decode", decode_when_all_try)
    aggregations = [Aggregation(a_secure_task(1)) for _ in range(tasks)]
    with ThreadPoolExecutor(tasks) as threads:
        stepped = list(threads.map(step, aggregations))
    assert [found.dropped for found in stepped] == tasks * [""]
    assert most == 1


def test_a_step_that_is_tried_again_after_an_error_of_storage_asks_the_tsa_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A release takes long, and keeps the one thread of the TSA busy."""
    aggregation, asked = Aggregation(a_secure_task(1)), 0
    release = aggregation.tsa.release

    def released(*arguments: Any) -> None:
        nonlocal asked
        asked += 1
        release(*arguments)

    def away(key: BlobKey) -> bytes:
        if key == aggregation.optimizer:
            raise OSError(5, "Input/output error")
        return aggregation.blobs[key]

    monkeypatch.setattr(aggregation.tsa, "release", released)
    aggregation.fold("a", aggregation.seal("a", 3.0))
    record = aggregation.record()
    work = Step(aggregation.config, SEQ, aggregation.base, aggregation.optimizer, record)
    for _ in range(3):
        with pytest.raises(OSError, match="Input"):
            aggregation.shards.step(work, away)
    assert aggregation.version(record) == pytest.approx([3, 0, 0, 0], abs=1e-4)
    assert asked == 1
    with pytest.raises(OSError, match="Input"):
        aggregation.shards.step(work, away)
    aggregation.restore(record)
    assert aggregation.version(record) == pytest.approx([3, 0, 0, 0], abs=1e-4)
    assert asked == 3, "a restore drops the mean"


def test_restored_from_a_record_the_step_gives_the_same_bytes() -> None:
    """A crash between the release and the commit: the TSA says the same again."""
    aggregation = Aggregation(a_secure_task(2))
    for session, value in (("a", 3.0), ("b", 5.0)):
        aggregation.fold(session, aggregation.seal(session, value))
    record = aggregation.record()
    first = aggregation.step(record)
    aggregation.crash()
    aggregation.restore(record)
    assert aggregation.step(record) == first
    assert aggregation.step(record) == first
    assert first[0].dropped == ""


def test_a_record_that_was_cut_before_a_crash_is_filled_up_by_the_successor() -> None:
    aggregation = Aggregation(a_secure_task(3))
    sent = {name: aggregation.seal(name, value) for name, value in ABC}
    aggregation.fold("a", sent["a"])
    record = aggregation.record()
    aggregation.fold("b", sent["b"])  # its seed is taken, its record was never written
    aggregation.crash()
    aggregation.restore(record)
    assert aggregation.fold("b", sent["b"]).refused is None
    assert aggregation.fold("c", sent["c"]).refused is None
    assert aggregation.version(aggregation.record()) == pytest.approx([3, 0, 0, 0], abs=1e-4)


def test_a_seed_that_was_taken_and_never_recorded_is_left_out_of_the_masks() -> None:
    """Step 3 of the ideal functionality: the server names whom it has."""
    aggregation = Aggregation(a_secure_task(2))
    sent = {name: aggregation.seal(name, value) for name, value in ABC}
    aggregation.fold("a", sent["a"])
    record = aggregation.record()
    aggregation.fold("b", sent["b"])
    aggregation.crash()
    aggregation.restore(record)
    aggregation.fold("c", sent["c"])
    assert aggregation.version(aggregation.record()) == pytest.approx([3.5, 0, 0, 0], abs=1e-4)
    late = aggregation.fold("b", sent["b"], target=TARGET + 1)
    assert late.refused == "seed_refused"


def test_words_of_another_ring_are_not_used_again() -> None:
    """Both vectors have as many words."""
    spares = _Spares(1, nullcontext)
    wide, narrow = a_secure_task(), a_secure_task(requirements=Requirements(upload_bits=16))
    used = spares.zero(wide)
    spares.give(used)
    assert spares.zero(narrow).vector.dtype == RING_16.word
    assert spares.zero(wide) is used


def test_an_upload_of_the_wrong_size_uses_up_no_offer() -> None:
    aggregation = Aggregation(a_secure_task(1))
    done = aggregation.seal("a", 1.0)
    wrong = Sealed(done.update[:-4], done.sealed)
    assert aggregation.fold("a", wrong).refused == "wrong_size"
    assert aggregation.fold("a", done).refused is None


def test_a_refused_seed_reaches_no_sum_and_its_neighbours_do() -> None:
    aggregation = Aggregation(a_secure_task(2))
    sent = {name: aggregation.seal(name, 2.0) for name in "abc"}
    tampered = Sealed(sent["b"].update, sent["b"].sealed[:-1] + b"\0")
    given = [("a", sent["a"]), ("b", tampered), ("c", sent["c"])]
    works = [
        Fold(aggregation.config, SEQ, TARGET, s, 1, 0, aggregation.members[s].offer, d.sealed)
        for s, d in given
    ]
    folded = aggregation.shards.fold_all(
        [(work, {0: done.update}) for work, (_, done) in zip(works, given, strict=True)]
    )
    assert [found.refused for found in folded] == [None, "seed_refused", None]
    record = aggregation.record()
    assert [member.session for member in record.members] == ["a", "c"]
    assert aggregation.version(record) == pytest.approx([2, 0, 0, 0], abs=1e-4)


def test_seeds_of_a_tsa_that_is_gone_are_refused_and_its_buffer_is_dropped() -> None:
    aggregation = Aggregation(a_secure_task(2))
    held = {name: aggregation.seal(name, 2.0) for name in "abc"}
    aggregation.fold("a", held["a"])
    aggregation.fold("b", held["b"])
    record = aggregation.record()
    aggregation.tsa.crash()
    assert aggregation.fold("c", held["c"], target=TARGET + 1).refused == "trusted_party_lost"
    stepped, blobs = aggregation.step(record)
    assert stepped.dropped == "trusted_party_lost"
    assert (stepped.version, blobs) == (TARGET, [])
    same = (aggregation.base.parameters, aggregation.optimizer)
    assert (stepped.parameters, stepped.optimizer) == same


def test_a_buffer_with_seeds_of_two_lives_is_dropped() -> None:
    aggregation = Aggregation(a_secure_task(2))
    aggregation.fold("a", aggregation.seal("a", 2.0))
    aggregation.tsa.crash()
    assert aggregation.fold("b", aggregation.seal("b", 2.0)).refused is None
    assert aggregation.step(aggregation.record())[0].dropped == "trusted_party_lost"


def test_a_vector_that_its_seed_does_not_unmask_is_found_out() -> None:
    aggregation = Aggregation(a_secure_task(2))
    aggregation.fold("a", aggregation.seal("a", 2.0))
    liar = aggregation.seal("b", 2.0)
    aggregation.fold("b", Sealed(liar.update[::-1], liar.sealed))
    assert aggregation.step(aggregation.record())[0].dropped == "implausible"


class AwayTsa:
    def reach(self, parameters: object) -> None:
        raise TsaError(UNREACHABLE, "the TSA is away")


def test_while_it_is_away_a_step_does_not_read_the_sum() -> None:
    """It is as large as the model, and the step is tried again every second."""
    aggregation = Aggregation(a_secure_task(1))
    aggregation.fold("a", aggregation.seal("a", 2.0))
    record = aggregation.record()
    written, aggregation.blobs = aggregation.blobs, {}
    aggregation.shards = Shards(tsa=cast(Tsa, AwayTsa()))
    stepped, blobs = aggregation.step(record)
    assert (stepped.dropped, blobs) == (UNREACHABLE, [])
    aggregation.blobs = written
    aggregation.crash()
    assert aggregation.version(record)[0] == pytest.approx(2.0, abs=1e-5)


def test_while_it_is_away_there_are_no_offers_and_no_folds() -> None:
    aggregation = Aggregation(a_secure_task(1))
    done = aggregation.seal("a", CLIP)
    aggregation.tsa.crash(away_s=5.0)
    offered = aggregation.shards.get_offers(GetOffers(aggregation.config, SEQ, 8))
    assert (offered.offers, offered.terms) == ((), None)
    assert offered.problem == "the TSA does not answer; updates wait for it"  # and no address
    assert offered.is_unanswered
    folded = aggregation.fold("a", done)
    assert (folded.is_unanswered, folded.refused) == (True, None)


def test_an_aggregator_without_a_tsa_says_so() -> None:
    config = a_secure_task(1)
    offered = Shards().get_offers(GetOffers(config, SEQ, 8))
    assert offered.problem == "this server has no TSA"
    work = Fold(config, SEQ, TARGET, "a", 1, 0, 0, bytes(64))
    [folded] = Shards().fold_all([(work, {0: bytes(config.update_bytes)})])
    assert folded.refused == "trusted_party_lost"
