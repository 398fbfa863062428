"""Servers whose blobs are in a bucket: real processes, a real S3 server, and a network that fails.

While the bucket is away, uploads and versions wait; what was acknowledged counts exactly once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from papaya.config import AsyncFL, OptimizerConfig, TaskConfig
from papaya.credentials.s3_keys import s3_keys
from papaya.store.blob_cache import BlobCache
from papaya.store.s3_blobs import S3Blobs
from tests.s3.cut import Cut
from tests.s3.server import BUCKET, KEY_ID, SECRET, key_file, s3_server
from tests.system.admin import Admin
from tests.system.fleet import Book, fleet, some_across_failures
from tests.system.oracle import Books
from tests.system.processes import Installation, ServerProcess, Toml, run_to_the_end, toml

_STEP_S = 240.0
_RETRY = "will retry"
TASK = TaskConfig(
    task="task",
    concurrency=8,
    model_length=48,
    regime=AsyncFL(aggregation_goal=4),
    optimizer=OptimizerConfig(kind="fedavg", rate=1.0),
    participation_gap_s=0.0,
    commit_interval_s=0.02,
    keep_versions=100_000,
    training_timeout_s=3600.0,
)
URL = f"s3://{BUCKET}/cluster-1"


def test_a_bucket_that_is_away_loses_and_doubles_nothing(tmp_path: Path) -> None:
    run_through_cuts(tmp_path, cuts=2, away_s=0.0)


@pytest.mark.soak
def test_a_bucket_that_is_away_for_a_minute_loses_and_doubles_nothing(tmp_path: Path) -> None:
    run_through_cuts(tmp_path, cuts=2, away_s=60.0)


def run_through_cuts(folder: Path, cuts: int, away_s: float) -> None:
    keys = key_file(folder)
    with s3_server() as s3, Installation(folder) as installation:
        network = Cut(s3.endpoint)
        server = installation.add(
            deployment={
                "blobs": URL,
                "blobs_endpoint": network.url,
                "blobs_credentials": str(keys),
                "blobs_urls": "signed",
            }
        ).start()
        admin = Admin(server.addresses["admin"], installation.secret("admin.token"))
        admin.submit(TASK)
        book = asyncio.run(_train(installation, server, network, cuts, away_s))
        assert server.stop() == 0
        network.close()
        bucket = S3Blobs.open(
            URL, BlobCache(folder / "cache"), endpoint=s3.endpoint, credentials=s3_keys(keys)
        )
        books = Books(installation.data, TASK.task, bucket)
        books.check(book.of(TASK.task))
        assert books.newest >= cuts + 1
        assert book.across_failures, f"nobody came through a failure: {book}"
        assert not (installation.data / "blobs").exists()
        assert KEY_ID not in server.text()
        assert SECRET not in server.text()


async def _until_counted(book: Book, count: int) -> None:
    await book.until(lambda: len(book.acknowledged) >= count, _STEP_S, f"{count} counted")


async def _train(
    installation: Installation, server: ServerProcess, network: Cut, cuts: int, away_s: float
) -> Book:
    urls = [f"http://{server.addresses['devices']}"]
    token = installation.secret("device.token")
    devices = installation.folder / "devices"
    async with fleet(
        devices, urls, token, 12, some_across_failures, blobs_hosts=["127.0.0.1"]
    ) as flying:
        book = flying.book
        for cut in range(cuts):
            counted = len(book.acknowledged) + TASK.aggregation_goal
            await _until_counted(book, counted)
            if not cut:
                # The bucket has sent everything: the selector has made no local copies.
                assert not (installation.data / "server.cache").exists()
            retries = server.text().count(_RETRY)
            with network.cut():
                # A version or a sum could not be written, twice.
                await asyncio.to_thread(server.until_logged, _RETRY, _STEP_S, retries + 1)
                await asyncio.sleep(away_s)
            book.next_era()
        book.last_era()
        counted = len(book.acknowledged) + TASK.aggregation_goal
        await _until_counted(book, counted)
        await flying.go_home(_STEP_S)
    return book


def test_a_bucket_that_cannot_be_used_is_explained_and_nothing_is_created(tmp_path: Path) -> None:
    keys = key_file(tmp_path)

    def refused(data: Path, url: str = URL) -> str:
        config = tmp_path / "papaya.toml"
        settings: dict[str, Toml] = {
            "data": str(data),
            "blobs": url,
            "blobs_endpoint": s3.endpoint,
            "blobs_credentials": str(keys),
        }
        config.write_text(toml(settings, {}), encoding="utf-8")
        ended = run_to_the_end("serve", "--config", str(config))
        assert ended.returncode == 2
        assert "hint: " in ended.stderr
        assert KEY_ID not in ended.stderr
        return ended.stderr

    new = tmp_path / "new"
    with s3_server() as s3, Installation(tmp_path) as installation:
        assert "NoSuchBucket" in refused(new, "s3://no-such-bucket/x")
        with s3.failing("unconditional"):
            assert "ignores conditional writes" in refused(new)
        with s3.failing("code:403:InvalidAccessKeyId"):
            assert "InvalidAccessKeyId" in refused(new)
        assert not new.exists()
        own = {"blobs": URL, "blobs_endpoint": s3.endpoint, "blobs_credentials": str(keys)}
        assert installation.add(deployment=own).start().stop() == 0
        assert "belongs to another cluster" in refused(new)
