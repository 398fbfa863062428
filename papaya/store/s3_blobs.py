"""The blob store in a bucket of S3 or a compatible store, with obstore (docs/adr/0049).

    <prefix>/cluster                     the id of the cluster that owns the prefix
    <prefix>/public/<task>/<seq>/<name>  what devices download: versions, bundles, programs,
                                         frozen tensors
    <prefix>/private/<task>/<seq>/<name> sums and optimizer states, never under a public URL
    <prefix>/deleted/<task>/<seq>/<name> a marker: this blob was deleted at the marker's time
    <prefix>/log/<path>                  files of the public log of TSA binaries

A put is durable when the store has answered. A blob is written on the condition that its key does
not exist; a large one in parts, without this condition, after a look at its key. A delete only
writes a marker. `remove_expired` deletes the blob and then the marker after `keep_deleted_s`, so
that rows from a backup still find their blobs. A key that was given to `delete` is never written
again: a late request of a slow network could delete the second blob.

Requests are repeated with back-off for a few seconds. After that the caller gets an OperatorError
and decides; workers try again until it succeeds. Answers of the store are not quoted in errors,
except their code: they may contain the key id or the signed request.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from papaya.errors import MissingBlob, OperatorError, PapayaError
from papaya.messages.base import BlobKey, TaskId
from papaya.store.blob_cache import BlobCache
from papaya.store.blobs import PUBLIC_KEY, Piece, check_key, check_task, is_key

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
    from obstore.store import S3Store
except ImportError as error:
    raise OperatorError(
        "blobs in S3 need the package obstore, which is not installed",
        hint="pip install 'papaya-fl[s3]'",
    ) from error

if TYPE_CHECKING:
    from obstore import Attributes, UpdateVersion
    from obstore.store import RetryConfig, S3Config, S3Credential

# A larger blob is sent in parts, so that no copy of it is in memory.
_SINGLE_BYTES = 32 << 20
_PART_BYTES = 16 << 20
_PARTS_AT_ONCE = 2
_READ_BYTES = 1 << 20
_CONNECT_TIMEOUT = timedelta(seconds=5)
_REQUEST_TIMEOUT = timedelta(seconds=30)
_RETRIES: RetryConfig = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}
_FOREVER = "public, max-age=31536000, immutable"
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"status code: ([0-9]{3})")

_CREDENTIALS_HINT = (
    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the file in blobs_credentials"
)
_HINTS = {
    "NoSuchBucket": "create the bucket, or correct its name in blobs",
    "InvalidAccessKeyId": _CREDENTIALS_HINT,
    "SignatureDoesNotMatch": _CREDENTIALS_HINT,
    "InvalidToken": _CREDENTIALS_HINT,
    "ExpiredToken": "the key has expired: get a new one; a file in blobs_credentials is read "
    "again without a restart",
    "TokenRefreshRequired": "the key has expired: get a new one",
    "AccessDenied": "allow this key to get, put, delete and list objects under the prefix",
    "RequestTimeTooSkewed": "correct the clock of this machine",
    "PermanentRedirect": "set blobs_region to the region of the bucket",
    "AuthorizationHeaderMalformed": "set blobs_region to the region of the bucket",
}
_STATUS_HINTS = {"401": _CREDENTIALS_HINT, "403": _CREDENTIALS_HINT}
_UNREACHABLE_HINT = "check the network, the name in blobs_endpoint and the store's status"


class S3Blobs:
    """Immutable bytes by key. Threads may share it. Use `S3Blobs.open`.

    Invariant: no request writes a blob whose key has a marker, except one that was already on its
    way when the marker was written.
    """

    is_remote = True

    def __init__(self, store: S3Store, where: str, cache: BlobCache) -> None:
        self.where = where  # the URL of bucket and prefix, for messages
        self._store = store
        self._cache = cache

    @classmethod
    def open(
        cls,
        url: str,
        cache: BlobCache,
        *,
        endpoint: str = "",
        region: str = "",
        credentials: Callable[[], S3Credential] | None = None,
    ) -> S3Blobs:
        """Check that the store can be used; writes and deletes one object."""
        parts = urlsplit(url)
        config: S3Config = {}
        if endpoint:
            config["endpoint"] = endpoint
        if region:
            config["region"] = region
        with _reporting(url):
            store = S3Store(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                config=config,
                credential_provider=credentials,
                retry_config=_RETRIES,
                client_options={
                    "allow_http": endpoint.startswith("http://"),
                    "connect_timeout": _CONNECT_TIMEOUT,
                    "timeout": _REQUEST_TIMEOUT,
                },
            )
        made = cls(store, url, cache)
        made._check_conditions()
        return made

    def claim(self, cluster: str) -> None:
        """Write the cluster's id, or refuse a prefix that belongs to another cluster."""
        if self._create("cluster", cluster.encode()):
            return
        with self._reporting():
            found = (
                obstore.get(self._store, "cluster").bytes().to_bytes().decode("ascii", "replace")
            )
        if found != cluster:
            raise OperatorError(
                f"{self.where} belongs to another cluster ({found[:64]!r}, this is {cluster!r})",
                hint="give each cluster a bucket or a prefix of its own in blobs",
            )

    # -- blobs --------------------------------------------------------------------------------

    def put(self, key: BlobKey, data: Piece | Sequence[Piece]) -> None:
        """Durable when it returns. No-op if the key exists; MissingBlob if it was deleted."""
        path = _path(key)
        pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        size = sum(view.nbytes for view in views)
        if size > _SINGLE_BYTES:
            if not self._is_there(key, path, size):
                self._put_in_parts(path, views)
        elif not self._create(path, views or b"") and not self._is_there(key, path, size):
            # Its removal after `keep_deleted_s` has just been completed.
            raise MissingBlob(f"blob {key} was deleted and cannot be written again")

    def get(self, key: BlobKey) -> bytes:
        """A deleted blob may still be returned."""
        path = _path(key)
        with self._reading(key):
            return obstore.get(self._store, path).bytes().to_bytes()

    def get_part(self, key: BlobKey, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, from a local copy of the whole blob: whoever asks for a
        part of a blob asks for the others next.
        """
        with suppress(FileNotFoundError), self.path(key).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), end - start, start)
        with self._reading(key):  # the copy was removed just now
            return obstore.get_range(self._store, _path(key), start=start, end=end).to_bytes()

    def size(self, key: BlobKey) -> int:
        path = _path(key)
        with self._reading(key):
            return int(obstore.head(self._store, path)["size"])

    def path(self, key: BlobKey) -> Path:
        """A local copy of a blob, to be sent. It may be removed at any time."""
        path = _path(key)

        def pieces() -> Iterator[bytes]:
            with self._reading(key):
                for piece in obstore.get(self._store, path).stream(min_chunk_size=_READ_BYTES):
                    yield bytes(piece)

        return self._cache.path(key, pieces)

    def keys(self, task: TaskId) -> list[BlobKey]:
        """All blobs of a task that were not deleted."""
        check_task(task)
        deleted = set(self._names(f"deleted/{task}/"))
        found = {*self._names(f"public/{task}/"), *self._names(f"private/{task}/")}
        return sorted(key for key in found - deleted if is_key(key))

    def delete(self, key: BlobKey) -> None:
        """Mark the blob as deleted. The first marker decides when it is removed."""
        check_key(key)
        self._create(f"deleted/{key}", b"")
        self._cache.remove(key)

    def sweep(self, task: TaskId, below_seq: int, keep: Set[BlobKey]) -> None:
        """Delete blobs of earlier holders that no row names."""
        for key in self.keys(task):
            if key not in keep and int(key.split("/")[1]) < below_seq:
                self.delete(key)

    def remove_expired(self, keep_s: float) -> int:
        """Remove the blobs that were deleted this long ago, by the store's clock; returns how many.

        Several processes may do it at the same time.
        """
        before = self._time() - timedelta(seconds=keep_s)
        with self._reporting():
            marked = (
                marker["path"].removeprefix("deleted/")
                for batch in obstore.list(self._store, "deleted/")
                for marker in batch
                if marker["last_modified"] < before
            )
            expired = [key for key in marked if is_key(key)]
            # First the blobs: a marker that stays behind is handled again.
            obstore.delete(self._store, [_path(key) for key in expired])
            obstore.delete(self._store, [f"deleted/{key}" for key in expired])
        return len(expired)

    def signed_url(self, key: BlobKey, valid_s: float) -> str:
        """A URL under which anyone may read a public blob for this time."""
        path = _path(key)
        if not path.startswith("public/"):
            raise MissingBlob(f"blob {key} is not public")
        with self._reporting():
            return obstore.sign(self._store, "GET", path, timedelta(seconds=valid_s))

    # -- files of the log ---------------------------------------------------------------------

    def publish(self, path: str, data: bytes) -> None:
        """A file that never changes. No-op if it exists."""
        self._create(f"log/{path}", data)

    def publish_newest(self, path: str, data: bytes, follows: Callable[[bytes], bool]) -> None:
        """A file that changes, unless `follows` says that the one in the bucket is newer."""
        place = f"log/{path}"
        if self._create(place, data):
            return
        with self._reporting():
            found = obstore.get(self._store, place)
            if not follows(found.bytes().to_bytes()):
                return
            known: UpdateVersion = {"e_tag": found.meta["e_tag"]}
            # Refused if another process was faster; its file is compared next time.
            with suppress(PreconditionError):
                obstore.put(
                    self._store,
                    place,
                    data,
                    mode=known,
                    attributes=_attributes(place),
                    use_multipart=False,
                )

    # -- requests -----------------------------------------------------------------------------

    def _create(self, path: str, data: bytes | list[memoryview]) -> bool:
        """Write an object. False if it exists."""
        try:
            with self._reporting():
                obstore.put(
                    self._store,
                    path,
                    data,
                    mode="create",
                    attributes=_attributes(path),
                    use_multipart=False,
                )
        except AlreadyExistsError:
            return False
        return True

    def _put_in_parts(self, path: str, views: list[memoryview]) -> None:
        parts = (view[at : at + _READ_BYTES] for view in views for at in _starts(view))
        with self._reporting():
            obstore.put(
                self._store,
                path,
                parts,
                attributes=_attributes(path),
                use_multipart=True,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )

    def _is_there(self, key: BlobKey, path: str, size: int) -> bool:
        """Has the blob been written before? MissingBlob if it was deleted."""
        if self._exists(f"deleted/{key}"):
            raise MissingBlob(f"blob {key} was deleted and cannot be written again")
        try:
            found = self.size(key)
        except MissingBlob:
            return False
        if found != size:
            raise OperatorError(
                f"blob {key} exists with {found} bytes, expected {size}",
                hint=f"the object is damaged: remove {self.where}/{path}",
            )
        return True

    def _exists(self, path: str) -> bool:
        try:
            with self._reporting():
                obstore.head(self._store, path)
        except FileNotFoundError:
            return False
        return True

    def has_blobs(self) -> bool:
        """Whether there is any under this prefix, or a marker of one that was deleted."""
        with self._reporting():
            for batch in obstore.list(self._store):
                if any(found["path"] != "cluster" for found in batch):
                    return True
        return False

    def _time(self) -> datetime:
        """The time of the store, as its objects show it. The clock of this machine may be wrong."""
        with self._probe() as probe, self._reporting():
            self._create(probe, b"")
            return obstore.head(self._store, probe)["last_modified"]

    def _names(self, under: str) -> Iterator[BlobKey]:
        """The blob keys of all objects under a prefix, which ends at a slash."""
        kind = under.split("/")[0]
        with self._reporting():
            for batch in obstore.list(self._store, under):
                for found in batch:
                    yield found["path"].removeprefix(f"{kind}/")

    def _check_conditions(self) -> None:
        """Refuse a store that overwrites an object although the request forbids it."""
        with self._probe() as probe:
            if not self._create(probe, b"first") or self._create(probe, b"second"):
                raise OperatorError(
                    f"the store of {self.where} ignores conditional writes (If-None-Match: *)",
                    hint="use a store that supports them, such as Amazon S3, Ceph or MinIO; "
                    "rclone serve s3 does not",
                )

    @contextmanager
    def _probe(self) -> Iterator[str]:
        """The path of an object that is deleted afterwards."""
        probe = f"probe-{token_hex(8)}"
        try:
            yield probe
        finally:
            with self._reporting():
                obstore.delete(self._store, probe)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        with _reporting(self.where):
            yield

    @contextmanager
    def _reading(self, key: BlobKey) -> Iterator[None]:
        try:
            with self._reporting():
                yield
        except FileNotFoundError as error:
            raise MissingBlob(f"blob {key} is missing") from error


def _path(key: BlobKey) -> str:
    check_key(key)
    return f"{'public' if PUBLIC_KEY.fullmatch(key) else 'private'}/{key}"


def _attributes(path: str) -> Attributes:
    if path == "log/checkpoint":
        return {"Cache-Control": "no-cache"}
    return {"Cache-Control": _FOREVER} if path.startswith(("public/", "log/")) else {}


def _starts(view: memoryview) -> range:
    return range(0, view.nbytes, _READ_BYTES)


@contextmanager
def _reporting(where: str) -> Iterator[None]:
    """Let pass that an object is missing or exists; explain everything else."""
    try:
        yield
    except (AlreadyExistsError, PreconditionError, PapayaError):
        raise
    except FileNotFoundError as error:
        if "<Code>NoSuchBucket</Code>" in str(error):
            _explain(where, error)
        raise
    except (BaseError, OSError) as error:
        _explain(where, error)


def _explain(where: str, error: Exception) -> NoReturn:
    """The original error is not chained: its text has the whole answer of the store."""
    text = str(error).partition("\n\nDebug source")[0]
    code, status = _CODE.search(text), _STATUS.search(text)
    if code is not None:
        problem, hint = code[1], _HINTS.get(code[1], "see the store's documentation of this code")
    elif status is not None:
        problem, hint = f"HTTP status {status[1]}", _STATUS_HINTS.get(status[1], _UNREACHABLE_HINT)
    elif "169.254.169.254" in text or "credential" in text.lower():
        problem, hint = "no credentials were found", _CREDENTIALS_HINT
    else:
        problem, hint = "the store cannot be reached", _UNREACHABLE_HINT
    raise OperatorError(f"cannot use {where}: {problem}", hint=hint) from None
