"""Eligibility (paper, "Client Runtime"): a device takes part when it is idle, charging and on an
unmetered network.

Three probes for Linux, each replaceable by anything with `condition` and `check()`:

    idle        the one-minute load average is below half of the cores. Linux has no general way to
                tell whether a person uses the machine; the load is available everywhere, needs no
                rights, and also covers games and compilers. `own_load` is the part of the load
                that our own training causes; it is subtracted.
    charging    a mains or USB supply is online, or no battery of the system is discharging. A
                machine without a battery counts as charging. /sys/class/power_supply
    unmetered   NetworkManager says "no" or "no (guessed)". Without NetworkManager the network
                counts as metered, unless `unknown_is_unmetered` is set, because a wrong guess
                would cost the device's owner money.

A probe that cannot tell counts as "not eligible". Only the owner can overrule it, by name
(`assume`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

from papaya.errors import ConfigError

Condition: TypeAlias = Literal["idle", "charging", "unmetered"]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)

_NMCLI = ("nmcli", "--terse", "--get-values", "GENERAL.METERED", "device", "show")
_NMCLI_TIMEOUT_S = 5.0
_MAX_OUTPUT = 1 << 16


class Ineligible(NamedTuple):
    """A reason against taking part. It is not sent to any server."""

    condition: Condition
    reason: str


class Probe(Protocol):
    @property
    def condition(self) -> Condition: ...

    def check(self) -> str | None:
        """None if the condition holds, else the reason. May block for seconds; never raises."""
        ...


class IdleProbe:
    condition: Condition = "idle"

    def __init__(
        self,
        root: Path = Path("/"),
        cores: int | None = None,
        max_load_per_core: float = 0.5,
        own_load: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._loadavg = root / "proc/loadavg"
        self._cores = cores or os.cpu_count() or 1
        self._limit = max_load_per_core * self._cores
        self._own_load = own_load

    def check(self) -> str | None:
        try:
            load = float(self._loadavg.read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return "cannot read the load average"
        others = load - self._own_load()
        if others < self._limit:
            return None
        return f"not idle: load {others:.1f} on {self._cores} cores"


class ChargingProbe:
    condition: Condition = "charging"

    def __init__(self, root: Path = Path("/")) -> None:
        self._supplies = root / "sys/class/power_supply"

    def check(self) -> str | None:
        batteries: list[str] = []
        try:
            supplies = sorted(self._supplies.iterdir())
        except FileNotFoundError:
            return None
        except OSError:
            return "cannot read the power supplies"
        for supply in supplies:
            kind = _line(supply / "type")
            if kind == "Battery" and _line(supply / "scope") != "Device":  # not a mouse
                batteries.append(_line(supply / "status"))
            elif kind not in ("Battery", "") and _line(supply / "online") not in ("0", ""):
                return None
        if not batteries or all(status in ("Charging", "Full") for status in batteries):
            return None
        return "the battery is " + (", ".join(filter(None, batteries)).lower() or "unreadable")


class UnmeteredProbe:
    condition: Condition = "unmetered"

    def __init__(self, unknown_is_unmetered: bool = False, command: Sequence[str] = _NMCLI) -> None:
        self._unknown_is_unmetered = unknown_is_unmetered
        self._command = tuple(command)

    def check(self) -> str | None:
        answers = self._ask()
        if any(answer.startswith("yes") for answer in answers):
            return "a network is metered"
        known = [answer for answer in answers if answer.startswith("no")]
        if known or self._unknown_is_unmetered:
            return None
        return "cannot tell whether the network is metered"

    def _ask(self) -> list[str]:
        """What NetworkManager reports for each device: yes, no, "yes (guessed)", "no (guessed)".

        Unused devices are "unknown" and left out.
        """
        try:
            done = subprocess.run(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_NMCLI_TIMEOUT_S,
                check=True,
                env={**os.environ, "LC_ALL": "C"},
            )
        except (OSError, subprocess.SubprocessError):
            return []
        return done.stdout[:_MAX_OUTPUT].decode(errors="replace").split("\n")


class Eligibility:
    """All probes together. `assume` names conditions that the owner declares to hold."""

    def __init__(self, probes: Sequence[Probe] | None = None, assume: Collection[str] = ()) -> None:
        for condition in assume:
            if condition not in CONDITIONS:
                raise ConfigError.of(
                    "assume",
                    condition,
                    f"is not one of {', '.join(CONDITIONS)}",
                    "pass conditions to assume, for example idle,charging",
                )
        if probes is None:
            probes = (IdleProbe(), ChargingProbe(), UnmeteredProbe())
        self._probes = [probe for probe in probes if probe.condition not in assume]

    def check(self) -> list[Ineligible]:
        """All reasons against taking part; an empty list means eligible."""
        reasons = [(probe.condition, probe.check()) for probe in self._probes]
        return [Ineligible(condition, why) for condition, why in reasons if why is not None]


def _line(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:64].strip()
    except OSError:
        return ""
