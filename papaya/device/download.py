"""Downloads parameters by key, from a CDN or the selectors, once for all devices of a process.

A key ends in the hash of its content, so any source will do: bytes with another hash are dropped
and the next source is tried. A download is bounded by the length of the model. A key of an unknown
form is refused. No token is sent: parameters are public under their hash, and a CDN must not learn
the token.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

import aiohttp

from papaya.device.selectors import BROKEN, read_bounded
from papaya.errors import ProtocolError
from papaya.messages.base import BlobKey, TaskId

_KEY = re.compile(
    r"(?P<task>[a-z0-9][a-z0-9_-]{0,63})/[0-9]{1,18}/[a-z]{1,16}-[0-9]{1,18}-(?P<hash>[0-9a-f]{32})"
)
_HEADER_BYTES = 8 + (64 << 10)
_STALLED_S = 30.0


def task_of(key: BlobKey) -> TaskId:
    """The task that a blob belongs to; an evaluation reads parameters of another task."""
    return _parse(key)["task"]


def _parse(key: BlobKey) -> re.Match[str]:
    if (parsed := _KEY.fullmatch(key)) is None:
        raise ProtocolError("the server sent a parameters key of an unknown form")
    return parsed


class Downloads:
    """Invariant: cached data has the hash of its key; the cache has at most `cache_bytes`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        timeout_s: float,
        blobs_url: str | None = None,
        cache_bytes: int = 256 << 20,
    ) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._blobs_url = blobs_url
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[BlobKey, bytes] = OrderedDict()
        self._running: dict[tuple[BlobKey, int], asyncio.Task[bytes]] = {}

    async def get(self, key: BlobKey, model_length: int, selectors: Sequence[str]) -> bytes:
        """The parameters, or ProtocolError if no source has them."""
        return await self.blob(key, 4 * model_length + _HEADER_BYTES, selectors)

    async def blob(self, key: BlobKey, limit: int, selectors: Sequence[str]) -> bytes:
        """Any blob of at most so many bytes."""
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
        digest = _parse(key)["hash"]
        sources = [f"{selector}/v1/parameters" for selector in selectors]
        if self._blobs_url is not None:
            sources.insert(0, self._blobs_url)
        problem = "no source is configured"
        for source in sources:
            try:
                body = await self._fetch(f"{source}/{key}", limit)
            except (ProtocolError, *BROKEN) as error:
                problem = str(error) or type(error).__name__
                continue
            if sha256(body).hexdigest().startswith(digest):
                self._keep(key, body)
                return body
            problem = "the bytes do not have the hash of their key"
        raise ProtocolError(f"cannot download the parameters: {problem}")

    async def _fetch(self, url: str, limit: int) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_read=_STALLED_S)
        async with self._session.get(url, allow_redirects=False, timeout=timeout) as response:
            if response.status != 200:
                raise ProtocolError(f"HTTP status {response.status}")
            return await read_bounded(response, limit)

    def _keep(self, key: BlobKey, body: bytes) -> None:
        self._cached[key] = body
        while sum(map(len, self._cached.values())) > self._cache_bytes:
            self._cached.popitem(last=False)
