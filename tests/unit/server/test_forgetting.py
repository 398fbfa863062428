"""A secure task that is over: workers tell the TSA, over the link, on a thread."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from threading import Event

import pytest

from papaya.aggregator.tsa import TsaAdapter, TsaEvidence
from papaya.aggregator.work import Forget
from papaya.config import Deployment
from papaya.server.buffers import BufferPool
from papaya.server.tsa import TsaConnection
from papaya.server.workers import Workers, threaded_shards
from papaya.tsa.errors import RefusalReason, TsaRefused
from tests.unit.server.worker_builders import CHUNK_BYTES, PATIENCE_S, SECURE, MemoryBlobs
from tests.unit.tsa.running import CLUSTER, running

assert SECURE.public_parameters is not None
PARAMETERS = SECURE.public_parameters
FORGET = Forget(SECURE)


class Telling(TsaConnection):
    """`told` is set when a task was forgotten, however that went."""

    def __init__(self, deployment: Deployment) -> None:
        deadlines_s = (PATIENCE_S, PATIENCE_S)
        super().__init__(deployment, str(deployment.tsa), time.time, CLUSTER, *deadlines_s)
        self.told = Event()
        self.adapter = TsaAdapter(self, lambda digest: TsaEvidence("software", b"", b"", 0))

    def forget(self, parameters_hash: bytes) -> None:
        try:
            super().forget(parameters_hash)
        finally:
            self.told.set()


async def carried_out(link: Telling) -> None:
    shards = threaded_shards(1, BufferPool(4, CHUNK_BYTES), link.adapter)
    workers = Workers(shards, MemoryBlobs(), lambda message: None, 1)
    workers.perform(FORGET)
    assert await asyncio.to_thread(link.told.wait, PATIENCE_S)
    await workers.close()


def test_what_is_over_is_forgotten_by_the_tsa() -> None:
    with running() as where:
        link = Telling(Deployment(tsa=where))
        digest = link.register(PARAMETERS)
        assert len(link.offers(digest, 1)) == 1
        asyncio.run(carried_out(link))
        with pytest.raises(TsaRefused) as caught:
            link.offers(digest, 1)
        assert caught.value.reason is RefusalReason.UNKNOWN_PARAMETERS
        link.close()


def test_no_tsa_is_started_to_be_told(tmp_path: Path) -> None:
    link = Telling(Deployment(data=str(tmp_path)))
    asyncio.run(carried_out(link))
    assert list(tmp_path.iterdir()) == []
    link.close()
