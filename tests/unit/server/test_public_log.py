"""The public log over HTTP: its files, and a 404 for every other path."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import obstore
import pytest

from papaya.credentials.s3_keys import s3_keys
from papaya.server.public_log import publish, route
from papaya.store.blob_cache import BlobCache
from papaya.store.s3_blobs import S3Blobs
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.note import LOG_SIGNATURE, SignerKey
from tests.s3.server import BUCKET, key_file, s3_server
from tests.unit.http.loopback import a_request, answers


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = LogFolder(tmp_path / "log")
    key = SignerKey("example.org/log", bytes(32), LOG_SIGNATURE)
    folder.create(key)
    folder.append([b"a release"], key)
    return tmp_path / "log"


def test_the_files_of_the_log_are_served(log: Path) -> None:
    paths = ["checkpoint", "tile/entries/000.p/1", "tile/0/000.p/1"]
    found = answers([route(log)], *(a_request("GET", f"/v1/log/{path}") for path in paths))
    assert [response.status for response in found] == [200] * len(paths)
    assert found[0].body == (log / "checkpoint").read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        *("tile/0", "tile/0/", "tile", "tile/0/000/1", "tile/0/000.p", "tile/0/999", "tile/00000"),
        *("x", f"tile/0/{'x000/' * 6}000", f"tile/{'0' * 90}"),
    ],
)
def test_any_other_path_is_a_404_without_a_traceback(
    log: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        [response] = answers([route(log)], a_request("GET", f"/v1/log/{path}"))
    assert response.status == 404
    assert "Traceback" not in caplog.text
    assert "failed" not in caplog.text


def test_the_log_in_a_bucket_never_gets_shorter(log: Path, tmp_path: Path) -> None:
    older = tmp_path / "older"
    shutil.copytree(log, older)
    key = SignerKey("example.org/log", bytes(32), LOG_SIGNATURE)
    LogFolder(log).append([b"another release"], key)
    with s3_server() as s3:
        keys = s3_keys(key_file(tmp_path))
        bucket = S3Blobs.open(
            f"s3://{BUCKET}/x", BlobCache(tmp_path), endpoint=s3.endpoint, credentials=keys
        )
        published: set[str] = set()
        for folder in (older, log, older, tmp_path / "no-log"):
            publish(folder, bucket, published)

        def in_bucket(path: str) -> bytes:
            return obstore.get(bucket._store, f"log/{path}").bytes().to_bytes()

        assert in_bucket("checkpoint") == (log / "checkpoint").read_bytes()
        for path in ("tile/entries/000.p/2", "tile/0/000.p/2", "tile/0/000.p/1"):
            assert in_bucket(path) == (log / path).read_bytes()
