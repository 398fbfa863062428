"""A device holds a server to what the owner has signed, also during a visit."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs

from papaya.client.work import Finish
from papaya.device.bundles import Bundle, BundleStore
from papaya.device.events import Event, VisitEnded
from papaya.device.executor import GivenUp
from papaya.device.training import ProtocolTrainer
from papaya.errors import OperatorError
from papaya.learning.definition import TaskTerms
from papaya.learning.evaluation import EVALUATION_LENGTH
from papaya.messages.participation import SecureOffer
from papaya.messages.selection import Accepted
from papaya.secagg.parameters import PublicParameters
from tests.unit.bundle.builders import a_manifest
from tests.unit.device.bundle_server import POLICY
from tests.unit.device.fake_selector import (
    GRANTED,
    UPDATE,
    FakeSelector,
    answer,
    device,
    joined,
    process,
    serving,
)

EVALUATION = joined(evaluates=True, task="next-word-eval-7", update_length=EVALUATION_LENGTH)


class OneBundle(BundleStore):
    """Every run has this bundle."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        super().__init__(folder, {POLICY.pin.owner: POLICY})
        self._bundle = Bundle(a_manifest(**changes), math.inf, folder)

    def of_run(self, run: str) -> Bundle:
        return self._bundle


class SecureTrainer(ProtocolTrainer):
    def terms(self, program: str) -> TaskTerms:
        return TaskTerms(True, 3, 1500, 50, 1.0, 2)


class Sealer:
    """A trust policy that accepts everything, and remembers that it was asked."""

    asked = False

    async def seal_aside(self, *_: Any, **__: Any) -> None:
        self.asked = True
        raise RuntimeError("sealed")


def visit(
    bundles: BundleStore, prepare: Callable[[FakeSelector], None], **changes: Any
) -> tuple[Finish, str, list[str]]:
    """How the visit ended, the detail in the device's log, and what the server was asked."""
    events: list[Event] = []
    trust = changes.pop("trust", None)

    async def scenario() -> tuple[Finish, list[str]]:
        async with asyncio.timeout(300), serving() as fake, process(trust=trust) as host:
            prepare(fake)
            with device(host, fake.url, bundles=bundles, notify=events.append, **changes) as phone:
                return await phone.visit(), fake.seen

    try:
        finish, seen = asyncio.run(scenario())
    finally:
        bundles.close()
    ended = events[-1]
    assert isinstance(ended, VisitEnded)
    return finish, ended.detail, seen


def test_an_upload_takes_no_longer_than_the_owner_has_signed(tmp_path: Path) -> None:
    """The server would let it go on for ten minutes."""

    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    def prepare(fake: FakeSelector) -> None:
        fake.replace["report"] = answer(structs.replace(GRANTED, upload_timeout_s=600.0))
        fake.replace["chunk"] = never

    finish, _, seen = visit(OneBundle(tmp_path, upload_timeout_s=0.2), prepare)
    assert finish == Finish("gave_up", "timed_out", detail="uploading took too long")
    assert seen[-1] == "leave"


def test_an_owner_who_signed_no_evaluations_gets_none(tmp_path: Path) -> None:
    def prepare(fake: FakeSelector) -> None:
        fake.replace["join"] = answer(EVALUATION)

    finish, detail, seen = visit(OneBundle(tmp_path, evaluation_clients=0), prepare)
    assert finish == Finish("failed", "mismatch")
    assert detail == "the owner of digits has signed no evaluations"
    assert seen == ["check-in", "join", "leave"], "the slot is free at once"


def test_a_planned_evaluation_in_the_clear_goes_on(tmp_path: Path) -> None:
    def prepare(fake: FakeSelector) -> None:
        fake.replace["join"] = answer(EVALUATION)

    _, _, seen = visit(OneBundle(tmp_path), prepare)
    assert "report" in seen


class Missing(OneBundle):
    """The bundle has to be fetched, and that fails."""

    def __init__(self, folder: Path, problem: OperatorError) -> None:
        super().__init__(folder)
        self._problem = problem

    def lacks(self, head_key: str, now: float) -> bool:
        return True

    async def fetch(self, head_key: str, download: object, accept: object, now: float) -> Bundle:
        self.asked_at = now
        raise self._problem


def needs_bundle(fake: FakeSelector) -> None:
    key = f"next-word/0/bundle-1-{'0' * 24}12345678"
    fake.replace["check-in"] = answer(Accepted(b"assignment", "next-word", "ab12", key))


def test_a_bundle_that_could_not_be_tried_is_tried_again_at_the_next_visit(tmp_path: Path) -> None:
    bundles = Missing(tmp_path, GivenUp("unavailable", "the training process ended"))
    finish, detail, _ = visit(bundles, needs_bundle)
    assert (finish.ending, detail) == ("unprepared", "the training process ended")
    assert bundles.refused(bundles.asked_at) == {}


def test_a_device_whose_disk_is_full_takes_no_slot_for_an_hour(tmp_path: Path) -> None:
    problem = "cannot keep bundles: No space left on device"
    bundles = Missing(tmp_path, OperatorError(problem, hint="free some"))
    finish, detail, seen = visit(bundles, needs_bundle)
    assert finish.ending == "unprepared"
    assert detail == "cannot keep bundles: No space left on device; hint: free some"
    assert seen == ["check-in", "leave"]  # the place is given back at once
    assert list(bundles.refused(bundles.asked_at + 3599)) == ["next-word@12345678"]
    assert bundles.refused(bundles.asked_at + 3600) == {}


@pytest.mark.parametrize(("clients", "is_sealed"), [(19, False), (20, True)])
def test_no_evaluation_reveals_a_sum_of_fewer_clients_than_signed(
    tmp_path: Path, clients: int, is_sealed: bool
) -> None:
    parameters = PublicParameters(
        task="next-word-eval-7",
        length=EVALUATION_LENGTH,
        aggregation_goal=clients,
        threshold=2,
        clip=1.0,
        max_examples=1,
        max_staleness=0,
        weighting="none",
    )
    offer = SecureOffer(parameters.encode(), bytes(112), bytes(32), "software", b"", b"", 0)

    def prepare(fake: FakeSelector) -> None:
        fake.replace["join"] = answer(structs.replace(EVALUATION, secure=True))
        fake.replace["report"] = answer(structs.replace(GRANTED, secure=offer))

    trainer = SecureTrainer(lambda session, length: UPDATE, lambda: 0.0)
    sealer = Sealer()
    bundles = OneBundle(tmp_path, evaluation_clients=20)
    finish, detail, seen = visit(bundles, prepare, trust=sealer, trainer=trainer)
    assert finish == Finish("failed", "untrusted" if is_sealed else "mismatch")
    assert (sealer.asked, "signed at least 20" in detail) == (is_sealed, not is_sealed)
    assert "chunk" not in seen
