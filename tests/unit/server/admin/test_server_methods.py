"""Tasks that ask the servers for something they do not have, do not allow or cannot store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import papaya
from papaya.config import Aggregation, OptimizerConfig, Requirements, Staleness, Weighting
from papaya.errors import ConfigError
from papaya.learning import extensions
from papaya.messages.storage import (
    FIRST_FORMAT,
    FORMAT,
    FORMAT_KEY,
    BootRow,
    FormatRow,
    Transaction,
    boot_key,
)
from papaya.server.admin.problems import Conflict
from tests.unit.server.admin.builders import TASK, System, a_system

MEDIAN = structs.replace(
    TASK, aggregation=Aggregation("median"), weighting=Weighting("equal"), model_length=6
)


def run(folder: Path, test: Callable[[System], Awaitable[None]]) -> None:
    async def running() -> None:
        async with a_system(folder) as system:
            await test(system)

    asyncio.run(running())


@pytest.mark.parametrize(
    ("changes", "group"),
    [
        ({"optimizer": OptimizerConfig(kind="not_here")}, "server_optimizers"),
        ({"aggregation": Aggregation("not_here")}, "aggregation_rules"),
        ({"staleness": Staleness("not_here")}, "staleness_functions"),
    ],
)
def test_a_task_that_names_an_extension_that_is_not_here_is_refused(
    tmp_path: Path, changes: dict[str, Any], group: str
) -> None:
    async def test(system: System) -> None:
        with pytest.raises(ConfigError, match="'not_here'") as caught:
            await system.submit(structs.replace(TASK, **changes))
        assert f'extensions = ["{group}:not_here"]' in caught.value.hint

    run(tmp_path, test)


def test_an_extension_that_is_here_may_be_named(tmp_path: Path) -> None:
    extensions.add("staleness_functions", "half", lambda staleness: 0.5)

    async def test(system: System) -> None:
        await system.submit(structs.replace(TASK, staleness=Staleness("half")))

    run(tmp_path, test)


def test_single_updates_that_are_too_large_to_store_are_refused(tmp_path: Path) -> None:
    large = structs.replace(MEDIAN, model_length=1_000_000)

    async def test(system: System) -> None:
        system.service.max_members_mb = 15
        with pytest.raises(
            Conflict, match=r"4 updates of 4\.0 MB for each version: 16 MB"
        ) as caught:
            await system.submit(large)
        assert "max_members_mb" in caught.value.hint
        await system.submit(structs.replace(large, task="sum", aggregation=Aggregation()))
        system.service.max_members_mb = 16
        await system.submit(large)

    run(tmp_path, test)


def test_servers_of_one_version_combine_updates_in_one_way(tmp_path: Path) -> None:
    """An aggregator of an earlier version ignores settings that it does not know."""

    def server(version: str, known: int = FORMAT) -> Transaction:
        return Transaction(put=((boot_key("aggregator"), BootRow(1, known, version)),))

    async def test(system: System) -> None:
        system.change(server(""))
        await system.submit(structs.replace(TASK, task="usual"))
        for task in (
            MEDIAN,
            structs.replace(TASK, staleness=Staleness("constant")),
            structs.replace(TASK, optimizer=structs.replace(TASK.optimizer, averaged=1)),
            structs.replace(TASK, requirements=Requirements(upload_bits=8)),
        ):
            with pytest.raises(Conflict, match="aggregator runs"):
                await system.submit(task)
        system.change(server(papaya.__version__, FIRST_FORMAT))
        with pytest.raises(Conflict, match="does not know the settings"):
            await system.submit(MEDIAN)
        system.change(server(papaya.__version__))
        await system.submit(MEDIAN)
        [row] = (await system.state.read((FORMAT_KEY,))).values()
        assert row == FormatRow(FORMAT), "an earlier version does not start any more"
        await system.submit(structs.replace(MEDIAN, task="another"))

    run(tmp_path, test)
