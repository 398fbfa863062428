"""Devices refuse what their owners do not believe, and nothing of an update leaves them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from msgspec import structs

from papaya.cli.demo.show import reading
from papaya.config import Requirements
from papaya.device.device import Device
from papaya.device.events import Event, VisitEnded
from papaya.device.trust import Trust
from papaya.learning.definition import TaskTerms
from tests.system.fleet import Book, NoTraining, WatchedProcess, briefly
from tests.system.processes import CALM, Installation, ServerProcess
from tests.system.test_secure import CONFIG, GOAL, STEP_S, TERMS, admin_of, trust, url


def test_a_device_refuses_what_its_owner_does_not_believe(tmp_path: Path) -> None:
    masked = structs.replace(CONFIG, requirements=Requirements(labels=("masked",)))
    clear = structs.replace(
        CONFIG,
        task="clear",
        secure_aggregation=None,
        requirements=Requirements(labels=("clear",)),
    )
    with Installation(tmp_path) as installation:
        server = installation.add(server=CALM).start()
        admin = admin_of(installation, server)
        admin.submit(masked)
        admin.submit(clear)
        known = trust(installation, server)
        unbelieving = trust(installation, server, platforms=("sgx",), allow_insecure_software=False)
        careful = trust(installation, server, minimum_threshold=GOAL + 1)
        strict = structs.replace(TERMS, max_examples=2)
        crowded = structs.replace(TERMS, threshold=GOAL + 1)
        for number, (believed, label, terms, reason) in enumerate(
            (
                (unbelieving, "masked", TERMS, "software"),
                (careful, "masked", TERMS, f"at least {GOAL + 1}"),
                (known, "masked", strict, "task file says 2"),
                (known, "masked", crowded, f"at least {GOAL + 1}"),
                (known, "clear", TERMS, "the file has it"),
                (
                    known,
                    "masked",
                    structs.replace(TERMS, secure=False),
                    "the file does not have it",
                ),
            )
        ):
            place = installation.folder / f"refuses-{number}"
            detail, book = asyncio.run(
                _one_visit(installation, server, place, believed, label, terms)
            )
            assert reason in detail
            assert (book.chunks, book.completing) == (0, set()), f"something left it: {detail}"
        _, metrics = admin.ask("GET", "/metrics")
        for task in (masked.task, clear.task):
            assert reading(metrics.decode(), "papaya_task_joined_total", task) >= 1
            assert reading(metrics.decode(), "papaya_task_trips_total", task) == 0
        assert server.stop() == 0


async def _one_visit(
    installation: Installation,
    server: ServerProcess,
    place: Path,
    believed: Trust,
    label: str,
    terms: TaskTerms,
) -> tuple[str, Book]:
    """Visits until one fails, or is counted by mistake; what the device tells its owner of it.

    One that was silent for too long on a busy machine ends in another way, and comes again.
    """
    book, told = Book(), list[Event]()
    place.mkdir()
    async with WatchedProcess(book, None, believed) as process:
        with Device(
            process,
            selectors=[url(server)],
            store=place / "device.db",
            trainer=NoTraining(briefly(book, 0), None, lambda task: terms),
            token=installation.secret("device.token"),
            labels=(label,),
            notify=told.append,
        ) as device:
            async with asyncio.timeout(STEP_S):
                finish = await device.visit()
                while finish.ending not in ("failed", "counted"):
                    finish = await device.visit()
    assert finish.ending == "failed"
    assert book.joined
    [*_, ended] = [event for event in told if isinstance(event, VisitEnded)]
    return ended.detail, book


def test_a_device_without_a_trust_policy_takes_no_slot_of_a_secure_task(tmp_path: Path) -> None:
    """Although the task requires no task file, so that nothing else keeps the device out."""
    with Installation(tmp_path) as installation:
        server = installation.add(server=CALM).start()
        admin = admin_of(installation, server)
        admin.submit(CONFIG)
        reasons, book = asyncio.run(_rejected_for_trust(installation, server))
        assert reasons[-1] == "masked: is secure, and this device has no trust policy"
        assert not book.joined
        _, metrics = admin.ask("GET", "/metrics")
        assert reading(metrics.decode(), "papaya_task_joined_total", CONFIG.task) == 0
        assert server.stop() == 0


async def _rejected_for_trust(
    installation: Installation, server: ServerProcess
) -> tuple[list[str], Book]:
    """Visits until the task wants clients, and what the device is told at each."""
    book, reasons = Book(), [""]
    async with WatchedProcess(book, None, None) as process:
        with Device(
            process,
            selectors=[url(server)],
            store=installation.folder / "device.db",
            trainer=NoTraining(briefly(book, 0), None, lambda program: TERMS),
            token=installation.secret("device.token"),
        ) as device:
            async with asyncio.timeout(STEP_S):
                while "trust" not in reasons[-1] and not book.joined:
                    finish = await device.visit()
                    reasons.append(finish.detail)
                    await asyncio.sleep(0.05)
    return reasons, book
