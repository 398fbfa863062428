"""Uploads without copies, folds of many, cuts at one instant."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from papaya.aggregator.shards import Shards, UploadChunks, blob_key, initial_blobs
from papaya.aggregator.work import Drop, Fold, Folded, Keep, Restore, Snapshot, Step, Stepped
from papaya.config import Aggregation, Evaluated, TaskConfig, Weighting
from papaya.errors import MissingBlob
from papaya.learning import parameters
from papaya.learning.aggregation_rules import BufferMembers, MemberRows
from papaya.learning.evaluation import evaluation_vector
from papaya.learning.kernels import NUMPY, Kernel, compiled
from papaya.learning.parameters import FLOAT32, Vector
from papaya.learning.weighting import BytesLike, WeightedSum
from papaya.messages.storage import Member, RecordRow, VersionRow
from tests.unit.aggregator.builders import MODEL_LENGTH, TASK, an_async_task, chunks_of, in_turn

CONFIG = an_async_task(100, concurrency=100)


class Released:
    """Stands for a pool: everything kept must come back to it once."""

    def __init__(self) -> None:
        self.kept: list[BytesLike] = []
        self.back: list[BytesLike] = []

    def chunk(self, data: bytes) -> memoryview:
        view = memoryview(bytearray(data))
        self.kept.append(view)
        return view

    def holds(self) -> int:
        """Buffers that are still out."""
        times = Counter(map(id, self.back))
        assert all(count == 1 for count in times.values())
        assert times.keys() <= set(map(id, self.kept))
        return len(self.kept) - len(self.back)


def keep(
    shards: Shards,
    session: str,
    values: tuple[float, ...],
    pool: Released,
    chunk_bytes: int = 8,
    task: str = TASK,
) -> None:
    for index, piece in enumerate(chunks_of(values, chunk_bytes)):
        data = pool.chunk(piece)
        shards.keep(Keep(task, session, index * chunk_bytes, data, 16))  # type: ignore[arg-type]


def a_fold(session: str, target: int = 1, examples: int = 1, config: TaskConfig = CONFIG) -> Fold:
    return Fold(config, 1, target, session, examples, 0)


def the_sum(shards: Shards, target: int = 1) -> tuple[WeightedSum, tuple[str, ...]]:
    snapshotted, [(key, blob)] = shards.snapshot(Snapshot(TASK, 1, (target,)))
    [found] = snapshotted.sums
    total = WeightedSum.decode(blob, MODEL_LENGTH)
    assert (found.target, found.blob, found.weight) == (target, key, total.weight)
    return total, found.sessions


def test_chunks_are_kept_as_they_are_and_released_when_they_are_folded() -> None:
    pool = Released()
    shards = Shards(release=pool.back.append)
    keep(shards, "a", (1, 2, 3, 4), pool)
    taken = shards.take(a_fold("a"))
    assert [id(data) for data in taken.values()] == [id(data) for data in pool.kept]
    assert pool.back == []
    assert shards.fold_all([(a_fold("a"), taken)]) == [Folded(TASK, 1, 1, "a")]
    assert pool.holds() == 0


def test_a_chunk_that_comes_again_replaces_the_first() -> None:
    pool = Released()
    shards = Shards(release=pool.back.append)
    keep(shards, "a", (9, 9, 9, 9), pool)
    first = list(pool.kept)
    keep(shards, "a", (1, 2, 3, 4), pool)
    assert pool.back == first
    shards.fold(a_fold("a"))
    assert the_sum(shards)[0].vector.tolist() == [1, 2, 3, 4]
    assert pool.holds() == 0


@pytest.mark.parametrize("chunk_bytes", [1, 3, 4, 5, 8, 12, 16, 100])
@pytest.mark.parametrize("kernel", [NUMPY, compiled()], ids=["numpy", "numba"])
def test_chunks_of_any_size_in_any_order(chunk_bytes: int, kernel: Kernel) -> None:
    shards = Shards(kernel=kernel)
    pieces = list(enumerate(chunks_of((1, -2, 3, 4), chunk_bytes)))
    for index, piece in reversed(pieces):
        shards.keep(Keep(TASK, "a", index * chunk_bytes, piece, 16))
    assert shards.fold(a_fold("a", examples=3)).refused is None
    assert the_sum(shards)[0] == WeightedSum(np.array([3, -6, 9, 12], FLOAT32), 3)


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_an_upload_with_a_hole_never_reaches_a_sum(missing: int) -> None:
    pool = Released()
    shards = Shards(release=pool.back.append)
    keep(shards, "whole", (1, 1, 1, 1), pool, 4)
    keep(shards, "hole", (7, 7, 7, 7), pool, 4)
    holed = shards.take(a_fold("hole"))
    shards.release({0: holed.pop(4 * missing)})
    given: list[tuple[Fold, UploadChunks]] = [
        (a_fold("hole"), holed),
        (a_fold("nothing"), {}),
        (a_fold("whole"), shards.take(a_fold("whole"))),
    ]
    refused = [folded.refused for folded in shards.fold_all(given)]
    assert refused == ["wrong_size", "wrong_size", None]
    total, sessions = the_sum(shards)
    assert total.vector.tolist() == [1, 1, 1, 1]
    assert sessions == ("whole",)
    assert pool.holds() == 0


def test_what_is_refused_leaves_the_others_of_its_pass_alone() -> None:
    pool = Released()
    shards = Shards(release=pool.back.append)
    config = an_async_task(100, concurrency=100, clip=10.0)
    updates = {
        "a": (1.0, 2, 3, 4),
        "nan": (np.nan, 0, 0, 0),
        "far": (11.0, 0, 0, 0),
        "b": (10.0, 0, 0, 0),
    }
    for session, values in updates.items():
        keep(shards, session, values, pool)
    works = [a_fold(session, config=config) for session in updates]
    found = shards.fold_all([(work, shards.take(work)) for work in works])
    assert [folded.session for folded in found] == list(updates)
    assert [folded.refused for folded in found] == [None, "not_finite", "over_norm", None]
    total, sessions = the_sum(shards)
    assert total == WeightedSum(np.array([11, 2, 3, 4], FLOAT32), 2)
    assert sessions == ("a", "b")
    assert pool.holds() == 0


def test_an_evaluation_that_no_device_makes_is_refused() -> None:
    """One of them could reach the target loss of a task, and end it."""
    pinned = Evaluated("words", 3, "words/1/version-3", 4, max_examples=1500)
    honest = evaluation_vector(5, 7.0, 2)
    config = an_async_task(100, concurrency=100, model_length=honest.size, evaluates=pinned)
    shards = Shards()
    for session, vector in (("honest", honest), ("evil", -honest)):
        shards.keep(Keep(TASK, session, 0, vector.tobytes(), vector.nbytes))
    assert shards.fold(a_fold("honest", config=config)).refused is None
    assert shards.fold(a_fold("evil", config=config)).refused == "over_norm"
    [cut] = shards.snapshot(Snapshot(TASK, 1, (1,)))[0].sums
    assert cut.sessions == ("honest",)


def test_an_update_over_the_clip_is_clipped_if_that_is_the_rule() -> None:
    config = an_async_task(100, concurrency=100, clip=1.0, over_clip="clip")
    shards, pool = Shards(), Released()
    keep(shards, "a", (30, 40, 0, 0), pool)
    assert shards.fold(a_fold("a", config=config, examples=5)).refused is None
    total, _ = the_sum(shards)
    assert total.vector.tolist() == pytest.approx([3, 4, 0, 0], rel=1e-6)
    assert total.weight == 5


def test_a_cut_stands_still_while_later_updates_are_folded() -> None:
    shards, pool = Shards(2, take_shard=in_turn((0, 1))), Released()
    keep(shards, "a", (1, 0, 0, 0), pool)
    keep(shards, "b", (0, 2, 0, 0), pool)
    shards.fold(a_fold("a"))
    shards.fold(a_fold("b"))
    cut = shards.cut(Snapshot(TASK, 1, (1,)))
    snapshotted, [(key, pieces)] = shards.encode(cut)
    for late in ("late-0", "late-1"):
        keep(shards, late, (5, 5, 5, 5), pool)
        shards.fold(a_fold(late))
    blob = b"".join(pieces)
    assert key == blob_key(TASK, 1, "sum-1-2", blob)
    assert WeightedSum.decode(blob, MODEL_LENGTH).vector.tolist() == [1, 2, 0, 0]
    assert snapshotted.sums[0].sessions == ("a", "b")
    total, sessions = the_sum(shards)
    assert total == WeightedSum(np.array([11, 12, 10, 10], FLOAT32), 4)
    assert sessions == ("a", "b", "late-0", "late-1")
    assert the_sum(shards) == (total, sessions)


def test_a_shard_begins_at_zero_again_in_the_same_memory_after_each_cut() -> None:
    shards, pool = Shards(2, take_shard=in_turn((1,))), Released()
    memory = set()
    for turn in range(4):
        keep(shards, f"s{turn}", (1, 2, 3, 4), pool)
        shards.fold(a_fold(f"s{turn}"))
        [used] = [part for part in shards._buffers[TASK, 1][1]._shards if part is not None]  # type: ignore[union-attr]
        memory.add(used.vector.ctypes.data)
        total, _ = the_sum(shards)
        assert total == WeightedSum((turn + 1) * np.array([1, 2, 3, 4], FLOAT32), turn + 1)
    assert len(memory) == 2, "the first shard is the sum from the first cut on"


def test_the_memory_that_is_kept_after_cuts_does_not_grow_with_the_number_of_tasks() -> None:
    shards, pool = Shards(2, take_shard=in_turn((0, 1))), Released()
    seen: list[weakref.ref[Any]] = []
    for task in (f"task-{number}" for number in range(5)):
        config = replace(CONFIG, task=task)
        for _ in range(4):
            session = f"{task}-{len(seen)}"
            keep(shards, session, (1, 2, 3, 4), pool, task=task)
            shards.fold(a_fold(session, config=config))
            [used] = [part for part in shards._buffers[task, 1][1]._shards if part is not None]  # type: ignore[union-attr]
            seen.append(weakref.ref(used.vector))
            del used
            shards.cut(Snapshot(task, 1, (1,)))
    kept = {id(vector) for vector in (ref() for ref in seen) if vector is not None}
    assert len(kept) <= 5 + 2, "a sum for each task, and a shard for each thread"


def test_memory_of_another_size_is_not_used_again() -> None:
    shards, pool = Shards(1), Released()
    longer = replace(CONFIG, task="longer", model_length=2 * MODEL_LENGTH)
    for session in ("a", "b"):
        keep(shards, session, (1, 2, 3, 4), pool)
        shards.fold(a_fold(session))
        the_sum(shards)
    for index, piece in enumerate(2 * chunks_of((1, 2, 3, 4), 8)):
        shards.keep(Keep("longer", "c", 8 * index, piece, 32))
    shards.fold(a_fold("c", config=longer))
    [(_, total, _)] = shards.cut(Snapshot("longer", 1, (1,))).sums
    assert total == WeightedSum(np.array([1, 2, 3, 4, 1, 2, 3, 4], FLOAT32), 1)


def a_record(target: int, blob: str, *sessions: str) -> RecordRow:
    members = tuple(Member(session, 0, 0, 1, 0.0) for session in sessions)
    return RecordRow(target, blob, members, float(len(sessions)))


def test_a_restored_sum_goes_on_where_the_record_ends() -> None:
    shards, pool = Shards(), Released()
    blobs = {"sum": WeightedSum(np.array([1, 2, 3, 4], FLOAT32), 2.0).encode()}
    keep(shards, "gone", (9, 9, 9, 9), pool)
    shards.fold(a_fold("gone"))
    record = a_record(1, "sum", "a", "b")
    shards.restore(Restore(CONFIG, 1, (record,), ()), blobs.__getitem__)
    keep(shards, "c", (1, 1, 1, 1), pool)
    shards.fold(a_fold("c"))
    total, sessions = the_sum(shards)
    assert total == WeightedSum(np.array([2, 3, 4, 5], FLOAT32), 3)
    assert sessions == ("a", "b", "c")


def test_a_restore_that_fails_leaves_no_sum_at_all() -> None:
    shards, pool = Shards(), Released()
    keep(shards, "a", (1, 1, 1, 1), pool)
    shards.fold(a_fold("a"))

    def missing(key: str) -> bytes:
        raise MissingBlob(key)

    with pytest.raises(MissingBlob):
        shards.restore(Restore(CONFIG, 1, (a_record(1, "sum", "a"),), ()), missing)
    with pytest.raises(KeyError):
        shards.snapshot(Snapshot(TASK, 1, (1,)))


def test_a_step_from_memory_is_repeated_after_an_error_of_storage() -> None:
    shards, pool = Shards(), Released()
    keep(shards, "a", (1, 2, 3, 4), pool)
    shards.fold(a_fold("a"))
    blobs = dict(initial_blobs(CONFIG, np.zeros(MODEL_LENGTH, FLOAT32)))
    first, optimizer = blobs
    record = RecordRow(1, "", (Member("a", 0, 0, 1, 0.0),), 1.0)
    work = Step(CONFIG, 1, VersionRow(0, first, 0, 0.0), optimizer, record)

    def away(key: str) -> bytes:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input"):
        shards.step(work, away)
    stepped, made = shards.step(work, blobs.__getitem__)
    assert isinstance(stepped, Stepped)
    after = parameters.decode(dict(made)[stepped.parameters], MODEL_LENGTH)
    assert after.tolist() == [1, 2, 3, 4]
    with pytest.raises(KeyError):  # the buffer is gone
        shards.step(work, blobs.__getitem__)


def test_a_rule_that_takes_members_computes_with_a_shard_and_reads_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = an_async_task(3, aggregation=Aggregation("median"), weighting=Weighting("equal"))
    blobs = dict(initial_blobs(config, np.zeros(MODEL_LENGTH, FLOAT32)))
    (first, optimizer), taken = blobs, 0
    each_coordinate, seen = BufferMembers.each_coordinate, []

    @contextmanager
    def take_shard() -> Iterator[int]:
        nonlocal taken
        taken += 1
        try:
            yield 0
        finally:
            taken -= 1

    def read_part(key: str, start: int, end: int) -> bytes:
        seen.append(("read", taken))
        return blobs[key][start:end]

    def see(members: BufferMembers, combine: Callable[[MemberRows], Any]) -> Vector:
        def combined(rows: MemberRows) -> Any:
            seen.append(("combine", taken))
            return combine(rows)

        return each_coordinate(members, combined)

    monkeypatch.setattr(BufferMembers, "each_coordinate", see)
    for session, value in zip("abc", (1, 2, 6), strict=True):
        blobs[session] = np.full(MODEL_LENGTH, value, FLOAT32).tobytes()
    record = replace(a_record(1, "", "a", "b", "c"), updates=("a", "b", "c"))
    work = Step(config, 1, VersionRow(0, first, 0, 0.0), optimizer, record)
    stepped, made = Shards(take_shard=take_shard).step(work, blobs.__getitem__, read_part)
    assert isinstance(stepped, Stepped)
    after = parameters.decode(dict(made)[stepped.parameters], MODEL_LENGTH)
    assert after.tolist() == [2, 2, 2, 2]
    assert seen == [*3 * [("read", 0)], ("combine", 1)]
    assert taken == 0

    def away(key: str, start: int, end: int) -> bytes:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input"):
        Shards(take_shard=take_shard).step(work, blobs.__getitem__, away)
    assert taken == 0


SESSIONS = ["a", "b", "c"]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), st.sampled_from(SESSIONS), st.integers(0, 3)),
            st.tuples(st.sampled_from(["fold", "drop"]), st.sampled_from(SESSIONS), st.none()),
            st.tuples(st.just("drop all"), st.none(), st.none()),
        ),
        max_size=40,
    )
)
def test_every_buffer_comes_back_once(steps: list[tuple[str, str, int]]) -> None:
    pool = Released()
    shards = Shards(release=pool.back.append)
    there: dict[str, set[int]] = {session: set() for session in SESSIONS}
    for step, session, index in steps:
        match step:
            case "keep":
                data = pool.chunk(bytes(4))
                shards.keep(Keep(TASK, session, 4 * index, data, 16))  # type: ignore[arg-type]
                there[session].add(index)
            case "fold":
                folded = shards.fold(a_fold(session))
                assert (folded.refused is None) == (len(there.pop(session)) == 4)
                there[session] = set()
            case "drop":
                shards.drop(Drop(TASK, 1, session))
                there[session] = set()
            case _:
                shards.drop(Drop(TASK, 1))
                there = {session: set() for session in SESSIONS}
        assert pool.holds() == sum(map(len, there.values()))


@pytest.mark.parametrize("threads", [2, 4])
def test_cuts_among_threads_hold_whole_updates_and_their_sessions(threads: int) -> None:
    """Each update is its own power of two, so that a sum names its members."""
    rounds, count = 10, 16
    shards = Shards(threads, lock=Lock, take_shard=in_turn(range(threads)))

    def fold(target: int, members: range) -> None:
        for i in members:
            [piece] = chunks_of([2**i] * MODEL_LENGTH, 16)
            assert shards.fold_all([(a_fold(str(i), target), {0: piece})])

    for target in range(1, rounds + 1):
        shards.fold_all([(a_fold("0", target), {0: chunks_of([1] * MODEL_LENGTH, 16)[0]})])
        with ThreadPoolExecutor(threads) as pool:
            jobs = [
                pool.submit(fold, target, range(first, count, threads))
                for first in range(1, 1 + threads)
            ]
            cuts = [the_sum(shards, target) for _ in range(5)]
            for job in jobs:
                job.result()
        cuts.append(the_sum(shards, target))
        for total, sessions in cuts:
            assert total.vector.tolist() == [sum(2 ** int(i) for i in sessions)] * MODEL_LENGTH
            assert total.weight == len(sessions)
        for (_, earlier), (_, later) in pairwise(cuts):
            assert later[: len(earlier)] == earlier
        assert len(cuts[-1][1]) == count
