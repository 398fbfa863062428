"""Eligibility: what each probe makes of what Linux says, and who may overrule it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from papaya.device import eligibility
from papaya.device.eligibility import (
    CONDITIONS,
    ChargingProbe,
    Eligibility,
    IdleProbe,
    Ineligible,
    Probe,
    UnmeteredProbe,
)
from papaya.errors import ConfigError


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run Python in place of nmcli, and a busy machine takes seconds to start it."""
    monkeypatch.setattr(eligibility, "_NMCLI_TIMEOUT_S", 300.0)


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


# --- Idle


@pytest.mark.parametrize(("load", "is_idle"), [("0.00", True), ("1.99", True), ("2.00", False)])
def test_idle_is_a_low_load_for_the_cores(tmp_path: Path, load: str, is_idle: bool) -> None:
    write(tmp_path, "proc/loadavg", f"{load} 9.00 9.00 1/100 12345\n")
    assert (IdleProbe(tmp_path, cores=4).check() is None) == is_idle


def test_our_own_training_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, "proc/loadavg", "3.00 0 0 1/1 1")
    assert "not idle: load 3.0 on 4 cores" in str(IdleProbe(tmp_path, cores=4).check())
    assert IdleProbe(tmp_path, cores=4, own_load=lambda: 2.0).check() is None


@pytest.mark.parametrize("text", [None, "", "busy"])
def test_a_load_that_cannot_be_read_is_not_idle(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        write(tmp_path, "proc/loadavg", text)
    assert IdleProbe(tmp_path).check() == "cannot read the load average"


# --- Charging

MAINS_ON = {"AC/type": "Mains\n", "AC/online": "1\n"}
MAINS_OFF = {"AC/type": "Mains\n", "AC/online": "0\n"}
MOUSE = {"hid/type": "Battery", "hid/scope": "Device\n", "hid/status": "Discharging"}


def battery(status: str) -> dict[str, str]:
    return {"BAT0/type": "Battery\n", "BAT0/status": f"{status}\n"}


@pytest.mark.parametrize(
    ("supplies", "reason"),
    [
        ({}, None),
        (MAINS_ON, None),
        (MAINS_OFF, None),  # without a battery it runs on something
        (MOUSE, None),
        (battery("Charging"), None),
        (battery("Full"), None),
        (MAINS_ON | battery("Not charging"), None),
        (MAINS_ON | battery("Discharging"), None),
        (MAINS_OFF | battery("Discharging"), "the battery is discharging"),
        (battery("Discharging") | MOUSE, "the battery is discharging"),
        (battery("Unknown"), "the battery is unknown"),
        ({"BAT0/type": "Battery"}, "the battery is unreadable"),
        (battery("Full") | {"BAT1/type": "Battery", "BAT1/status": "Discharging"}, "full, disch"),
        ({"USB/type": "USB", "USB/online": "1"} | battery("Not charging"), None),
    ],
)
def test_charging(tmp_path: Path, supplies: dict[str, str], reason: str | None) -> None:
    for path, text in supplies.items():
        write(tmp_path, f"sys/class/power_supply/{path}", text)
    found = ChargingProbe(tmp_path).check()
    assert found is None if reason is None else reason in str(found)


# --- Unmetered


def saying(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"print({text!r})")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no", None),
        ("no (guessed)\n\nunknown", None),
        ("yes", "a network is metered"),
        ("no\n\nyes (guessed)", "a network is metered"),
        ("unknown", "cannot tell whether the network is metered"),
        ("", "cannot tell whether the network is metered"),
    ],
)
def test_unmetered_is_what_network_manager_says(text: str, reason: str | None) -> None:
    assert UnmeteredProbe(command=saying(text)).check() == reason


@pytest.mark.parametrize(
    "command", [("no-such-program-here",), (sys.executable, "-c", "import sys; sys.exit(8)")]
)
def test_where_nobody_knows_it_counts_as_metered_unless_told(command: tuple[str, ...]) -> None:
    assert UnmeteredProbe(command=command).check() is not None
    assert UnmeteredProbe(unknown_is_unmetered=True, command=command).check() is None


def test_what_is_known_to_be_metered_is_metered_even_if_told() -> None:
    probe = UnmeteredProbe(unknown_is_unmetered=True, command=saying("yes"))
    assert probe.check() == "a network is metered"


# --- Together


def test_every_reason_is_named_and_the_owner_can_overrule(tmp_path: Path) -> None:
    metered = UnmeteredProbe(command=saying("yes"))
    probes: list[Probe] = [IdleProbe(tmp_path), ChargingProbe(tmp_path), metered]
    assert Eligibility(probes).check() == [
        Ineligible("idle", "cannot read the load average"),
        Ineligible("unmetered", "a network is metered"),
    ]
    assert [why.condition for why in Eligibility(probes, ["idle"]).check()] == ["unmetered"]
    assert Eligibility(probes, CONDITIONS).check() == []


def test_an_unknown_condition_is_refused() -> None:
    with pytest.raises(ConfigError, match="'lucky'"):
        Eligibility(assume=["lucky"])
