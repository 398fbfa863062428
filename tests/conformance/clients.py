"""Clients under test: the reference device in this process, whole or with one rule broken."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import UNSET

from papaya.attestation.verify import (
    KEY_BYTES,
    Evidence,
    Verified,
    verify_logged,
    verify_quote,
    verify_report_data,
)
from papaya.client.work import Finish, Seal, Sealed
from papaya.config import DeviceConfig
from papaya.conformance.kit import ClientSetup
from papaya.device.device import Device
from papaya.device.eligibility import CONDITIONS, Eligibility
from papaya.device.limits import CheckInPacing
from papaya.device.process import DeviceProcess
from papaya.device.training import ProtocolTrainer
from papaya.device.trust import Trust
from papaya.learning.definition import TaskTerms
from papaya.verifiable_log.record import Record

CONFIG = DeviceConfig(
    request_timeout_s=10.0,
    check_in_timeout_s=60.0,
    backoff_s=0.05,
    max_backoff_s=0.5,
    give_up_s=300.0,
    participation_floor_s=0.0,
)
PACING = CheckInPacing(pause_s=0.0, backoff_s=0.05, max_backoff_s=0.2, leave_s=60.0)
_VISITS = 500  # a new task rejects devices until it wants clients
_LATER_VISITS = 3  # a device that has taken part excludes the task, and is rejected for ever


class KitTrainer(ProtocolTrainer):
    """Trains nothing; has the task that the kit gives to the device."""

    def __init__(self, setup: ClientSetup) -> None:
        super().__init__(
            lambda _, length: np.full(length, 1e-3, np.float32).tobytes(),
            lambda: 0.1,
            examples=lambda: 7,
        )
        task = setup.task
        self._terms = TaskTerms(
            secure=task["secure"],
            model_length=task["length"],
            max_examples=task["max_examples"],
            max_staleness=task["max_staleness"],
            clip=task["clip"],
            threshold=task["threshold"],
            upload_bits=16 if task["upload_bits"] == 16 else UNSET,
        )
        self._task = task["task"]

    def terms(self, program: str) -> TaskTerms | None:
        return self._terms if program == self._task else None


class Credulous(Trust):
    """Masks for whoever asks."""

    def _believe(self, work: Seal, parameters: object) -> None:
        return


class SkipsMeasurement(Trust):
    """Reads the record from the log, and does not compare it with the quote."""

    def _verify(self, work: Seal, digest: bytes) -> Verified:
        offered = work.offer
        quoted = verify_quote(_evidence(work), self.policy, self._now())
        reader = self._reader()
        reader.refresh(self._now())
        record = Record.decode(reader.entry(offered.leaf))
        verify_report_data(quoted, offered.identity, digest)
        return Verified(quoted, record, offered.leaf, offered.identity, digest)


class SkipsReportData(Trust):
    """Does not compare the quote with the identity key, or with the parameters."""

    def __init__(self, *options: Any, skips: Literal["identity", "parameters"]) -> None:
        super().__init__(*options)
        self._skips = skips

    def _verify(self, work: Seal, digest: bytes) -> Verified:
        offered, now = work.offer, self._now()
        quoted = verify_quote(_evidence(work), self.policy, now)
        record = verify_logged(quoted, offered.leaf, self.policy, self._reader(), now)
        identity, parameters = quoted.report_data[:KEY_BYTES], quoted.report_data[KEY_BYTES:]
        if self._skips == "identity":
            verify_report_data(quoted, identity, digest)
        else:
            verify_report_data(quoted, offered.identity, parameters)
        return Verified(quoted, record, offered.leaf, offered.identity, digest)


def _evidence(work: Seal) -> Evidence:
    offered = work.offer
    return Evidence("software", offered.evidence, offered.collateral)


class InTheClear(Trust):
    """Sends the update as it is."""

    def seal(self, work: Seal, terms: TaskTerms, **_: object) -> Sealed:
        return Sealed(work.update + bytes(8), bytes(64))


async def reference_visit(
    setup: ClientSetup, trust: Callable[..., Trust] = Trust, config: DeviceConfig = CONFIG
) -> None:
    """One visit of the reference device, as long as it takes to be accepted."""
    store = Path(setup.state) / "device.db"
    visits = _LATER_VISITS if store.exists() else _VISITS
    trusted = trust(setup.policy, Path(setup.state) / "checkpoint", time.time)
    async with DeviceProcess(
        now=time.time,
        pacing=PACING,
        trust=trusted,
        eligibility=Eligibility(assume=CONDITIONS),
        upload_hosts=["127.0.0.1:*"],
    ) as process:
        with Device(
            process,
            selectors=[setup.server],
            store=store,
            trainer=KitTrainer(setup),
            token=setup.token,
            config=config,
        ) as device:
            for _ in range(visits):
                finish: Finish = await device.visit()
                if finish.ending != "rejected":
                    return
                await device._wait(device._pause_after(finish))
