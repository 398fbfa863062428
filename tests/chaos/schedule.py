"""Draws faults for a cluster on hosts of its own. A seed decides what, where and for how long.

A third of the faults come with another one that is in progress at the same time, on other hosts. A
fault of one of the database's servers never meets one of the other: nothing works without both
copies, and a test of that shows nothing.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from papaya.errors import OperatorError
from tests.chaos.cluster import HEARTBEAT_S, Cluster
from tests.chaos.faults import Fault, together
from tests.chaos.hosts import Host, until

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
_WRITABLE_S = 90.0
_TTL_S = 20.0  # of the primary's lock, the shortest that Patroni allows
_MEGABYTE = bytes(1 << 20)
_PAIRS = 1 / 3
_DRAWS = 5
_WEIGHTS = {
    "power": 4,
    "freeze": 3,
    "partition": 5,
    "slow": 2,
    "failover": 3,
    "disk": 1,
    "clock": 1,
    "gate": 1,
}
_LONG_WEIGHTS = {"tsa": 1, "database-host": 1, "split": 1, "unreplicated": 1}
# The last two are drawn only with --fault: `power` and `failover` include them.
KINDS = (*_WEIGHTS, *_LONG_WEIGHTS, "holder", "kill-database")
_VISIBLE_S = 0.7  # for the processes to read what is not replicated, and to tell devices
_SPLIT_S = 7 * HEARTBEAT_S  # longer than it takes to move a task


def left_out(only: Sequence[str]) -> str:
    """Which faults cannot be drawn on this machine, and what to do; empty if all can. Raises
    OperatorError if one of them was asked for.
    """
    if FAKETIME.exists():
        return ""
    remedy = "apt-get install libfaketime"
    if "clock" in only:
        raise OperatorError(f"--fault clock needs libfaketime: there is no {FAKETIME}", hint=remedy)
    return "" if only else f"clock faults are left out: there is no {FAKETIME} (hint: {remedy})"


class Schedule:
    """`is_long`: also faults that take half a minute, and those that lose a TSA's memory.

    `only`: the kinds of faults to draw from, each as often; empty means all, by their weights.
    """

    def __init__(
        self, cluster: Cluster, seed: int, *, is_long: bool, only: Sequence[str] = ()
    ) -> None:
        self._cluster = cluster
        self._rng = Random(seed)
        weights = _WEIGHTS | (_LONG_WEIGHTS if is_long else {})
        if only:
            weights = dict.fromkeys(only, 1)
        elif not FAKETIME.exists():
            weights["clock"] = 0
        drawn: dict[str, Callable[[], Fault]] = {
            "power": self._power,
            "holder": self._holder,
            "freeze": self._freeze,
            "partition": self._partition,
            "split": self._split,
            "slow": self._slow,
            "failover": self._failover,
            "kill-database": self._kill_database,
            "unreplicated": self._unreplicated,
            "disk": self._disk,
            "clock": self._clock,
            "gate": self._gate,
            "tsa": self._tsa,
            "database-host": self._database_host,
        }
        self._kinds = {drawn[kind]: weight for kind, weight in weights.items()}
        self._waiting: list[Callable[[], Fault]] = []

    def next(self) -> Fault:
        first = self._draw()
        if self._rng.random() >= _PAIRS:
            return first
        for _ in range(_DRAWS):
            second = self._draw()
            if not first.touches & second.touches:
                return together(first, second, self._rng.uniform(0, first.seconds))
        return first

    def _draw(self) -> Fault:
        """Kinds come in a random order, each as often as its weight before any comes again."""
        if not self._waiting:
            self._waiting = [kind for kind, weight in self._kinds.items() for _ in range(weight)]
            self._rng.shuffle(self._waiting)
        return self._waiting.pop()()

    def _touched(self, *hosts: Host) -> frozenset[str]:
        """Both servers of the database count as one."""
        return frozenset(
            "database" if host in self._cluster.database.hosts else host.name for host in hosts
        )

    def _seconds(self) -> float:
        """From less than a heartbeat to more than it takes to be taken for dead."""
        return self._rng.uniform(0.5, 4.5) * HEARTBEAT_S

    def _role(self) -> Host:
        """Any role, the holder of a task more often than others."""
        if self._rng.random() < 0.3:
            return self._cluster.holder()
        return self._rng.choice(self._cluster.roles)

    def _power(self) -> Fault:
        others = [self._cluster.balancer, self._rng.choice(self._cluster.etcds)]
        host = self._rng.choice([self._role(), self._role(), self._role(), *others])
        return Fault(
            f"power: {host.name}",
            self._seconds(),
            host.lose_power,
            host.boot,
            self._touched(host),
        )

    def _holder(self) -> Fault:
        host = self._cluster.holder()
        return Fault(
            f"holder: {host.name}",
            self._seconds(),
            host.lose_power,
            host.boot,
            self._touched(host),
        )

    def _freeze(self) -> Fault:
        host = self._rng.choice(self._cluster.all)
        return Fault(
            f"freeze: {host.name}",
            self._seconds(),
            lambda: host.send(signal.SIGSTOP),
            lambda: host.send(signal.SIGCONT),
            self._touched(host),
        )

    def _partition(self) -> Fault:
        """In one direction or both. A role is on one side at least."""
        one = self._role()
        other = self._rng.choice([host for host in self._cluster.all if host is not one])
        pairs = [(one, other), (other, one)]
        self._rng.shuffle(pairs)
        cut = pairs[: self._rng.choice((1, 2))]

        def begin() -> None:
            for deaf, host in cut:
                deaf.ignore(host)

        def end() -> None:
            for deaf, host in cut:
                deaf.hear(host)

        words = ", ".join(f"{host.name} to {deaf.name}" for deaf, host in cut)
        return Fault(f"partition: {words}", self._seconds(), begin, end, self._touched(one, other))

    def _split(self) -> Fault:
        """The holder of a task, and all selectors, lose the coordinators. These give the task to
        another aggregator, while clients that train go on uploading to the first one.
        """
        holder, coordinators = self._cluster.holder(), self._cluster.coordinators
        lost = [holder, *self._cluster.selectors]
        pairs = [
            (a, b)
            for one in lost
            for other in coordinators
            for a, b in ((one, other), (other, one))
        ]

        def begin() -> None:
            for deaf, host in pairs:
                deaf.ignore(host)

        def end() -> None:
            for deaf, host in pairs:
                deaf.hear(host)

        return Fault(
            f"split: {holder.name} and the selectors from the coordinators",
            _SPLIT_S,
            begin,
            end,
            self._touched(*lost, *coordinators),
        )

    def _slow(self) -> Fault:
        hosts = [self._role(), self._cluster.bucket, *self._cluster.database.hosts]
        host, kbit = self._rng.choice(hosts), self._rng.choice((256, 1024, 4096))
        return Fault(
            f"slow: {host.name} sends {kbit} kbit/s",
            2 * self._seconds(),
            lambda: host.slow_down(kbit),
            host.speed_up,
            self._touched(host),
        )

    def _failover(self) -> Fault:
        database = self._cluster.database
        return self._new_primary(
            *self._rng.choice(
                (("switch-over", database.switch_over), ("kill", database.kill_primary))
            )
        )

    def _kill_database(self) -> Fault:
        return self._new_primary("kill", self._cluster.database.kill_primary)

    def _new_primary(self, how: str, act: Callable[[], None]) -> Fault:
        """Ends when the new primary accepts writes."""
        database = self._cluster.database

        def begin() -> None:
            until(lambda: database.synchronous() is not None, "the replica is synchronous")
            act()

        return Fault(
            f"database: {how}", 0.0, begin, self._until_writable, self._touched(*database.hosts)
        )

    def _database_host(self) -> Fault:
        """The machine of the primary dies. Its lock has to expire before the replica takes over."""
        database = self._cluster.database
        lost: list[Host] = []

        def begin() -> None:
            until(lambda: database.synchronous() is not None, "the replica is synchronous")
            primary = database.primary()
            assert primary is not None
            lost.append(primary)
            primary.lose_power()
            until(lambda: database.primary() not in (None, primary), "a new primary", 4 * _TTL_S)

        def end() -> None:
            self._until_writable()
            for host in lost:
                host.boot()

        return Fault(
            "database: power of the primary", 0.0, begin, end, self._touched(*database.hosts)
        )

    def _unreplicated(self) -> Fault:
        """Commits become visible that the standby does not have; then it becomes the primary.

        Replication stops, and the backends of aggregators whose commit waits for it are terminated,
        again and again. A little later the primary is killed.
        """
        database, visible_s = self._cluster.database, self._rng.uniform(2, 3) * HEARTBEAT_S
        parted: list[tuple[Host, Host]] = []

        def begin() -> None:
            until(lambda: database.synchronous() is not None, "the replica is synchronous")
            primary, standby = database.primary(), database.synchronous()
            assert primary is not None
            assert standby is not None
            parted.append((primary, standby))
            database.stop_replication(primary, standby)
            until(lambda: database.end_unreplicated_commits() > 0, "a commit waits for the standby")
            ends_at = time.monotonic() + visible_s
            while time.monotonic() < ends_at:
                time.sleep(_VISIBLE_S)
                database.end_unreplicated_commits()
            time.sleep(_VISIBLE_S)
            database.kill_primary()

        def end() -> None:
            self._until_writable()
            for primary, standby in parted:
                database.resume_replication(primary, standby)

        return Fault("unreplicated: commits", 0.0, begin, end, self._touched(*database.hosts))

    def _until_writable(self) -> None:
        self._cluster.database.until_writable(_WRITABLE_S)

    def _disk(self) -> Fault:
        host = self._role()
        file = self._cluster.disk(host) / "filler"

        def begin() -> None:
            with file.open("wb", buffering=0) as filler:
                try:
                    while filler.write(_MEGABYTE) == len(_MEGABYTE):
                        pass
                except OSError:
                    return

        return Fault(
            f"full disk: {host.name}",
            self._seconds(),
            begin,
            lambda: file.unlink(missing_ok=True),
            self._touched(host),
        )

    def _clock(self) -> Fault:
        """A host comes back with another time. Processes read the clock when they start."""
        host = self._role()
        step_s = self._rng.choice((-1, 1)) * self._rng.uniform(0.5, 2.5) * HEARTBEAT_S

        def begin() -> None:
            host.lose_power()
            host.boot(
                LD_PRELOAD=str(FAKETIME),
                FAKETIME=f"{step_s:+.1f}",
                FAKETIME_DONT_FAKE_MONOTONIC="1",
            )

        def end() -> None:
            host.lose_power()
            host.boot()

        return Fault(
            f"clock: {host.name} by {step_s:+.1f} s",
            self._seconds(),
            begin,
            end,
            self._touched(host),
        )

    def _gate(self) -> Fault:
        host = self._rng.choice(self._cluster.tsas)
        gate = host.programs[1]

        def end() -> None:
            gate.start()

        return Fault(f"gate: {gate.name}", self._seconds(), gate.kill, end, self._touched(host))

    def _tsa(self) -> Fault:
        """What is in its memory is lost: at most the open buffers of its tasks."""
        host = self._rng.choice(self._cluster.tsas)
        return Fault(
            f"tsa: {host.name}",
            self._seconds(),
            host.lose_power,
            host.boot,
            self._touched(host),
        )
