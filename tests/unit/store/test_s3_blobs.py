"""What only a bucket does: conditions, deleted blobs that stay, clusters, errors with hints."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from urllib.request import urlopen

import pytest

from papaya.credentials.s3_keys import s3_keys
from papaya.errors import MissingBlob, OperatorError
from papaya.store import s3_blobs
from papaya.store.blob_cache import BlobCache
from papaya.store.s3_blobs import S3Blobs
from tests.s3.server import BUCKET, KEY_ID, SECRET, S3Server, key_file, s3_server

VERSION = f"task/1/version-3-{'0' * 32}"
SUM = f"task/1/sum-3-2-{'0' * 32}"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may take long to answer on a busy machine."""
    for name in ("_CONNECT_TIMEOUT", "_REQUEST_TIMEOUT"):
        monkeypatch.setattr(s3_blobs, name, timedelta(minutes=5))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return key_file(tmp_path)


def opened(s3: S3Server, keys: Path, url: str = "", endpoint: str = "") -> S3Blobs:
    return S3Blobs.open(
        url or f"s3://{BUCKET}/{token_hex(8)}",
        BlobCache(keys.parent / token_hex(8)),
        endpoint=endpoint or s3.endpoint,
        credentials=s3_keys(keys),
    )


@pytest.fixture
def blobs(s3: S3Server, keys: Path) -> S3Blobs:
    return opened(s3, keys)


# -- deleted blobs --------------------------------------------------------------------------------


def test_a_deleted_blob_stays_until_its_time_and_is_then_removed(blobs: S3Blobs) -> None:
    blobs.put(VERSION, b"bytes")
    blobs.delete(VERSION)
    assert blobs.remove_expired(3600.0) == 0
    assert blobs.get(VERSION) == b"bytes"
    assert blobs.remove_expired(-3600.0) == 1
    with pytest.raises(MissingBlob):
        blobs.get(VERSION)
    assert blobs.remove_expired(-3600.0) == 0


@pytest.mark.parametrize("single_bytes", [100, 2])
def test_a_deleted_key_is_not_written_again(
    blobs: S3Blobs, monkeypatch: pytest.MonkeyPatch, single_bytes: int
) -> None:
    monkeypatch.setattr(s3_blobs, "_SINGLE_BYTES", single_bytes)
    blobs.put(VERSION, b"bytes")
    blobs.delete(VERSION)
    with pytest.raises(MissingBlob, match="deleted"):
        blobs.put(VERSION, b"bytes")
    assert blobs.keys("task") == []


# -- sizes ----------------------------------------------------------------------------------------


def test_a_large_blob_is_sent_in_parts_and_not_overwritten(
    blobs: S3Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_blobs, "_SINGLE_BYTES", 1 << 20)
    monkeypatch.setattr(s3_blobs, "_PART_BYTES", 5 << 20)
    pieces = [bytes([i]) * (4 << 20) for i in range(3)]
    blobs.put(SUM, pieces)
    assert sha256(blobs.get(SUM)).digest() == sha256(b"".join(pieces)).digest()
    blobs.put(SUM, [bytes(12 << 20)])
    assert blobs.get(SUM)[-1] == 2


def test_a_blob_of_another_size_under_the_same_key_is_an_error(blobs: S3Blobs) -> None:
    blobs.put(SUM, b"bytes")
    with pytest.raises(OperatorError, match="5 bytes, expected 3"):
        blobs.put(SUM, b"byt")


def test_a_local_copy_is_made_once_and_removed_with_the_blob(blobs: S3Blobs) -> None:
    blobs.put(VERSION, b"bytes")
    path = blobs.path(VERSION)
    assert path.read_bytes() == b"bytes"
    modified = path.stat().st_mtime_ns
    assert blobs.path(VERSION).stat().st_mtime_ns == modified
    blobs.delete(VERSION)
    assert not path.exists()


def test_the_copies_used_least_recently_are_removed(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache", max_bytes=20)
    paths = [cache.path(f"task/{i}/x", lambda: [b"0123456789"]) for i in (1, 2)]
    cache.path("task/1/x", lambda: pytest.fail("downloaded twice"))
    paths.append(cache.path("task/3/x", lambda: [b"0123456789"]))
    assert [path.exists() for path in paths] == [True, False, True]


# -- URLs -----------------------------------------------------------------------------------------


def test_only_public_blobs_get_a_signed_url(blobs: S3Blobs) -> None:
    blobs.put(VERSION, b"bytes")
    blobs.put(SUM, b"secret")
    with urlopen(blobs.signed_url(VERSION, 60.0)) as answer:
        assert answer.read() == b"bytes"
        assert "immutable" in answer.headers["Cache-Control"]
    for key in (SUM, f"task/1/optimizer-3-{'0' * 32}"):
        with pytest.raises(MissingBlob, match="not public"):
            blobs.signed_url(key, 60.0)


# -- clusters -------------------------------------------------------------------------------------


def test_two_clusters_cannot_share_a_prefix(s3: S3Server, keys: Path) -> None:
    url = f"s3://{BUCKET}/{token_hex(8)}"
    opened(s3, keys, url).claim("cluster-a")
    opened(s3, keys, url).claim("cluster-a")
    with pytest.raises(OperatorError, match="belongs to another cluster") as refused:
        opened(s3, keys, url).claim("cluster-b")
    assert "prefix of its own" in refused.value.hint


# -- bad stores -----------------------------------------------------------------------------------


def test_a_store_that_ignores_conditions_is_refused_by_name(s3: S3Server, keys: Path) -> None:
    url = f"s3://{BUCKET}/{token_hex(8)}"
    with s3.failing("unconditional"), pytest.raises(OperatorError, match=url) as refused:
        opened(s3, keys, url)
    assert "ignores conditional writes" in str(refused.value)


@pytest.mark.parametrize(
    ("fault", "problem", "hint"),
    [
        ("code:403:InvalidAccessKeyId", "InvalidAccessKeyId", "blobs_credentials"),
        ("code:403:SignatureDoesNotMatch", "SignatureDoesNotMatch", "blobs_credentials"),
        ("code:400:ExpiredToken", "ExpiredToken", "has expired"),
        ("code:403:AccessDenied", "AccessDenied", "allow this key"),
        ("code:403:RequestTimeTooSkewed", "RequestTimeTooSkewed", "clock"),
    ],
)
def test_a_refused_key_is_explained_and_not_quoted(
    s3: S3Server, keys: Path, fault: str, problem: str, hint: str
) -> None:
    with s3.failing(fault), pytest.raises(OperatorError, match=problem) as refused:
        opened(s3, keys)
    assert hint in refused.value.hint
    shown = "".join(traceback.format_exception(refused.value))
    assert KEY_ID not in shown
    assert SECRET not in shown


def test_a_missing_bucket_and_an_unknown_name_are_explained(s3: S3Server, keys: Path) -> None:
    with pytest.raises(OperatorError, match="NoSuchBucket") as missing:
        opened(s3, keys, url="s3://no-such-bucket/x")
    assert "create the bucket" in missing.value.hint
    for endpoint in ("http://no-such-name.invalid", "http://127.0.0.1:9"):
        with pytest.raises(OperatorError, match="cannot be reached") as unreachable:
            opened(s3, keys, endpoint=endpoint)
        assert "blobs_endpoint" in unreachable.value.hint


def test_a_key_that_expires_later_is_an_error_of_that_request(s3: S3Server, blobs: S3Blobs) -> None:
    with s3.failing("code:400:ExpiredToken"), pytest.raises(OperatorError, match="ExpiredToken"):
        blobs.put(VERSION, b"bytes")
    blobs.put(VERSION, b"bytes")
    assert blobs.get(VERSION) == b"bytes"


# -- the file of keys -----------------------------------------------------------------------------


def test_a_changed_key_file_is_read_again(keys: Path) -> None:
    current = s3_keys(keys)
    keys.write_text(keys.read_text().replace(KEY_ID, "ANOTHER") + "aws_session_token = token\n")
    found = current()
    assert (found["access_key_id"], found["token"]) == ("ANOTHER", "token")


def test_a_bad_key_file_is_refused_without_its_content(keys: Path) -> None:
    keys.write_text(f"aws_access_key_id = {KEY_ID}\n")
    with pytest.raises(OperatorError, match="has no aws_secret_access_key") as incomplete:
        s3_keys(keys)
    assert KEY_ID not in str(incomplete.value) + incomplete.value.hint
    keys.chmod(0o644)
    with pytest.raises(OperatorError, match="readable by other users"):
        s3_keys(keys)
