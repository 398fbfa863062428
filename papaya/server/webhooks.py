"""Webhooks: posts alerts and new versions to the operator's URLs. Never blocks the server.

    log(event) ──▶ queue of one URL (bounded) ──▶ thread: POST, signed ──▶ 2xx, or try again later

It sends `version_published` and every event of the level warning or error. The body is the event as
in the JSON log. As there, of equal warnings and errors only the first ten within a minute are sent:
strangers whose tokens are refused must not push alerts out of the queue.

`Papaya-Signature: t=TIME,v1=HEX` is HMAC-SHA256 of `TIME.BODY` under the key of the deployment:
receivers check it, and refuse old times. Redirects are not followed, and answers are not read. If a
receiver is away for long, the oldest events of its queue are dropped.

A URL may contain a secret, so logs name only its host.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from secrets import token_hex
from urllib.parse import urlsplit

import msgspec

from papaya.credentials.token_files import Secret
from papaya.messages.events import ServerEvent, VersionPublished
from papaya.server.crew import on_thread
from papaya.server.logs import FewOfEach

logger = logging.getLogger("papaya.webhooks")

MAX_QUEUED = 100
ATTEMPTS = 6
TIMEOUT_S = 10.0
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
_TOO_MANY = 429


def is_sent(event: ServerEvent) -> bool:
    return isinstance(event, VersionPublished) or event.level in ("warning", "error")


def signature(key: Secret, at: int, body: bytes) -> str:
    mac = hmac.new(key.reveal().encode(), b"%d." % at + body, "sha256")
    return f"t={at},v1={mac.hexdigest()}"


class Webhook:
    """One URL and the events that wait for it. `offer` may be called by any thread."""

    def __init__(
        self,
        url: str,
        key: Secret,
        *,
        first_retry_s: float = FIRST_RETRY_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._url = urlsplit(url)
        self.host = self._url.hostname or ""
        self._key = key
        self._first_retry_s = first_retry_s
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()
        self._waiting = asyncio.Event()
        self._alerts = FewOfEach()
        self.dropped = 0

    def offer(self, event: ServerEvent, node: str) -> None:
        if is_sent(event) and not self._loop.is_closed():
            fields = {"node": node} if node else {}
            told = {"time": self._now(), "event": event.name(), "level": event.level}
            body = msgspec.json.encode({**told, **fields, **event.fields})
            self._loop.call_soon_threadsafe(self._take, event, body)

    def _take(self, event: ServerEvent, body: bytes) -> None:
        is_version = isinstance(event, VersionPublished)
        if not is_version and not self._alerts.passes(event, self._now()):
            return
        if len(self._queue) >= MAX_QUEUED:
            self._queue.popleft()
            self.dropped += 1
            logger.warning("the webhook at %s is too slow: events are dropped", self.host)
        self._queue.append(body)
        self._waiting.set()

    async def run(self) -> None:
        """Send until cancelled, in the order of the events."""
        while True:
            await self._waiting.wait()
            while self._queue:
                await self._send(self._queue.popleft())
            self._waiting.clear()

    async def _send(self, body: bytes) -> None:
        delivery, wait_s, problem = token_hex(8), self._first_retry_s, ""
        for _ in range(ATTEMPTS):
            try:
                status = await on_thread(self._post, body, delivery)
            except (OSError, HTTPException, ValueError) as error:  # the last: no name of a host
                problem = f"{type(error).__name__}"
            else:
                if 200 <= status < 300:
                    return
                problem = f"status {status}"
                if 300 <= status < 500 and status != _TOO_MANY:
                    break  # permanent: a retry would get the same answer
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)
        logger.warning("the webhook at %s did not accept an event: %s", self.host, problem)

    def _post(self, body: bytes, delivery: str) -> int:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "https":
            context = ssl.create_default_context()
            connection: HTTPConnection = HTTPSConnection(
                host, port, timeout=TIMEOUT_S, context=context
            )
        else:
            connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
        target = self._url.path or "/"
        if self._url.query:
            target += f"?{self._url.query}"
        headers = {
            "Content-Type": "application/json",
            "Papaya-Delivery": delivery,
            "Papaya-Signature": signature(self._key, int(self._now()), body),
        }
        try:
            connection.request("POST", target, body, headers)
            return connection.getresponse().status
        finally:
            connection.close()
