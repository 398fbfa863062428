"""What must hold under secure aggregation, checked from outside the machines.

The auditor knows what no single part of the system knows: what each device trained on and masked,
which seed the TSA took into which group, and which sums it released. From that it recomputes every
masked sum and every step, in whole numbers, and requires:

- a device seals one update once, for an offer that no other device got, and sends only those bytes;
- a client gets offers for the manifest that it joined under, and all members of a record have
  agreed to the same manifest;
- a seed is taken into one group, and a record names only members whose seeds are in its group;
- masks are released for exactly the members of a full and durable record;
- a version is one step with its members' fixed-point sum; or it repeats its predecessor, but only
  if a seed was lost with an earlier TSA, a member sent a wrong seed, or a revision left the buffer
  unfilled;
- a private sum has one update of a device at most, the constant says how many there are and nothing
  else, and the noise of all sums together has the promised size; a repeated release is the same;
- in Z_2^16 each update is rounded by less than a step, and all sums together by nothing on average;
- no update is discarded as lost with the TSA while the TSA that it was sealed for is running.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import log, sqrt
from typing import NamedTuple

import numpy as np

from papaya.client.work import Seal, Sealed
from papaya.config import TaskConfig
from papaya.errors import InvariantError
from papaya.learning.parameters import FLOAT32, Vector, decode_tensors
from papaya.messages.base import Message, SessionId, TaskId
from papaya.messages.participation import Chunk, Complete, Joined, SecureOffer
from papaya.messages.storage import (
    Member,
    OptimizerRow,
    RecordRow,
    Row,
    VersionRow,
    optimizer_key,
    record_key,
    version_key,
)
from papaya.messages.tickets import UploadTicket
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.words import RING_16, RING_32, Ring, Words
from papaya.sim.protocol_updates import protocol_evaluation, protocol_vector
from papaya.sim.tsa_twin import TsaTwin

_UNLIKELY = 30.0  # 1e-13
_DEVIATIONS = 8.0  # of the sum of many rounding errors
Seed = tuple[bytes, int]
"""An identity of the TSA, and an index of its offers."""


class Granted(NamedTuple):
    """To whom an offer was given, and what that client was told to be the current version."""

    session: SessionId
    version: int


class SealedOnce(NamedTuple):
    """All that one device ever sends of one update, and the truth under the mask."""

    seed: Seed
    parameters: bytes
    update: bytes
    sealed: bytes
    examples: int
    staleness: int
    is_lie: bool
    device: int


def demand(holds: bool, promise: str) -> None:
    if not holds:
        raise InvariantError(promise)


class SecureAuditor:
    """Books over all secure tasks of a cluster. `rows` are those of the state store."""

    def __init__(self, tasks: Sequence[TaskConfig], rows: dict[str, Row], tsa: TsaTwin) -> None:
        self._rows = rows
        self._tsa = tsa
        # By task and manifest. `_task_of` finds both by the hash of the parameters.
        self._parameters: dict[tuple[TaskId, bytes], PublicParameters] = {}
        self._task_of: dict[bytes, tuple[TaskId, bytes]] = {}
        # The current manifest of each secure task.
        self._current: dict[TaskId, bytes] = {}
        for task in tasks:
            self.watch(task)
        self._granted: dict[Seed, Granted] = {}
        self._sealed: dict[SessionId, SealedOnce] = {}
        self._group_of: dict[Seed, int] = {}
        # Records as last written: an owner may give up one that a holder is about to release.
        self._recorded: dict[str, RecordRow] = {}
        self._released: dict[tuple[bytes, TaskId, int], tuple[int, ...]] = {}
        # The last answer for a group; all devices of a private group; and the noise of all private
        # sums, in standard deviations.
        self._answers: dict[tuple[bytes, TaskId, int], Words] = {}
        self._masks: dict[tuple[TaskId, int], Words] = {}
        self._devices_in: dict[tuple[bytes, bytes, int], dict[int, None]] = {}
        self._noise: list[float] = []
        # What rounding at random has added to all sums so far, and the variance of that, in steps.
        self._rounded, self._rounded_variance = 0.0, 0.0
        tsa.on_accepted = self._on_accepted
        tsa.on_released = self._on_released

    def watch(self, config: TaskConfig) -> None:
        """A task that was submitted or revised; only secure ones are audited."""
        if config.public_parameters is not None:
            name = config.task, config.manifest
            self._parameters[name] = config.public_parameters
            self._task_of[config.public_parameters.digest()] = name
            self._current[config.task] = config.manifest

    def audits(self, task: TaskId) -> bool:
        return task in self._current

    # -- devices ----------------------------------------------------------------------------

    def check_agreed(self, ticket: UploadTicket, offer: SecureOffer | None) -> None:
        agreed = self._parameters[ticket.task, ticket.manifest].encode()
        is_agreed = offer is not None and offer.parameters == agreed
        demand(is_agreed, f"{ticket.session} got an offer for another manifest")

    def on_granted(
        self, session: SessionId, index: int, version: int, offer: SecureOffer | None
    ) -> None:
        if offer is None:
            raise InvariantError(f"{session} was granted an upload without an offer")
        found = Offer.decode(offer.offer).index
        demand(found == index, f"the ticket of {session} names offer {index}, it got {found}")
        granted = self._granted.setdefault((offer.identity, index), Granted(session, version))
        demand(
            granted == (session, version),
            f"offer {index} was given to {granted.session} and to {session}",
        )

    def on_sealed(
        self,
        joined: Joined,
        examples: int,
        work: Seal,
        done: Sealed,
        is_lie: bool,
        device: int = 0,
    ) -> None:
        """A device has made what it will send. `examples` is what it really trained on."""
        session = joined.session
        demand(session not in self._sealed, f"the update of {session} was sealed twice")
        is_finite = bool(np.isfinite(np.frombuffer(work.update, FLOAT32)).all())
        demand(is_finite, f"{session} masked NaN or infinity")
        seed = work.offer.identity, Offer.decode(work.offer.offer).index
        granted = self._granted.get(seed)
        demand(
            granted is not None and granted.session == session,
            f"{session} sealed for offer {seed[1]}, which it was not given",
        )
        assert granted is not None
        staleness = granted.version - joined.version
        truth = seed, work.offer.parameters, done.update, done.sealed, examples, staleness, is_lie
        self._sealed[session] = SealedOnce(*truth, device)

    def on_request(self, session: SessionId, message: Message, chunk_bytes: int) -> None:
        """Whatever is lost, the bytes are the same: sealed twice they would tell two sums apart."""
        if not isinstance(message, Chunk | Complete):
            return
        sealed = self._sealed.get(session)
        if sealed is None:
            raise InvariantError(f"{session} sends an update that it has not masked")
        if isinstance(message, Complete):
            demand(message.sealed == sealed.sealed, f"{session} sends another sealed seed")
        else:
            start = message.index * chunk_bytes
            same = message.data == sealed.update[start : start + chunk_bytes]
            demand(same, f"{session} sends another masked update")

    def check_discarded_as_lost(self, session: SessionId) -> None:
        """A TSA that does not answer has everything that it had."""
        sealed = self._sealed.get(session)
        demand(
            sealed is None or sealed.seed[0] != self._tsa.identity_public_key,
            f"{session} was discarded as lost, but the TSA that it sealed for lives",
        )

    # -- the TSA ------------------------------------------------------------------

    def _on_accepted(self, index: int, group: int) -> None:
        seed = self._tsa.identity_public_key, index
        demand(
            seed in self._granted, f"seed {index} was taken, but its offer was given to no device"
        )
        known = self._group_of.setdefault(seed, group)
        demand(known == group, f"seed {index} was taken into group {known} and into {group}")
        sealed = self._sealed.get(self._granted[seed].session)
        if sealed is not None and b"noise_multiplier" in sealed.parameters:
            found = self._devices_in.setdefault((seed[0], sealed.parameters, group), {})
            once = sealed.device not in found
            demand(once, f"group {group} has two updates of device {sealed.device}")
            found[sealed.device] = None

    def _on_released(
        self, digest: bytes, group: int, members: tuple[int, ...], masks: Words
    ) -> None:
        task, manifest = self._task_of[digest]
        key = self._tsa.identity_public_key, task, group
        if key not in self._released:
            name = record_key(task, group)
            record = self._rows.get(name, self._recorded.get(name))
            goal = self._parameters[task, manifest].aggregation_goal
            is_closed = (
                isinstance(record, RecordRow)
                and record.manifest == manifest
                and len(record.members) == goal
            )
            demand(is_closed, f"masks of group {group} of {task} were released before it closed")
            assert isinstance(record, RecordRow)
            self._released[key] = tuple(sorted(member.offer for member in record.members))
        demand(
            members == self._released[key],
            f"masks of {members} were released, group {group} of {task} has {self._released[key]}",
        )
        same = bool(np.array_equal(self._answers.setdefault(key, masks), masks))
        demand(same, f"group {group} of {task} was released twice, with different answers")
        self._masks[task, group] = masks

    # -- records and versions ---------------------------------------------------------------

    def check_record(self, task: TaskId, row: RecordRow, blob: bytes) -> None:
        """The masked sum is that of its members, whose seeds are in the record's group."""
        self._recorded[record_key(task, row.target)] = row
        agreed = self._parameters[task, row.manifest]
        expected = np.zeros(agreed.vector_words, agreed.ring.word)
        for member in row.members:
            expected += self._masked_by(member, row.target, agreed)
        tensors, _ = decode_tensors(blob, ["masked"], expected.size, agreed.ring.word)
        same = bool(np.array_equal(tensors["masked"], expected))
        demand(same, f"the masked sum of record {row.target} of {task} is not that of its members")

    def _masked_by(self, member: Member, target: int, agreed: PublicParameters) -> Words:
        session = member.session
        demand(session in self._sealed, f"{session} is counted, but it masked nothing")
        sealed = self._sealed[session]
        is_agreed = sealed.parameters == agreed.encode()
        demand(
            is_agreed, f"{session} is in record {target}, whose members agreed to another manifest"
        )
        demand(
            (member.offer, member.staleness) == (sealed.seed[1], sealed.staleness),
            f"{session} sealed for offer {sealed.seed[1]} at staleness {sealed.staleness}, its "
            f"record says {member.offer} at {member.staleness}",
        )
        group = self._group_of.get(sealed.seed)
        demand(
            group == target,
            f"{session} is in record {target}, its seed in group {group} of the TSA",
        )
        return np.frombuffer(sealed.update, agreed.ring.word)

    def is_dropped(self, task: TaskId, version: int) -> bool:
        """A masked buffer was given up: its version is the predecessor again."""
        new, old = (self._rows[version_key(task, v)] for v in (version, version - 1))
        assert isinstance(new, VersionRow)
        assert isinstance(old, VersionRow)
        return self.audits(task) and new.parameters == old.parameters

    def check_dropped(self, task: TaskId, record: RecordRow, before: Row) -> None:
        """Its version is the predecessor again: there must have been a reason.

        `before` is the optimizer row that the version replaced.
        """
        after = self._rows[optimizer_key(task)]
        assert isinstance(before, OptimizerRow)
        assert isinstance(after, OptimizerRow)
        demand(
            (after.version, after.state) == (record.target, before.state),
            f"version {record.target} of {task} dropped its buffer and changed the optimizer",
        )
        now = self._tsa.identity_public_key
        sealed = [self._sealed[member.session] for member in record.members]
        is_lost = any(member.seed[0] != now for member in sealed)
        is_full = len(sealed) == self._parameters[task, record.manifest].aggregation_goal
        is_revised = record.manifest != self._current[task] and not is_full
        demand(
            is_lost or is_revised or (is_full and any(member.is_lie for member in sealed)),
            f"version {record.target} of {task} dropped a buffer that could be used",
        )

    def expected_mean(self, task: TaskId, record: RecordRow) -> Vector:
        """The mean of the members' updates, through the fixed point and back, in whole numbers."""
        parameters = self._parameters[task, record.manifest]
        if parameters.ring == RING_16:
            return self._mean_of_rounded(task, record, parameters)
        total, weight = [0] * parameters.length, 0
        for member in record.members:
            sealed = self._honest(member)
            uploaded = protocol_evaluation if parameters.weighting == "none" else protocol_vector
            vector = uploaded(member.session, parameters.length)
            steps, share = _fixed_point(parameters, vector, sealed)
            total = [a + b for a, b in zip(total, steps, strict=True)]
            weight += share
        factor = parameters.step / (weight / parameters.levels)
        if parameters.is_private:
            total = self._noised(task, record, parameters, total)
            factor = parameters.step / (len(record.members) * parameters.expected_weight)
        mean: Vector = np.array([float(step) * factor for step in total]).astype(FLOAT32)
        return mean

    def _honest(self, member: Member) -> SealedOnce:
        sealed = self._sealed[member.session]
        demand(not sealed.is_lie, f"{member.session} lied about its seed and was stepped with")
        return sealed

    def _unmasked(self, task: TaskId, record: RecordRow, ring: Ring) -> list[int]:
        """The released sum, without the constant."""
        words = -self._masks[task, record.target]
        for member in record.members:
            words = words + np.frombuffer(self._sealed[member.session].update, ring.word)
        count = int(words[-1])
        demand(count == len(record.members), f"the constant of {task} says {count}")
        return [int(word) for word in words[:-1].view(ring.signed)]

    def _mean_of_rounded(
        self, task: TaskId, record: RecordRow, parameters: PublicParameters
    ) -> Vector:
        """The mean of the released sum, after a look at how it was rounded."""
        found = self._unmasked(task, record, RING_16)
        exact = [Fraction(0)] * len(found)
        for member in record.members:
            vector = protocol_vector(member.session, parameters.length)
            for at, value in enumerate(_unrounded(parameters, vector, self._honest(member))):
                exact[at] += value
                part = float(value % 1)
                self._rounded_variance += part * (1 - part)
        errors = [word - value for word, value in zip(found, exact, strict=True)]
        most = max(map(abs, errors))
        is_near = most < len(record.members) * (1 + 2.0**-16)
        demand(is_near, f"a sum of {task} is off by {float(most):.3g} steps")
        self._rounded += float(sum(errors))
        limit = _DEVIATIONS * sqrt(self._rounded_variance) + 1
        is_fair = abs(self._rounded) <= limit
        demand(
            is_fair, f"{task}: rounding has added {self._rounded:.1f} steps, at most {limit:.1f}"
        )
        *steps, weight = found
        factor = parameters.step / (weight / parameters.levels)
        return np.array([step * factor for step in steps]).astype(FLOAT32)

    def _noised(
        self, task: TaskId, record: RecordRow, parameters: PublicParameters, total: list[int]
    ) -> list[int]:
        """The released sum, after a look at its noise."""
        found = self._unmasked(task, record, RING_32)
        sigma = float(parameters.sigma)
        self._noise += [(a - b) / sigma for a, b in zip(found, total, strict=True)]
        self._check_noise(task)
        return found

    def _check_noise(self, task: TaskId) -> None:
        """The squares of n standard normals add up to about n. By the bound of Chernoff, their mean
        is beyond x with a probability of at most exp(-n/2 (x - 1 - ln x)).
        """
        n = len(self._noise)
        mean = max(sum(value * value for value in self._noise) / n, 1e-300)
        is_likely = n / 2 * (mean - 1 - log(mean)) < _UNLIKELY
        demand(is_likely, f"{task}: the noise of {n} words has a mean square of {mean:.3g}, not 1")


def _fixed_point(
    parameters: PublicParameters, vector: Iterable[float], sealed: SealedOnce
) -> tuple[list[int], int]:
    """What an honest device has to add, before its mask: weighted update, and weight."""
    if parameters.weighting == "none":  # counts: as they are
        return [round(value) for value in vector], parameters.levels
    weight, factor = _weight_and_factor(parameters, sealed)
    limit = parameters.levels
    steps = [max(-limit, min(limit, round(value * factor))) for value in vector]
    return steps, round(weight * limit)


def _unrounded(
    parameters: PublicParameters, vector: Iterable[float], sealed: SealedOnce
) -> list[Fraction]:
    """What an honest device has to add on average: weighted update, and weight."""
    weight, factor = _weight_and_factor(parameters, sealed)
    limit = Fraction(parameters.levels)
    steps = [max(-limit, min(limit, Fraction(value * factor))) for value in vector]
    return [*steps, Fraction(weight * parameters.levels)]


def _weight_and_factor(parameters: PublicParameters, sealed: SealedOnce) -> tuple[float, float]:
    weight = min(sealed.examples, parameters.max_examples) / parameters.max_examples
    weight = 1.0 if parameters.weighting == "equal" else weight
    damping = parameters.damping.factor(sealed.staleness)
    return weight, weight * damping * (parameters.levels / parameters.clip)
