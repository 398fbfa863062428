"""Webhooks against a real receiver: signed, tried again, bounded, and never in the way."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from papaya.config import Deployment
from papaya.credentials.token_files import Secret
from papaya.errors import ConfigError
from papaya.messages.events import CredentialsRejected, ServerSeen, TaskHalted, VersionPublished
from papaya.server import webhooks
from papaya.server.logs import BURST, WINDOW_S
from papaya.server.webhooks import ATTEMPTS, MAX_QUEUED, Webhook

KEY = Secret("0123456789abcdef")
HALTED = TaskHalted("digits", 3, "the model is not finite")
PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No delivery is repeated because the machine is busy."""
    monkeypatch.setattr(webhooks, "TIMEOUT_S", PATIENCE_S)


class Receiver:
    """Answers with these statuses, then with 204."""

    def __init__(self, *statuses: int) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        left, requests = list(statuses), self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                requests.append((dict(self.headers.items()), body))
                self.send_response(left.pop(0) if left else 204)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook/s3cret-path"
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def deliver(receiver: Receiver, until: Callable[[Webhook], bool], *events: object) -> Webhook:
    """Offer these events, and wait until it is so."""

    async def run() -> Webhook:
        hook = Webhook(receiver.url, KEY, first_retry_s=0.001, now=lambda: 1000.0)
        for event in events:
            hook.offer(event, "coordinator")  # type: ignore[arg-type]
        sending = asyncio.create_task(hook.run())
        async with asyncio.timeout(PATIENCE_S):
            while not until(hook):
                await asyncio.sleep(0.005)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        return hook

    try:
        return asyncio.run(run())
    finally:
        receiver.close()


def test_an_alert_is_signed() -> None:
    receiver = Receiver()
    deliver(
        receiver,
        lambda hook: len(receiver.requests) == 2,
        ServerSeen("a", 1),
        HALTED,
        VersionPublished("digits", 0, 4, 10),
    )
    (headers, body), (_, second) = receiver.requests
    assert json.loads(body) == {
        "time": 1000.0,
        "event": "task_halted",
        "level": "error",
        "node": "coordinator",
        "task": "digits",
        "seq": 3,
        "why": "the model is not finite",
    }
    mac = hmac.new(KEY.reveal().encode(), b"1000." + body, "sha256").hexdigest()
    assert headers["Papaya-Signature"] == f"t=1000,v1={mac}"
    assert json.loads(second)["event"] == "version_published"


def test_a_failing_receiver_is_tried_again_with_the_same_delivery() -> None:
    receiver = Receiver(500, 429, 503)
    deliver(receiver, lambda hook: len(receiver.requests) == 4, HALTED)
    assert len({headers["Papaya-Delivery"] for headers, _ in receiver.requests}) == 1


@pytest.mark.parametrize(("status", "attempts"), [(302, 1), (404, 1), (500, ATTEMPTS)])
def test_it_gives_up_and_names_only_the_host(
    status: int, attempts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A redirect is not followed."""
    receiver = Receiver(*[status] * attempts)
    with caplog.at_level(logging.WARNING):
        deliver(receiver, lambda hook: bool(caplog.records), HALTED)
    assert len(receiver.requests) == attempts
    assert f"did not accept an event: status {status}" in caplog.text
    assert "s3cret" not in caplog.text


def test_the_queue_is_bounded() -> None:
    receiver = Receiver()
    many = [VersionPublished("digits", 0, version, 10) for version in range(3 * MAX_QUEUED)]
    hook = deliver(receiver, lambda hook: len(receiver.requests) >= MAX_QUEUED, *many)
    assert hook.dropped >= MAX_QUEUED


def test_strangers_cannot_push_alerts_out_of_the_queue() -> None:
    receiver = Receiver()
    rejected = [CredentialsRejected("devices", "")] * (3 * MAX_QUEUED)
    hook = deliver(receiver, lambda hook: len(receiver.requests) > BURST, HALTED, *rejected)
    events = [json.loads(body)["event"] for _, body in receiver.requests]
    assert events == ["task_halted", *["credentials_rejected"] * BURST]
    assert hook.dropped == 0


def test_a_repeated_alert_is_sent_again_after_a_minute() -> None:
    async def run() -> int:
        time = [1000.0]
        hook = Webhook("http://127.0.0.1:1/", KEY, now=lambda: time[0])
        for _ in range(2 * BURST):
            hook.offer(HALTED, "")
        await asyncio.sleep(0)
        time[0] += WINDOW_S
        hook.offer(HALTED, "")
        await asyncio.sleep(0)
        return len(hook._queue)

    assert asyncio.run(run()) == BURST + 1


def test_a_host_that_cannot_exist_does_not_end_the_sender(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server stops if work in the background ends."""

    async def run() -> None:
        hook = Webhook("https://alerts..example.org/", KEY, first_retry_s=0.001)
        hook.offer(HALTED, "")
        sending = asyncio.create_task(hook.run())
        async with asyncio.timeout(PATIENCE_S):
            while not caplog.records:
                await asyncio.sleep(0.005)
        assert not sending.done()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "did not accept an event: UnicodeError" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"webhooks": ("http://example.org/s3cret",), "webhook_key": "k"},
        {"webhooks": ("https://user:s3cret@example.org/",), "webhook_key": "k"},
        {"webhooks": ("https://example.org/s3cret",)},
        {"webhooks": ("https://example.org:65536/s3cret",), "webhook_key": "k"},
    ],
)
def test_settings_that_cannot_work_are_refused_without_quoting_them(
    settings: dict[str, object],
) -> None:
    with pytest.raises(ConfigError) as error:
        Deployment(**settings)  # type: ignore[arg-type]
    assert "s3cret" not in str(error.value)
