"""Downloads parameters and bundles by key, once for all devices of a process.

A key ends in the hash of its content, so any source can be used, a CDN or a selector: bytes with
another hash are dropped and the next source is tried. An interrupted download is resumed with
`Range`, at the same source or the next one; the hash covers the whole content. Parameters are kept
in memory. The blobs of a bundle go to a file, where a later process can resume them. A download is
bounded by the length of the model or the size in the manifest. A key of an unknown form is refused.
No token is sent: blobs are public under their hash, and a CDN must not learn the token.

If the owner of the device has named hosts for it, a selector is asked for the URL of the blob,
which is the first source. A URL is used only if it is https (or the selector is http too), its host
is one of these (`papaya/device/allowed_hosts.py`), and its path ends with the key.
"""

from __future__ import annotations

import asyncio
import fcntl
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import aiohttp

from papaya.device.allowed_hosts import AllowedHosts
from papaya.device.selectors import BROKEN, read_bounded, read_into
from papaya.errors import OperatorError, ProtocolError
from papaya.messages import wire
from papaya.messages.base import BlobKey, TaskId
from papaya.messages.paths import URLS_PATH
from papaya.messages.selection import Located

_KEY = re.compile(
    r"(?P<task>[a-z0-9][a-z0-9_-]{0,63})/[0-9]{1,18}/"
    r"(?P<kind>[a-z]{1,16})-[0-9]{1,18}-(?P<hash>[0-9a-f]{32})"
)
_HEADER_BYTES = 8 + (64 << 10)
_STALLED_S = 30.0
_MAX_LOCATED_BYTES = 4096
_READ_BYTES = 1 << 20
_MOST_REQUESTS = 16  # to one source for one download
_RANGE = re.compile(r"bytes ([0-9]{1,15})-[0-9]{1,15}/([0-9]{1,15})", re.ASCII)


def task_of(key: BlobKey) -> TaskId:
    """The task that a blob belongs to; an evaluation reads parameters of another task."""
    return _parse(key)["task"]


def _parse(key: BlobKey) -> re.Match[str]:
    if (parsed := _KEY.fullmatch(key)) is None:
        raise ProtocolError("the server sent a key of an unknown form")
    return parsed


class PartialBlob(bytearray):
    """A download in memory."""

    def sha256(self) -> str:
        return sha256(self).hexdigest()


class PartialFile:
    """A download that goes on from what an earlier process has left in a file.

    Raises ProtocolError if another process is downloading to the same file, and OperatorError if
    the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = sha256()
        self._length = 0
        with self._writing():
            self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ProtocolError("another process is downloading it") from error
        self._file.seek(0)
        while piece := self._file.read(_READ_BYTES):
            self._hash.update(piece)
            self._length += len(piece)

    def __len__(self) -> int:
        return self._length

    def extend(self, piece: bytes) -> None:
        with self._writing():
            self._file.write(piece)
            self._file.flush()
        self._hash.update(piece)
        self._length += len(piece)

    def clear(self) -> None:
        with self._writing():
            self._file.truncate(0)
        self._hash, self._length = sha256(), 0

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OperatorError(
                f"cannot write {self._path}: {error.strerror}",
                hint="free some space, or choose another folder: --bundles DIR",
            ) from error


class Downloads:
    """Invariant: cached data has the hash of its key; the cache has at most `cache_bytes`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        timeout_s: float,
        blobs_url: str | None = None,
        cache_bytes: int = 256 << 20,
        hosts: AllowedHosts | None = None,
    ) -> None:
        """`hosts`: to which a selector may send this device."""
        self._session = session
        self._timeout_s = timeout_s
        self._blobs_url = blobs_url
        self._cache_bytes = cache_bytes
        self._hosts = hosts or AllowedHosts()
        self._cached: OrderedDict[BlobKey, bytes] = OrderedDict()
        self._running: dict[tuple[BlobKey, int], asyncio.Task[bytes]] = {}

    async def get(self, key: BlobKey, model_length: int, selectors: Sequence[str]) -> bytes:
        """The parameters, or ProtocolError if no source has them."""
        return await self.blob(key, 4 * model_length + _HEADER_BYTES, selectors)

    async def blob(self, key: BlobKey, limit: int, selectors: Sequence[str]) -> bytes:
        """Any blob of at most this many bytes."""
        if (found := self._cached.get(key)) is not None:
            self._cached.move_to_end(key)
            return found
        flight = (key, limit)
        if (running := self._running.get(flight)) is None:
            running = asyncio.create_task(self._download(key, limit, selectors))
            self._running[flight] = running
            running.add_done_callback(lambda task: self._landed(flight, task))
        # A device that leaves does not cancel the download for the others.
        return await asyncio.shield(running)

    async def file(self, key: BlobKey, limit: int, selectors: Sequence[str], path: Path) -> None:
        """Download a blob of at most this many bytes to a file, from where an earlier attempt has
        stopped.
        """
        begun = await asyncio.to_thread(PartialFile, path)
        try:
            await self._complete(key, limit, selectors, begun)
        finally:
            begun.close()

    async def aclose(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _landed(self, flight: tuple[BlobKey, int], task: asyncio.Task[bytes]) -> None:
        del self._running[flight]
        if not task.cancelled():
            task.exception()  # retrieve the exception, also if no device waits any more

    async def _download(self, key: BlobKey, limit: int, selectors: Sequence[str]) -> bytes:
        begun = PartialBlob()
        await self._complete(key, limit, selectors, begun)
        body = bytes(begun)
        self._keep(key, body)
        return body

    async def _complete(
        self,
        key: BlobKey,
        limit: int,
        selectors: Sequence[str],
        begun: PartialBlob | PartialFile,
    ) -> None:
        """Add to `begun` until it has the hash in the key, or ProtocolError."""
        parsed = _parse(key)
        digest, kind = parsed["hash"], parsed["kind"]
        sources = [f"{selector}/v1/parameters/{key}" for selector in selectors]
        if self._hosts and (url := await self._locate(key, selectors)) is not None:
            sources.insert(0, url)
        if self._blobs_url is not None:
            sources.insert(0, f"{self._blobs_url}/{key}")
        problem = "no source is configured"
        if len(begun) and begun.sha256().startswith(digest):
            return
        for source in sources:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._finish(source, digest, limit, begun)
            except (ProtocolError, *BROKEN) as error:
                problem = str(error) or type(error).__name__
                if len(begun) > limit:
                    begun.clear()
            else:
                return
        what = "parameters" if kind == "version" else kind
        raise ProtocolError(f"cannot download the {what} of {parsed['task']}: {problem}")

    async def _locate(self, key: BlobKey, selectors: Sequence[str]) -> str | None:
        """A URL of the blob that this device may use, from the first selector that answers."""
        for selector in selectors:
            try:
                async with (
                    asyncio.timeout(_STALLED_S),
                    self._session.get(
                        selector + URLS_PATH.replace("{key...}", key), allow_redirects=False
                    ) as response,
                ):
                    if response.status != HTTPStatus.OK:
                        return None  # this installation has no URLs
                    located = wire.located.parse(await read_bounded(response, _MAX_LOCATED_BYTES))
                assert isinstance(located, Located)
                parts = self._hosts.checked(located.url, selector)
                is_right = parts is not None and parts.path.endswith(f"/{key}")
                return located.url if is_right else None
            except (ProtocolError, *BROKEN):
                continue
        return None

    async def _finish(
        self, url: str, digest: str, limit: int, begun: PartialBlob | PartialFile
    ) -> None:
        """Add to `begun`, which may come from another source, until its hash is right."""
        for _ in range(_MOST_REQUESTS):
            had = len(begun)
            try:
                await self._fetch(url, digest, limit, begun)
            except BROKEN:
                if len(begun) == had:
                    raise  # no progress
                continue
            if begun.sha256().startswith(digest):
                return
            begun.clear()
            if not had:
                raise ProtocolError("the bytes do not match the hash in their key")
            # The beginning may have been wrong: ask this source for the whole.
        raise ProtocolError(f"the connection broke {_MOST_REQUESTS} times")

    async def _fetch(
        self, url: str, digest: str, limit: int, begun: PartialBlob | PartialFile
    ) -> None:
        headers = {}
        if len(begun):
            headers = {"Range": f"bytes={len(begun)}-", "If-Range": f'"{digest}"'}
        timeout = aiohttp.ClientTimeout(sock_read=_STALLED_S)
        async with self._session.get(
            url, headers=headers, allow_redirects=False, timeout=timeout
        ) as response:
            match response.status:
                case HTTPStatus.PARTIAL_CONTENT if len(begun):
                    _check_range(response.headers.get("Content-Range", ""), len(begun), limit)
                case HTTPStatus.OK:
                    begun.clear()
                case HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE if len(begun):
                    return  # what has begun is longer than the file, so it cannot be right
                case status:
                    raise ProtocolError(f"HTTP status {status}")
            await read_into(begun, response, limit)

    def _keep(self, key: BlobKey, body: bytes) -> None:
        self._cached[key] = body
        while sum(map(len, self._cached.values())) > self._cache_bytes:
            self._cached.popitem(last=False)


class DownloadsFrom(NamedTuple):
    """Blobs from the selectors of one device."""

    downloads: Downloads
    selectors: Sequence[str]

    async def blob(self, key: BlobKey, limit: int) -> bytes:
        return await self.downloads.blob(key, limit, self.selectors)

    async def file(self, key: BlobKey, limit: int, path: Path) -> None:
        await self.downloads.file(key, limit, self.selectors, path)


def _check_range(shown: str, start: int, limit: int) -> None:
    found = _RANGE.fullmatch(shown)
    if found is None or int(found[1]) != start or int(found[2]) > limit:
        raise ProtocolError(f"Content-Range {shown[:80]!r} for a part from byte {start} on")
