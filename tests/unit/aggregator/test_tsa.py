"""What the TSA says, in words of the aggregator."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from papaya.aggregator.masked_sum import LOST, TsaError
from papaya.aggregator.tsa import TsaAdapter, TsaEvidence
from papaya.aggregator.work import FAILED, UNREACHABLE
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.unmask import TakeBlock
from papaya.tsa.errors import RefusalReason, TsaRefused, Unavailable
from tests.unit.secagg.builders import NOW, Deployment, a_task

PARAMETERS = a_task()
STRANGE = {
    RefusalReason.UNKNOWN_INDEX,
    RefusalReason.UNKNOWN_PARAMETERS,
    RefusalReason.UNKNOWN_GROUP,
    RefusalReason.NOT_A_MEMBER,
}


class Failing:
    """Answers everything with one error."""

    identity_public_key = b"identity"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def register(self, parameters: PublicParameters) -> bytes:
        raise self._error

    def offers(self, parameters_hash: bytes, count: int) -> list[Offer]:
        raise self._error

    def accept(self, index: int, group: int, sealed: bytes) -> None:
        raise self._error

    def release(
        self, parameters: PublicParameters, group: int, members: Sequence[int], take: TakeBlock
    ) -> None:
        raise self._error

    def open_groups(self, parameters_hash: bytes) -> list[int]:
        raise self._error

    def drop(self, parameters_hash: bytes, group: int) -> int:
        raise self._error

    def forget(self, parameters_hash: bytes) -> int:
        raise self._error


def evidence(digest: bytes) -> TsaEvidence:
    return TsaEvidence("software", b"quote of " + digest, b"collateral", 7)


def reasons_of(error: Exception) -> list[str]:
    """By each of the three questions; accepting says nothing if it was done before."""
    tsa = TsaAdapter(Failing(error), evidence)
    questions = (
        lambda: tsa.offers(PARAMETERS, 3),
        lambda: tsa.accept(PARAMETERS, 1, 2, b"sealed"),
        lambda: tsa.release(PARAMETERS, 2, [1], lambda start, masks: None),
    )
    found = []
    for ask in questions:
        try:
            ask()
        except TsaError as refused:
            found.append(refused.reason)
    return found


def test_a_tsa_that_cannot_be_reached_is_not_lost() -> None:
    """It is asked again: it may be alive, and have the seeds."""
    assert reasons_of(Unavailable("no answer")) == [UNREACHABLE] * 3


def test_a_failure_of_its_own_is_no_refusal_of_masks() -> None:
    """It has the seeds, and may have more memory in a moment."""
    failed = TsaRefused(RefusalReason.INTERNAL, "no memory")
    assert reasons_of(failed) == ["refused_internal", "refused_internal", FAILED]


@pytest.mark.parametrize(
    "reason", sorted(set(RefusalReason) - {RefusalReason.REPLAYED, RefusalReason.INTERNAL})
)
def test_one_that_does_not_know_what_it_should_was_started_anew(reason: RefusalReason) -> None:
    expected = LOST if reason in STRANGE else f"refused_{reason.name.lower()}"
    assert reasons_of(TsaRefused(reason, "no")) == [expected] * 3


def test_a_tsa_of_an_earlier_version_is_named_as_the_reason() -> None:
    """The owner reads this in `papaya task show`; the TSA's own words name schemes only."""
    refused = TsaRefused(RefusalReason.PARAMETERS, "scheme = 'papaya-secagg-3': papaya-secagg-1")
    with pytest.raises(TsaError, match=r"'papaya-secagg-3'.*earlier version, upgrade it"):
        TsaAdapter(Failing(refused), evidence).offers(PARAMETERS, 3)


def test_a_seed_that_it_has_already_is_no_news() -> None:
    """Only for the seed: an offer or a release is never refused so."""
    tsa = TsaAdapter(Failing(TsaRefused(RefusalReason.REPLAYED, "already")), evidence)
    tsa.accept(PARAMETERS, 1, 2, b"sealed")


@pytest.mark.parametrize(
    "error",
    [Unavailable("no answer"), TsaRefused(RefusalReason.UNKNOWN_PARAMETERS, "never heard of it")],
)
def test_nobody_waits_for_a_task_to_be_forgotten(error: Exception) -> None:
    TsaAdapter(Failing(error), evidence).forget(PARAMETERS)


def test_any_other_error_is_a_bug_and_stays_one() -> None:
    tsa = TsaAdapter(Failing(ZeroDivisionError()), evidence)
    with pytest.raises(ZeroDivisionError):
        tsa.accept(PARAMETERS, 1, 2, b"sealed")


class Direct(Failing):
    """The TSA itself."""

    def __init__(self, deployment: Deployment) -> None:
        self._tsa = deployment.tsa
        self.identity_public_key = deployment.tsa.identity_public_key

    def register(self, parameters: PublicParameters) -> bytes:
        return self._tsa.register(parameters.encode())

    def offers(self, parameters_hash: bytes, count: int) -> list[Offer]:
        return self._tsa.offers(parameters_hash, count, NOW)


def test_offers_come_with_all_that_a_device_needs_to_believe_them() -> None:
    deployment = Deployment()
    parameters = a_task(task="another")
    offers, terms = TsaAdapter(Direct(deployment), evidence).offers(parameters, 3)
    assert [offer.index for offer in offers] == sorted(offer.index for offer in offers)
    assert len(offers) == 3
    for offer in offers:
        message = Offer.decode(offer.message)
        message.verify(terms.identity, parameters.digest(), NOW)
        assert (message.index, message.expires) == (offer.index, offer.expires)
    assert PublicParameters.decode(terms.parameters) == parameters
    told = (terms.platform, terms.evidence, terms.collateral, terms.leaf, terms.offer)
    assert told == ("software", b"quote of " + parameters.digest(), b"collateral", 7, b"")


class FullOfGroups(Failing):
    """Four groups are open, of buffers that were given up by roll-backs, but for the last one."""

    def __init__(self) -> None:
        self.groups = [3, 4, 6, 8]
        self.seeds: list[tuple[int, int]] = []

    def accept(self, index: int, group: int, sealed: bytes) -> None:
        if group not in self.groups and len(self.groups) == 4:
            raise TsaRefused(RefusalReason.TOO_MANY_GROUPS, "4 groups are open")
        self.seeds.append((index, group))

    def open_groups(self, parameters_hash: bytes) -> list[int]:
        return list(self.groups)

    def drop(self, parameters_hash: bytes, group: int) -> int:
        self.groups.remove(group)
        return 1


def test_groups_of_buffers_that_were_given_up_make_room_for_the_next_one() -> None:
    """Otherwise a task that was rolled back four times could never take an update again."""
    tsa = FullOfGroups()
    TsaAdapter(tsa, evidence).accept(PARAMETERS, 1, 9, b"sealed")
    assert tsa.seeds == [(1, 9)]
    assert tsa.groups == [8], "the buffer of 8 may still be open"


class RestartedMeanwhile(Direct):
    """Offers are made by one, the evidence is of another that was started before it was asked."""

    def evidence(self, digest: bytes) -> TsaEvidence:
        self.identity_public_key = b"another identity"
        return evidence(digest)


def test_offers_and_evidence_come_from_one_tsa_or_not_at_all() -> None:
    tsa = RestartedMeanwhile(Deployment())
    with pytest.raises(TsaError) as caught:
        TsaAdapter(tsa, tsa.evidence).offers(PARAMETERS, 3)
    assert caught.value.reason == LOST


def test_the_group_that_has_a_seed_is_told() -> None:
    tsa = TsaAdapter(Failing(TsaRefused(RefusalReason.OTHER_GROUP, "it is there", 7)), evidence)
    with pytest.raises(TsaError) as caught:
        tsa.accept(PARAMETERS, 1, 6, b"sealed")
    assert caught.value.group == 7
