"""The door with a remote blob store: local copies, URLs, and a store that does not answer."""

from __future__ import annotations

import asyncio
import os
import stat
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import pytest

from papaya.config import Deployment
from papaya.errors import ConfigError, MissingBlob, OperatorError
from papaya.http.listener import serve
from papaya.messages import wire
from papaya.messages.base import BlobKey, Message
from papaya.messages.participation import Refused, Retry
from papaya.messages.selection import Located
from papaya.server.auth import DeviceAuth, OpenDoor
from papaya.server.device_api import Door
from papaya.server.host import Host
from papaya.server.metrics import DriverMetrics
from papaya.server.replies import WaitingDevice, problem
from papaya.store.blobs import Blobs
from tests.unit.http.loopback import Response, a_client, a_request

VERSION = f"task/1/version-3-{'0' * 32}"


class NoSelector:
    def deliver(self, message: Message, waiting: WaitingDevice) -> None:
        raise NotImplementedError


class Remote:
    """`fails` says how `path` fails."""

    is_remote = True

    def __init__(self, folder: Path) -> None:
        self.fails: Exception | None = None
        self._file = folder / "copy"
        self._file.write_bytes(b"parameters")

    def path(self, key: BlobKey) -> Path:
        if self.fails is not None:
            raise self.fails
        return self._file


def ask(remote: Remote, path: str, *, has_urls: bool = True) -> Response:
    async def asked() -> Response:
        def locate(key: BlobKey) -> str:
            remote.path(key)
            return f"https://bucket.example/{key}"

        auth, blobs = DeviceAuth(OpenDoor()), cast(Blobs, remote)
        selector = cast(Host, NoSelector())
        door = Door(selector, auth, blobs, DriverMetrics(), locate if has_urls else None)
        listener = await serve(door.routes(), "127.0.0.1", 0, problem=partial(problem, retry_s=1.0))
        try:
            async with a_client(listener.port) as client:
                client.send(a_request("GET", path))
                return await client.response()
        finally:
            await listener.drain(0)

    return asyncio.run(asyncio.wait_for(asked(), 60.0))


def test_a_local_copy_is_sent(tmp_path: Path) -> None:
    found = ask(Remote(tmp_path), f"/v1/parameters/{VERSION}")
    assert (found.status, found.body) == (200, b"parameters")
    assert "immutable" in found.headers["cache-control"]


@pytest.mark.parametrize("what", ["parameters", "urls"])
def test_a_store_that_does_not_answer_makes_devices_come_back(tmp_path: Path, what: str) -> None:
    remote = Remote(tmp_path)
    remote.fails = OperatorError("cannot use s3://bucket: SlowDown", hint="wait")
    found = ask(remote, f"/v1/{what}/{VERSION}")
    assert found.status == 503
    assert isinstance(wire.to_device.parse(found.body), Retry)
    remote.fails = MissingBlob("gone")
    assert ask(remote, f"/v1/{what}/{VERSION}").status == 404
    remote.fails = ZeroDivisionError()
    assert ask(remote, f"/v1/{what}/{VERSION}").status == 500


def test_a_copy_that_cannot_be_opened_makes_devices_come_back(tmp_path: Path) -> None:
    """As without free file descriptors. A device that gets no answer keeps its connection."""
    remote = Remote(tmp_path)
    (tmp_path / "copy").unlink()
    os.mknod(tmp_path / "copy", stat.S_IFSOCK | 0o600)  # ENXIO, also for root
    found = ask(remote, f"/v1/parameters/{VERSION}")
    assert found.status == 500
    assert isinstance(wire.to_device.parse(found.body), Retry)


def test_a_url_is_given_for_public_blobs_and_must_not_be_cached(tmp_path: Path) -> None:
    found = ask(Remote(tmp_path), f"/v1/urls/{VERSION}")
    assert wire.located.parse(found.body) == Located(f"https://bucket.example/{VERSION}")
    assert found.headers["cache-control"] == "no-store"
    for key in (f"task/1/sum-3-2-{'0' * 32}", f"task/1/optimizer-3-{'0' * 32}", "task"):
        assert ask(Remote(tmp_path), f"/v1/urls/{key}").status == 404


def test_without_urls_the_answer_is_that_there_are_none(tmp_path: Path) -> None:
    found = ask(Remote(tmp_path), f"/v1/urls/{VERSION}", has_urls=False)
    assert found.status == 404
    assert isinstance(wire.to_device.parse(found.body), Refused)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"blobs": "bucket"}, "is not a bucket"),
        ({"blobs": "s3://key:secret@bucket/x"}, "is not a bucket"),
        ({"blobs": "s3://bucket/x?y"}, "is not a bucket"),
        ({"blobs": "s3://bucket", "blobs_endpoint": "minio:9000"}, "is not the address"),
        ({"blobs": "s3://bucket", "blobs_urls": "cdn.example"}, "is not a way"),
        ({"blobs_urls": "signed"}, "a folder of blobs has no URLs"),
        ({"keep_deleted_s": 0.0}, "keep_deleted_s"),
    ],
)
def test_settings_of_a_bucket_that_cannot_work_are_refused(
    settings: dict[str, object], problem: str
) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError), match=problem) as refused:
        msgspec.convert(settings, Deployment)
    assert "secret" not in str(refused.value)
