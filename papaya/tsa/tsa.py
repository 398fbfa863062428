"""The Trusted Secure Aggregator (TSA): it takes seeds and returns one sum of masks per group.

Paper, "Protocol Design and Security Proof" and "Deployment with Intel SGX". The server may be
malicious; it learns what the ideal functionality gives it: for each group one sum of at least t
clients, and each client in at most one sum. Why that holds:

- An index is drawn once, belongs to one task's parameters, and takes one seed, into one group.
- A group is released once, for one list of its own members, at least t and all different. The same
  question gets the same bytes, which helps an aggregator after a crash and tells it nothing new.
- With noise (docs/privacy.md), a device is in a group once: its tag is refused a second time. The
  noise follows from a key that is drawn when the group opens, so it is the same in every answer.
- Groups of a task are released in rising order: what is at or below the last release is closed.
- Nothing is written to disk, ever: state that is read back could be an old copy, with its indices
  unused and its groups unreleased. A restart has a new identity, and what was open is lost.

A plain object: `now` and entropy are arguments, nothing is sent, all state is bounded, raising
leaves it unchanged. Everything it refuses is a `TsaRefused` with its reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from papaya.secagg import channel
from papaya.secagg.errors import ChannelError, ParametersError
from papaya.secagg.noise import KEY_BYTES as NOISE_KEY_BYTES
from papaya.secagg.offer import KEY_BYTES, Offer, context
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.words import Entropy, Words
from papaya.tsa.errors import RefusalReason, TsaRefused
from papaya.tsa.group import Group

MAX_NUMBER: Final = 2**63 - 1  # of groups and indices


@dataclass(frozen=True, kw_only=True, slots=True)
class TsaLimits:
    """What the host may make the TSA hold."""

    tasks: int = 64
    memory_bytes: int = 16 << 30  # for sums; a task that might need more is not registered
    outstanding_offers: int = 1 << 16  # per task; above it the oldest end
    open_groups: int = 4  # per task
    left_over_seeds: int = 1024  # per group, beyond the aggregation goal
    offer_lifetime_s: int = 3600


DEFAULT_LIMITS: Final = TsaLimits()


@dataclass(frozen=True, slots=True)
class TsaStatus:
    """What a task holds: a successor of a crashed aggregator finds its open groups here."""

    outstanding_offers: int
    waiting_seeds: int
    released_group: int | None
    groups: tuple[tuple[int, int], ...]
    """Each open group with its number of seeds."""


@dataclass(slots=True)
class _Pending:
    private_key: bytes
    public_key: bytes
    expires: int


@dataclass(slots=True)
class _Released:
    group: int
    members: tuple[int, ...]
    masks: Words


@dataclass(slots=True)
class _Task:
    parameters: PublicParameters
    digest: bytes
    pending: dict[int, _Pending] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    released: _Released | None = None
    closed_through: int = -1


@dataclass(slots=True)
class _Accepted:
    """Where an index's seed is, until its group is over."""

    task: _Task
    group: int
    sealed_digest: bytes


def report_data(identity_public_key: bytes, parameters_hash: bytes) -> bytes:
    """The 64 bytes that a quote binds: whoever holds this key keeps to these parameters."""
    return identity_public_key + parameters_hash


class TSA:
    """Invariants: an index is pending, accepted into one open group, or gone; limits are kept."""

    def __init__(self, entropy: Entropy, limits: TsaLimits = DEFAULT_LIMITS) -> None:
        self._entropy = entropy
        self._limits = limits
        self._identity = Ed25519PrivateKey.from_private_bytes(entropy(32))
        self._tasks: dict[bytes, _Task] = {}
        self._task_of_pending: dict[int, _Task] = {}
        self._accepted: dict[int, _Accepted] = {}
        self._next_index = 0

    @property
    def identity_public_key(self) -> bytes:
        """The Ed25519 key that signs offers; drawn anew at every start."""
        return self._identity.public_key().public_bytes_raw()

    def report_data(self, parameters_hash: bytes) -> bytes:
        """What a quote for this task must bind; only for parameters that are kept here."""
        self._task(parameters_hash)
        return report_data(self.identity_public_key, parameters_hash)

    # --- Tasks ---------------------------------------------------------------------------------

    def register(self, encoded_parameters: bytes) -> bytes:
        """Takes a task's public parameters; returns their hash, by which the task is named."""
        try:
            parameters = PublicParameters.decode(encoded_parameters)
        except ParametersError as error:
            raise TsaRefused(RefusalReason.PARAMETERS, str(error)) from None
        digest = parameters.digest()
        if digest in self._tasks:
            return digest
        if len(self._tasks) >= self._limits.tasks:
            raise TsaRefused(
                RefusalReason.TOO_MANY_TASKS, f"{self._limits.tasks} tasks are registered"
            )
        reserved = sum(self._reserved_bytes(task.parameters) for task in self._tasks.values())
        if reserved + self._reserved_bytes(parameters) > self._limits.memory_bytes:
            needed = self._reserved_bytes(parameters)
            message = f"not enough memory for this task's sums: {needed} bytes needed"
            raise TsaRefused(RefusalReason.TOO_MUCH_MEMORY, message)
        self._tasks[digest] = _Task(parameters, digest)
        return digest

    def _reserved_bytes(self, parameters: PublicParameters) -> int:
        # Every open group has a sum, and the last unmask is kept.
        return (self._limits.open_groups + 1) * parameters.vector_bytes

    def forget(self, parameters_hash: bytes) -> int:
        """Drops a task with all that it holds; returns how many accepted seeds that were."""
        task = self._task(parameters_hash)
        dropped = sum(self._drop_group(task, group) for group in tuple(task.groups))
        for index in task.pending:
            del self._task_of_pending[index]
        del self._tasks[parameters_hash]
        return dropped

    # --- Offers --------------------------------------------------------------------------------

    def offers(self, parameters_hash: bytes, count: int, now: float) -> list[Offer]:
        """So many new initial messages of this task, in the order of their indices.

        Clients that take offers and leave must not starve those who come after them: the oldest
        offers end for new ones. Uploads end long before so many others have begun.
        """
        task = self._task(parameters_hash)
        limit = self._limits.outstanding_offers
        if not 1 <= count <= limit:
            message = f"{count} offers requested; request 1 to {limit}"
            raise TsaRefused(RefusalReason.TOO_MANY_OFFERS, message)
        self._forget_expired(task, now)
        while len(task.pending) > limit - count:
            self._end_oldest(task)
        expires = int(now) + self._limits.offer_lifetime_s
        return [self._offer(task, expires) for _ in range(count)]

    def _offer(self, task: _Task, expires: int) -> Offer:
        private_key = self._entropy(KEY_BYTES)
        pending = _Pending(private_key, channel.public_key(private_key), expires)
        index = self._next_index
        offer = Offer.signed(self._identity, task.digest, index, pending.public_key, expires)
        self._next_index += 1
        task.pending[index] = pending
        self._task_of_pending[index] = task
        return offer

    def _forget_expired(self, task: _Task, now: float) -> None:
        # The oldest come first. Should a clock have run backwards, some stay a little longer,
        # and are refused all the same when a seed comes for them.
        while task.pending and now >= next(iter(task.pending.values())).expires:
            self._end_oldest(task)

    def _end_oldest(self, task: _Task) -> None:
        index = next(iter(task.pending))
        del task.pending[index]
        del self._task_of_pending[index]

    def task_of(self, index: int) -> bytes | None:
        """The hash of the parameters that a pending or accepted index belongs to."""
        if (task := self._task_of_pending.get(index)) is not None:
            return task.digest
        accepted = self._accepted.get(index)
        return None if accepted is None else accepted.task.digest

    # --- Seeds ---------------------------------------------------------------------------------

    def accept(self, index: int, group: int, sealed: bytes, now: float) -> None:
        """Takes the seed of one index into a group. REPLAYED: exactly this was done before;
        OTHER_GROUP: it was, for another group that is still open.
        """
        task = self._task_of_pending.get(index)
        if task is None:
            raise self._not_pending(index, group, sealed)
        pending = task.pending[index]
        if not now < pending.expires:
            message = f"offer {index} ended {now - pending.expires:.0f} s ago"
            raise TsaRefused(RefusalReason.OFFER_EXPIRED, message)
        self._check_open(task, group)
        bound_to = context(task.digest, index, pending.public_key, pending.expires)
        is_private = task.parameters.is_private
        try:
            seed, tag = channel.unseal(sealed, pending.private_key, bound_to, is_tagged=is_private)
        except ChannelError as error:
            raise TsaRefused(RefusalReason.SEAL, f"{error.reason}: {error}") from None
        if group in task.groups and task.groups[group].has_tag(tag):
            message = f"seed {index}: group {group} has an update of this device already"
            raise TsaRefused(RefusalReason.SAME_DEVICE, message)
        del task.pending[index]
        del self._task_of_pending[index]
        self._accepted[index] = _Accepted(task, group, hashlib.sha256(sealed).digest())
        if group not in task.groups:
            noise_key = self._entropy(NOISE_KEY_BYTES) if is_private else b""
            task.groups[group] = Group(task.parameters, noise_key)
        task.groups[group].add(index, seed, tag)

    def _not_pending(self, index: int, group: int, sealed: bytes) -> TsaRefused:
        if not 0 <= index < self._next_index:
            return TsaRefused(RefusalReason.UNKNOWN_INDEX, f"no offer {index} was made")
        if (found := self._accepted.get(index)) is None:
            return TsaRefused(RefusalReason.INDEX_USED, f"offer {index} was used, or ended")
        same = hashlib.sha256(sealed).digest() == found.sealed_digest
        if not same:
            message = f"offer {index} was used: another seed of it is in group {found.group}"
            return TsaRefused(RefusalReason.INDEX_USED, message)
        if group == found.group:
            return TsaRefused(RefusalReason.REPLAYED, f"seed {index} is in group {group} already")
        message = f"seed {index} is in group {found.group}"
        return TsaRefused(RefusalReason.OTHER_GROUP, message, found.group)

    def _check_open(self, task: _Task, group: int) -> None:
        if not 0 <= group <= MAX_NUMBER:
            raise TsaRefused(RefusalReason.MALFORMED, f"group = {group}: from 0 to {MAX_NUMBER}")
        if group <= task.closed_through:
            message = f"groups up to {task.closed_through} are over"
            raise TsaRefused(RefusalReason.GROUP_CLOSED, f"group {group}: {message}")
        if group not in task.groups and len(task.groups) >= self._limits.open_groups:
            message = f"{len(task.groups)} groups are open: release or drop one first"
            raise TsaRefused(RefusalReason.TOO_MANY_GROUPS, message)
        limit = task.parameters.aggregation_goal + self._limits.left_over_seeds
        if group in task.groups and len(task.groups[group]) >= limit:
            raise TsaRefused(RefusalReason.GROUP_FULL, f"group {group} has {limit} seeds")

    def sum_waiting(self) -> bool:
        """Works ahead for a release: sums one group's waiting seeds, or adds a piece of its noise.
        False if there was nothing to do.
        """
        return any(
            group.work_ahead() for task in self._tasks.values() for group in task.groups.values()
        )

    # --- Release -------------------------------------------------------------------------------

    def release(self, parameters_hash: bytes, group: int, members: Sequence[int]) -> Words:
        """The sum of exactly these members' masks; `members` in rising order. Do not write to it.

        Seeds of the group that are not named are dropped, as are groups below it.
        """
        task = self._task(parameters_hash)
        listed = tuple(members)
        if task.released is not None and group == task.released.group:
            if listed != task.released.members:
                message = f"group {group} was released for another list"
                raise TsaRefused(RefusalReason.OTHER_LIST, message)
            return task.released.masks
        if group <= task.closed_through:
            message = f"group {group}: groups up to {task.closed_through} are over"
            raise TsaRefused(RefusalReason.GROUP_CLOSED, message)
        if group not in task.groups:
            raise TsaRefused(RefusalReason.UNKNOWN_GROUP, f"group {group} has no seeds")
        self._check_members(task, group, listed)
        masks = task.groups[group].masks_of(listed)
        masks.flags.writeable = False
        task.released = _Released(group, listed, masks)
        task.closed_through = group
        for over in [number for number in task.groups if number <= group]:
            self._drop_group(task, over)
        return masks

    def _check_members(self, task: _Task, group: int, members: tuple[int, ...]) -> None:
        if any(a >= b for a, b in pairwise(members)):
            raise TsaRefused(RefusalReason.MALFORMED, "members must be in rising order, each once")
        parameters = task.parameters
        if len(members) < parameters.threshold:
            message = f"{len(members)} members, a sum needs {parameters.threshold}"
            raise TsaRefused(RefusalReason.BELOW_THRESHOLD, message)
        if len(members) > parameters.aggregation_goal:
            message = f"{len(members)} members, the goal is {parameters.aggregation_goal}"
            raise TsaRefused(RefusalReason.ABOVE_GOAL, message)
        for index in members:
            if index not in task.groups[group]:
                raise TsaRefused(
                    RefusalReason.NOT_A_MEMBER, f"seed {index} is not in group {group}"
                )

    def drop(self, parameters_hash: bytes, group: int) -> int:
        """Gives up an open group; returns how many seeds are lost with it, for good."""
        task = self._task(parameters_hash)
        if group not in task.groups:
            raise TsaRefused(RefusalReason.UNKNOWN_GROUP, f"group {group} is not open")
        return self._drop_group(task, group)

    def _drop_group(self, task: _Task, group: int) -> int:
        gone = task.groups.pop(group)
        for index in gone.indices:
            del self._accepted[index]
        return len(gone)

    # --- What can be seen ----------------------------------------------------------------------

    def status(self, parameters_hash: bytes) -> TsaStatus:
        task = self._task(parameters_hash)
        return TsaStatus(
            outstanding_offers=len(task.pending),
            waiting_seeds=sum(group.waiting for group in task.groups.values()),
            released_group=None if task.released is None else task.released.group,
            groups=tuple((number, len(group)) for number, group in task.groups.items()),
        )

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for task in self._tasks.values():
            assert len(task.pending) <= self._limits.outstanding_offers
            assert len(task.groups) <= self._limits.open_groups
            assert all(number > task.closed_through for number in task.groups)
            for number, group in task.groups.items():
                for index in group.indices:
                    found = self._accepted[index]
                    assert found.task is task
                    assert found.group == number
                    assert index not in self._task_of_pending
        grouped = sum(len(g) for task in self._tasks.values() for g in task.groups.values())
        assert grouped == len(self._accepted)
        assert sum(len(t.pending) for t in self._tasks.values()) == len(self._task_of_pending)

    def _task(self, parameters_hash: bytes) -> _Task:
        if (task := self._tasks.get(parameters_hash)) is None:
            raise TsaRefused(
                RefusalReason.UNKNOWN_PARAMETERS, "no task has these public parameters"
            )
        return task
