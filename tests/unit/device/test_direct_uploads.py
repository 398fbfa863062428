"""Where a device sends its upload if the grant names an address, and what it sends there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec import structs

from papaya.client.work import Finish
from papaya.credentials.token_files import Secret
from papaya.device.events import Event, Notify, UploadRerouted, nobody
from papaya.messages.base import Message
from papaya.messages.participation import Alive, Incomplete, Refused, Retry
from tests.unit.device.fake_selector import (
    GRANTED,
    UPDATE,
    FakeSelector,
    Handler,
    answer,
    device,
    process,
    raw,
    reset,
    serving,
)

LOCAL = "127.0.0.1:*"


def visit(
    prepare: Callable[[FakeSelector], None] = lambda direct: None,
    *upload_hosts: str,
    notify: Notify = nobody,
) -> tuple[Finish, FakeSelector, FakeSelector]:
    """How it ended, the selector, and the server at the `upload_url`."""

    async def run() -> tuple[Finish, FakeSelector, FakeSelector]:
        async with serving() as selector, serving() as direct:
            prepare(direct)
            granted = structs.replace(GRANTED, upload_url=direct.url)
            selector.replace["report"] = answer(granted)
            async with process(upload_hosts=upload_hosts, notify=notify) as host:
                with device(host, selector.url, token=Secret("device token")) as phone:
                    return await phone.visit(), selector, direct

    return asyncio.run(run())


def test_only_the_upload_goes_to_the_address_and_no_token() -> None:
    finish, selector, direct = visit(lambda direct: None, LOCAL)
    assert finish.ending == "counted"
    assert direct.seen == ["chunk", "chunk", "complete"]
    assert direct.completed == [UPDATE]
    assert not {"chunk", "complete"} & set(selector.seen)
    assert "Authorization" in selector.headers[0]
    assert not {"authorization", "cookie"} & {
        name.lower() for headers in direct.headers for name in headers
    }


@pytest.mark.parametrize(
    "hosts", [(), ("uploads.example", "*.0.0.1.example"), ("127.0.0.1",), ("127.0.0.1:1",)]
)
def test_an_address_that_the_owner_does_not_allow_is_not_used(hosts: tuple[str, ...]) -> None:
    told: list[Event] = []
    finish, selector, direct = visit(lambda direct: None, *hosts, notify=told.append)
    assert finish.ending == "counted"
    assert direct.seen == []
    assert selector.completed == [UPDATE]
    rerouted = [event for event in told if isinstance(event, UploadRerouted)]
    assert [(e.server, e.reason) for e in rerouted] == [(direct.url, "not_allowed")] * bool(hosts)


BAD_ANSWERS: dict[str, Message | Handler] = {
    "refused": Refused("no such path"),
    "elsewhere": Retry("this aggregator does not hold the task", 60.0, elsewhere=True),
    "an answer to another request": Alive(),
    "an answer to Complete": Incomplete((0,)),
    "a redirect": raw(b"", 307, {"Location": "http://127.0.0.1:1/"}),
    "a page": raw(b"<html>It works!</html>"),
    "reset": reset,
}


REASONS = {"refused": "refused", "elsewhere": "moved", "a redirect": "unanswered"}
REASONS |= {"a page": "unanswered", "reset": "unanswered"}


@pytest.mark.parametrize("how", BAD_ANSWERS)
def test_whatever_the_address_answers_the_update_goes_through_the_selector(how: str) -> None:
    bad = BAD_ANSWERS[how]
    handler = answer(bad) if isinstance(bad, Message) else bad
    prepare = lambda direct: direct.replace.update(chunk=handler)  # noqa: E731
    told: list[Event] = []
    finish, selector, direct = visit(prepare, LOCAL, notify=told.append)
    assert finish.ending == "counted", finish
    assert set(direct.seen) == {"chunk"}
    assert selector.completed == [UPDATE]
    [rerouted] = [event for event in told if isinstance(event, UploadRerouted)]
    assert rerouted.server == direct.url
    assert rerouted.reason == REASONS.get(how, "unexpected")
    assert rerouted.problem
    assert rerouted.problem != "no answer came in time", "it says what has happened"
