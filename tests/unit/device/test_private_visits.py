"""Visits to private tasks: the charge comes before the first byte, and budgets are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from msgspec import UNSET, UnsetType, structs

from papaya.client.work import Finish, Trained
from papaya.config import EvaluationTerms, PrivacyTerms
from papaya.device.events import Event, VisitEnded
from papaya.device.example_store import ExampleStore
from papaya.device.ledger import Charge, PrivacyLedger
from papaya.device.training import ProtocolTrainer, TrainingRequest
from papaya.device.use_policy import PrivacyBudget, UsePolicy
from papaya.learning.definition import TaskTerms
from papaya.learning.private_evaluation import BINS, norm_bin, private_evaluation_length
from papaya.messages.participation import Refused
from papaya.messages.selection import Rejected
from tests.unit.device.fake_selector import (
    KEY,
    UPDATE,
    FakeSelector,
    answer,
    device,
    joined,
    process,
    serving,
)

BUDGET = PrivacyBudget(epsilon=8.0, delta=1e-7)


def terms(z: float | None, most: int = 5, evaluation: float | None = None) -> TaskTerms:
    privacy: PrivacyTerms | UnsetType = UNSET
    if z is not None:
        privacy = PrivacyTerms(
            noise_multiplier=z,
            delta=1e-7,
            max_participations=most,
            weighting="equal",
            expected_weight=1.0,
            evaluation=None
            if evaluation is None
            else EvaluationTerms(
                noise_multiplier=evaluation, max_participations=1, max_loss=4.0, max_examples=10
            ),
        )
    return TaskTerms(False, 3, 100, 8, 1.0, None, privacy=privacy, collection="keyboard")


class PrivateTrainer(ProtocolTrainer):
    def __init__(self, found: TaskTerms) -> None:
        super().__init__(lambda session, length: UPDATE, lambda: 0.0)
        self._terms = found

    def terms(self, program: str) -> TaskTerms:
        return self._terms


class RevisedTrainer(PrivateTrainer):
    """Another visit of the process accepts a revision with more noise while this one trains."""

    async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
        trained = await super().train(assignment, store)
        self._terms = terms(20.0)
        return trained


class PersonalTrainer(PrivateTrainer):
    """The task has personal tensors."""

    trained = 0

    async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
        self.trained += 1
        return structs.replace(await super().train(assignment, store), device_state=b"head")


def visit(
    path: Path,
    found: TaskTerms,
    budget: PrivacyBudget | None = BUDGET,
    trainer: Callable[[TaskTerms], PrivateTrainer] = PrivateTrainer,
    **replaced: Any,
) -> tuple[Finish, str, FakeSelector]:
    events: list[Event] = []
    policies = {"keyboard": UsePolicy(tasks=("*",), budget=budget)}

    async def scenario() -> tuple[Finish, FakeSelector]:
        async with asyncio.timeout(300), serving() as fake, process() as host:
            fake.replace.update(replaced)
            with device(
                host,
                fake.url,
                store=path,
                policies=policies,
                trainer=trainer(found),
                notify=events.append,
            ) as phone:
                return await phone.visit(), fake

    finish, fake = asyncio.run(scenario())
    ended = events[-1]
    assert isinstance(ended, VisitEnded)
    return finish, ended.detail, fake


def charges(path: Path) -> list[float]:
    with PrivacyLedger(path) as ledger:
        return [each.rho for each in ledger.spent("keyboard")]


def test_the_charge_is_durable_before_the_first_byte_of_the_update(tmp_path: Path) -> None:
    path, seen = tmp_path / "device.db", []

    async def at_the_first_chunk(request: web.Request) -> web.StreamResponse:
        seen.append(await asyncio.to_thread(charges, path))
        return await answer(Refused("enough seen"), 403)(request)

    finish, _, _ = visit(path, terms(2.0), chunk=at_the_first_chunk)
    assert seen == [[0.125]]
    assert finish.ending != "counted"
    assert charges(path) == [0.125], "an update that did not arrive stays charged"


def test_a_revision_during_training_does_not_change_the_charge(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    visit(path, terms(2.0), trainer=RevisedTrainer)
    assert charges(path) == [0.125], "the update was made under the earlier noise multiplier"


@pytest.mark.parametrize(("ages", "is_counted"), [(1, False), (2, True), (None, True)])
def test_personal_tensors_need_a_window_of_twice_the_age_of_examples(
    ages: int | None, is_counted: bool, tmp_path: Path
) -> None:
    """They pass on what they have learnt from an example after it was deleted."""
    window_s = None if ages is None else ages * UsePolicy().max_age_s
    path = tmp_path / "device.db"
    finish, detail, fake = visit(
        path, terms(2.0), structs.replace(BUDGET, window_s=window_s), PersonalTrainer
    )
    assert (finish.ending == "counted") == is_counted
    if not is_counted:
        assert finish == Finish("failed", "declined")
        assert "window_s = 2592000" in detail
        assert "2 x max_age_s = 5184000" in detail
        assert "chunk" not in fake.seen
        assert charges(path) == []
        with ExampleStore(path, {}) as store:
            assert store.state_of(KEY.partition("/")[0], KEY.partition("/")[0]) == b""


def test_a_task_that_was_declined_for_its_window_is_not_trained_again(tmp_path: Path) -> None:
    """An app's own trainer may not say what a task keeps, nor a hostile program: it shows after
    training.
    """
    budget = structs.replace(BUDGET, window_s=UsePolicy().max_age_s)
    policies = {"keyboard": UsePolicy(tasks=("*",), budget=budget)}
    trainer = PersonalTrainer(terms(2.0))
    store = tmp_path / "device.db"

    async def scenario() -> list[Finish]:
        async with asyncio.timeout(300), serving() as fake, process() as host:
            with device(host, fake.url, store=store, policies=policies, trainer=trainer) as phone:
                return [await phone.visit(), await phone.visit()]

    assert asyncio.run(scenario()) == [Finish("failed", "declined")] * 2
    assert trainer.trained == 1


def test_a_task_file_that_keeps_tensors_is_declined_before_training(tmp_path: Path) -> None:
    budget = structs.replace(BUDGET, window_s=UsePolicy().max_age_s)
    made: list[PersonalTrainer] = []

    def trainer(found: TaskTerms) -> PersonalTrainer:
        made.append(PersonalTrainer(structs.replace(found, keeps_tensors=True)))
        return made[0]

    finish, detail, fake = visit(tmp_path / "device.db", terms(2.0), budget, trainer)
    assert finish == Finish("failed", "declined")
    assert "2 x max_age_s = 5184000" in detail
    assert made[0].trained == 0
    assert fake.seen == ["check-in", "join", "leave"]


def test_a_device_declines_what_it_cannot_afford_and_keeps_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    finish, detail, fake = visit(path, terms(0.2))
    assert finish == Finish("failed", "declined")
    assert "would have spent rho = 12.5" in detail
    assert fake.seen == ["check-in", "join", "leave"]
    assert charges(path) == []


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_collection_with_a_budget_takes_part_in_nothing_without_noise(
    tmp_path: Path, evaluates: bool
) -> None:
    found = terms(2.0 if evaluates else None)
    join = answer(joined(evaluates=evaluates))
    finish, detail, _ = visit(tmp_path / "device.db", found, join=join)
    assert finish == Finish("failed", "declined")
    assert "no noise" in detail


def measure(path: Path, found: TaskTerms, length: int, *, norms: bool) -> tuple[Finish, bytes]:
    """A visit that is asked for an evaluation or a histogram, and what was uploaded."""
    asked = joined(
        evaluates=True,
        norms=norms,
        update_length=length,
        task="next-word-eval-7",
        participation_gap_s=0.0,
    )
    finish, _, fake = visit(path, found, join=answer(asked))
    return finish, b"".join(fake.completed)


def test_a_private_evaluation_uploads_a_few_bounded_numbers_and_is_charged(tmp_path: Path) -> None:
    path, found = tmp_path / "device.db", terms(2.0, evaluation=4.0)
    finish, sent = measure(path, found, private_evaluation_length(0), norms=False)
    assert finish.ending == "counted"
    vector = np.frombuffer(sent, np.float32)
    # One held-out example with a loss of 1: a tenth of the weight, and a quarter of the range.
    assert vector[:2].tolist() == pytest.approx([0.1, 0.1 * (0.25 - 0.5)])
    assert not vector[2:].any()
    assert charges(path) == [1 / 32]


def test_a_histogram_has_the_norm_of_the_whole_update_and_costs_an_evaluation(
    tmp_path: Path,
) -> None:
    path = tmp_path / "device.db"
    asked: list[TrainingRequest] = []

    class Large(PrivateTrainer):
        async def train(self, assignment: TrainingRequest, store: ExampleStore) -> Trained:
            asked.append(assignment)
            return Trained(np.array([3.0, 0.0, 4.0], np.float32).tobytes(), 7)

    measuring = joined(evaluates=True, norms=True, update_length=BINS, task="next-word-eval-7")
    found = terms(2.0, evaluation=4.0)
    finish, _, fake = visit(path, found, trainer=Large, join=answer(measuring))
    assert finish.ending == "counted"
    vector = np.frombuffer(b"".join(fake.completed), np.float32)
    assert np.flatnonzero(vector).tolist() == [norm_bin(5.0)]
    [request] = asked
    assert (request.evaluates, request.is_clipped, request.update_length) == (False, False, 3)
    assert charges(path) == [1 / 32]


def test_a_histogram_without_noise_is_declined(tmp_path: Path) -> None:
    measuring = joined(evaluates=True, norms=True, update_length=BINS)
    finish, detail, fake = visit(
        tmp_path / "device.db", terms(None), budget=None, join=answer(measuring)
    )
    assert finish == Finish("failed", "declined")
    assert "no noise" in detail
    assert not fake.uploads


def test_a_server_that_uses_another_name_does_not_reset_the_count(tmp_path: Path) -> None:
    """A task file is the same task under every alias."""
    path, found = tmp_path / "device.db", structs.replace(terms(2.0, most=1), task="in-the-file")
    visit(path, found)
    other = joined(task="renamed", parameters=KEY.replace("next-word", "renamed"))
    finish, detail, _ = visit(path, found, join=answer(other))
    assert finish == Finish("failed", "declined")
    assert "budget for task in-the-file is spent: this device has taken part 1 times" in detail


class FileTrainer(PrivateTrainer):
    tasks = ("next-word",)


def test_a_rejected_device_says_that_its_budget_for_a_task_is_spent(tmp_path: Path) -> None:
    """The server only knows that the device excludes the task."""
    path, found = tmp_path / "device.db", terms(2.0, most=1)
    rejected: dict[str, Any] = {"check-in": answer(Rejected("no demand", 3.0, 9.0))}
    _, before, _ = visit(path, found, trainer=FileTrainer, **rejected)
    assert before == ""
    visit(path, found, trainer=FileTrainer)
    _, after, _ = visit(path, found, trainer=FileTrainer, **rejected)
    assert "the privacy budget for task next-word is spent" in after


def test_participations_are_counted_whatever_the_server_says(tmp_path: Path) -> None:
    path = tmp_path / "device.db"
    with PrivacyLedger(path) as ledger:
        for _ in range(2):
            ledger.spend(Charge("keyboard", "", "next-word", "train", 0.125, 2), None, 0.0)
    finish, detail, _ = visit(path, terms(2.0, most=2))
    assert finish == Finish("failed", "declined")
    assert "taken part 2 times" in detail
