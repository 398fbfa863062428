"""Events: what servers report to operators. One class for each question of an operator.

A machine has no logger. It returns a `Log` effect with an event, and the driver writes it: as text
or as JSON lines (papaya/server/logs.py), or not at all (papaya/sim, whose checkers count events).
Parts of a server that are not machines give their events to the same log.

Fields have the same names everywhere: `task`, `run` (left out for unsigned tasks), `version`, `seq`
(of a holder's fence), `peer` (another node or address), `why`. The log adds `node`, who tells it.
No field contains a secret or anything that a device sent.

docs/logs.md lists the events; `python -m tools.event_reference` writes that list.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from msgspec import Struct, structs

from papaya.messages.base import Boot, NodeId, TaskId

Level = Literal["debug", "info", "warning", "error"]

_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class ServerEvent(Struct, frozen=True, gc=False):
    """`identity`: events of one class with equal values there count as repetitions."""

    level: ClassVar[Level] = "info"
    identity: ClassVar[tuple[str, ...]] = ("task", "peer")

    @classmethod
    def name(cls) -> str:
        return _WORD.sub("_", cls.__name__).lower()

    @property
    def repeats(self) -> tuple[object, ...]:
        """Equal for events that count as repetitions."""
        fields = self.fields
        return (self.name(), *(fields.get(name) for name in self.identity))

    @property
    def fields(self) -> dict[str, object]:
        """The fields to write: empty texts and a run of 0 are left out."""
        found = structs.asdict(self)
        return {
            name: value
            for name, value in found.items()
            if value not in ("", (), None) and not (name == "run" and value == 0)
        }


# -- processes ----------------------------------------------------------------------------------


class ServerStarted(ServerEvent, frozen=True):
    """A server process starts. `settings`: its configuration as JSON, without secrets."""

    papaya: str
    roles: tuple[str, ...]
    settings: str


class NodeStarted(ServerEvent, frozen=True):
    """One role of the process runs. `boot`: how often this node has started."""

    boot: Boot


class ServerStopping(ServerEvent, frozen=True):
    """The process stops: a signal, or the error that makes it stop."""

    why: str


class CertificatesRead(ServerEvent, frozen=True):
    """Certificate files have changed; new connections use them."""


class CertificatesRefused(ServerEvent, frozen=True):
    """Certificate files have changed and cannot be used."""

    level = "error"

    why: str


class TokenReplaced(ServerEvent, frozen=True):
    """A token file has changed. The old token is refused."""

    level = "warning"
    identity = ("file",)

    file: str


# -- coordinators -------------------------------------------------------------------------------


class LeadershipGained(ServerEvent, frozen=True):
    """This coordinator leads."""

    epoch: int
    why: str


class LeadershipLost(ServerEvent, frozen=True):
    """This coordinator no longer leads."""

    level = "warning"

    epoch: int
    why: str


class ServerSeen(ServerEvent, frozen=True):
    """The leader has heard from an aggregator or a selector for the first time, or again."""

    peer: NodeId
    boot: Boot


class ServerSilent(ServerEvent, frozen=True):
    """An aggregator or a selector counts as dead: no report for three heartbeats."""

    level = "warning"

    peer: NodeId
    silent_s: float


class ClockDiffers(ServerEvent, frozen=True):
    """The clock of a server is too far from the leader's."""

    level = "warning"

    peer: NodeId
    ahead_s: float
    is_refused: bool


class TaskFound(ServerEvent, frozen=True):
    """A leader finds a task for the first time. `holder` is empty if the task is not placed."""

    level = "debug"

    task: TaskId
    run: int
    seq: int
    holder: NodeId


class TaskPlaced(ServerEvent, frozen=True):
    """A task that no aggregator held was given to one."""

    task: TaskId
    run: int
    seq: int
    holder: NodeId
    why: str


class TaskMoved(ServerEvent, frozen=True):
    """A task was moved from one aggregator to another, or to the same one after a restart."""

    level = "warning"

    task: TaskId
    run: int
    seq: int
    holder: NodeId
    before: NodeId
    why: str


class TaskReleased(ServerEvent, frozen=True):
    """A task was taken from its holder: it was revised or rolled back, or all training stopped."""

    task: TaskId
    run: int
    seq: int
    before: NodeId


# -- aggregators --------------------------------------------------------------------------------


class TaskTaken(ServerEvent, frozen=True):
    """An aggregator serves a task that was given to it. `updates`: members of open buffers."""

    task: TaskId
    run: int
    seq: int
    version: int
    updates: int


class TaskLeft(ServerEvent, frozen=True):
    """An aggregator no longer serves a task: it moved, was changed by its owner, or is over."""

    task: TaskId
    run: int
    seq: int
    version: int


class TaskHalted(ServerEvent, frozen=True):
    """A task makes no versions until its owner or an operator acts; `why` has the reason."""

    level = "error"

    task: TaskId
    seq: int
    why: str


class TaskResumed(ServerEvent, frozen=True):
    """A halted task is served again."""

    task: TaskId
    seq: int
    version: int


class VersionPublished(ServerEvent, frozen=True):
    """A new version of the model is committed."""

    task: TaskId
    run: int
    version: int
    updates: int


class BufferDropped(ServerEvent, frozen=True):
    """A buffer of masked updates could not be unmasked: its version repeats the one before."""

    level = "warning"

    task: TaskId
    run: int
    version: int
    updates: int
    why: str


class TsaUnreachable(ServerEvent, frozen=True):
    """A TSA does not answer, and its secure tasks wait. Acknowledged updates are kept. Clients that
    have trained wait up to 15 minutes past their deadlines; after that their updates are lost.
    """

    level = "warning"

    peer: str
    why: str


class TsaBack(ServerEvent, frozen=True):
    """A TSA answers again."""

    peer: str
    after_s: float


# -- storage ------------------------------------------------------------------------------------


class StorageFailed(ServerEvent, frozen=True):
    """The disk, database or bucket begins to fail. `part`: the state store, or a task's blobs."""

    level = "error"
    identity = ("task", "part")

    part: Literal["state", "blobs"]
    task: TaskId
    why: str


class StorageRecovered(ServerEvent, frozen=True):
    """The disk, database or bucket works again."""

    identity = ("task", "part")

    part: Literal["state", "blobs"]
    task: TaskId
    after_s: float


class ThreadsRefused(ServerEvent, frozen=True):
    """No thread can start for a secure task, and its work waits: the process is at a limit on
    threads. Raise pids.max, TasksMax or ulimit -u.
    """

    level = "error"
    identity = ("task",)

    task: TaskId
    why: str


class ThreadsStarted(ServerEvent, frozen=True):
    """A thread has started for a secure task that waited for one."""

    identity = ("task",)

    task: TaskId
    after_s: float


# -- people and devices -------------------------------------------------------------------------


class ChangeMade(ServerEvent, frozen=True):
    """Someone made a change through the admin API. `number`: its row in the audit trail."""

    identity = ("actor", "action", "target")

    actor: str
    action: str
    target: str
    number: int
    why: str


class ChangeRefused(ServerEvent, frozen=True):
    """Someone tried to make a change and was refused. The audit trail has a row for it."""

    level = "warning"
    identity = ("actor", "action", "target")

    actor: str
    action: str
    target: str
    why: str


class CredentialsRejected(ServerEvent, frozen=True):
    """A request had no valid token. `peer` is left out for devices."""

    level = "warning"
    identity = ("listener",)

    listener: Literal["admin", "devices", "servers"]
    peer: str


class EvaluationStarted(ServerEvent, frozen=True):
    """A planned evaluation of a version starts."""

    task: TaskId
    version: int


class RolloutStepped(ServerEvent, frozen=True):
    """A revision is given to this share of the devices, as the next step of its rollout."""

    task: TaskId
    run: int
    revision: int
    share: float
    why: str


class RolloutEnded(ServerEvent, frozen=True):
    """A rollout finished, and all devices have the revision; or the task ended first."""

    task: TaskId
    run: int
    revision: int
    state: str
    why: str


class RolloutRolledBack(ServerEvent, frozen=True):
    """A revision was rolled back. Training continues from the model of `version`."""

    level = "warning"

    task: TaskId
    run: int
    revision: int
    version: int
    why: str


class TaskEnded(ServerEvent, frozen=True):
    """The supervisor ended a task or an evaluation: a stop rule, a result, or a failure."""

    task: TaskId
    run: int
    state: str
    why: str


class TaskDataRemoved(ServerEvent, frozen=True):
    """The last rows and blobs of a deleted task are gone."""

    task: TaskId
