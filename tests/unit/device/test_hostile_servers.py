"""A server that lies, floods, hangs or breaks off: the device keeps its bounds and lives on."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from papaya.attestation.verify import MAX_COLLATERAL_BYTES, MAX_QUOTE_BYTES
from papaya.client.work import Finish
from papaya.config import DeviceConfig
from papaya.device.limits import DeviceLimits
from papaya.device.selectors import MAX_ANSWER_BYTES
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import (
    Alive,
    ChunkReceived,
    Completed,
    Incomplete,
    Left,
    Retry,
    SecureOffer,
    UploadGranted,
)
from papaya.messages.selection import Accepted, Rejected
from tests.unit.device.fake_selector import (
    GRANTED,
    JOINED,
    KEY,
    QUICK,
    Clock,
    FakeSelector,
    Handler,
    answer,
    device,
    joined,
    process,
    raw,
    reset,
    serving,
)

IMPATIENT = structs.replace(QUICK, request_timeout_s=0.1, check_in_timeout_s=0.1)
STAGES = ("check-in", "join", "report", "chunk", "complete")
NO_ANSWERS = {
    "garbage": raw(b"\x00\xff{{{"),
    "html": raw(b"<html>502 Bad Gateway</html>", 502),
    "empty": raw(b"", 500),
    "unknown type": raw(b'{"type":"Execute","code":"rm -rf /"}'),
    "a request": raw(b'{"type":"Join","ticket":""}'),
    "a list": raw(b"[" * 10_000),
    "zipped": raw(gzip.compress(wire.encode(Completed())), headers={"Content-Encoding": "gzip"}),
    "elsewhere": raw(b"", 307, {"Location": "http://127.0.0.1:1/v1/check-in"}),
    "reset": reset,
}


async def visit(
    fake: FakeSelector, config: DeviceConfig = QUICK, limits: DeviceLimits | None = None
) -> Finish:
    async with process(limits=limits) as host:
        with device(host, fake.url, config=config) as phone:
            return await phone.visit()


async def visit_for_hours(
    fake: FakeSelector, where: str, config: DeviceConfig = QUICK, limits: DeviceLimits | None = None
) -> Finish:
    """Hours pass when the server has been asked there for the third time."""
    clock = Clock()

    def pass_time(what: str) -> None:
        if fake.seen.count(where) == 3:
            clock.pass_(1e4)

    fake.on_seen = pass_time
    async with asyncio.timeout(300), process(limits=limits, now=clock) as host:
        with device(host, fake.url, config=config) as phone:
            return await phone.visit()


async def endless(request: web.Request) -> web.StreamResponse:
    """A body without an end. The device has to hang up."""
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        while True:
            await response.write(b" " * 65536)
    except ConnectionError:
        return response


async def silence(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


@pytest.mark.parametrize("kind", NO_ANSWERS)
@pytest.mark.parametrize("where", ["check-in", "report"])
def test_what_is_no_answer_is_asked_again_and_given_up(where: str, kind: str) -> None:
    async def scenario() -> None:
        async with serving() as fake:
            fake.replace[where] = NO_ANSWERS[kind]
            finish = await visit_for_hours(fake, where)
        assert finish.ending == "gave_up"
        assert fake.seen.count(where) >= 3
        assert "chunk" not in fake.seen

    asyncio.run(scenario())


@pytest.mark.parametrize("where", STAGES)
@pytest.mark.parametrize("flood", [endless, silence, raw(b" " * (MAX_ANSWER_BYTES + 1))])
def test_a_flood_and_a_silence_end_within_the_devices_time(where: str, flood: Handler) -> None:
    async def scenario() -> None:
        async with serving() as fake:
            fake.replace[where] = flood
            config = IMPATIENT if flood is silence else QUICK
            assert (await visit_for_hours(fake, where, config)).ending == "gave_up"

    asyncio.run(scenario())


def test_the_longest_evidence_of_the_protocol_is_an_answer() -> None:
    """Collateral and quote at their limits, in a grant, as base64."""
    longest = SecureOffer(
        b"p" * 1024, b"o" * 112, b"i" * 32, "s" * 64, b"q" * (16 << 10), b"c" * (256 << 10), 2**53
    )
    assert len(longest.collateral) >= MAX_COLLATERAL_BYTES
    assert len(longest.evidence) >= MAX_QUOTE_BYTES
    granted = UploadGranted(b"t" * 1024, 7, 8, 30.0, longest)
    assert len(wire.encode(granted)) <= MAX_ANSWER_BYTES

    async def scenario() -> None:
        async with serving() as fake:
            fake.joined = joined(secure=True)
            fake.replace["report"] = answer(granted)
            # Any policy: without terms of a task file nothing is sealed.
            async with process(trust=object()) as host:
                with device(host, fake.url) as phone:
                    finish = await phone.visit()
        assert (finish.ending, finish.reason) == ("failed", "declined")
        assert fake.seen.count("report") == 1

    asyncio.run(scenario())


WRONG: list[Message] = [
    Accepted(b"a", "next-word", "s"),
    JOINED,
    Alive(),
    GRANTED,
    ChunkReceived("u", 0),
    Incomplete((0,)),
    Completed(),
    Left(),
    Rejected("come back", 1.0, 2.0),
]
RIGHT = {
    "check-in": (Accepted, Rejected),
    "join": (type(JOINED),),
    "report": (UploadGranted,),
    "chunk": (ChunkReceived, Completed),
    "complete": (Completed, Incomplete),
}


@pytest.mark.parametrize("where", STAGES)
def test_an_answer_of_the_wrong_kind_ends_the_visit(where: str) -> None:
    async def scenario() -> None:
        async with serving() as fake:
            for message in WRONG:
                if not isinstance(message, RIGHT[where]):
                    fake.seen.clear()
                    fake.replace[where] = answer(message)
                    finish = await visit(fake)
                    assert finish.ending == "failed"
                    assert fake.seen[-1] == (
                        "leave" if fake.seen.count("join") and where != "join" else where
                    )

    asyncio.run(scenario())


def test_an_upload_that_is_never_complete_enough_ends() -> None:
    async def scenario() -> None:
        async with serving() as fake:
            fake.replace["complete"] = answer(Incomplete((0, 1, 4095)))
            finish = await visit_for_hours(fake, "complete")
        assert finish.ending == "gave_up"
        assert finish.detail.endswith("took too long")
        assert fake.seen[-1] == "leave"

    asyncio.run(scenario())


def test_a_server_cannot_make_a_device_wait_for_long() -> None:
    async def scenario() -> None:
        async with serving() as fake:
            fake.replace["join"] = answer(Retry("later", 1e300))
            limits = DeviceLimits(max_retry_after_s=0.01)
            assert (await visit_for_hours(fake, "join", limits=limits)).ending == "gave_up"
            assert fake.seen.count("join") >= 3
            fake.replace["check-in"] = answer(Rejected("later", 1e300, 1e308))
            finish = await visit(fake, limits=DeviceLimits(max_rejected_s=60.0))
            assert (finish.retry_from_s, finish.retry_until_s) == (60.0, 60.0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_length": 2**40}, "declined"),
        ({"update_length": 2**40}, "declined"),
        ({"task": "another"}, "protocol"),
        ({"parameters": KEY.replace("next-word", "another")}, "protocol"),
        ({"parameters": "../../etc/passwd"}, "no_parameters"),
        ({"parameters": f"{KEY}?x=http://127.0.0.1"}, "no_parameters"),
        ({"parameters": ""}, "no_parameters"),
    ],
)
def test_an_offer_that_makes_no_sense_is_left_before_a_download(
    changes: dict[str, object], reason: str
) -> None:
    async def scenario() -> None:
        async with serving() as fake:
            fake.joined = joined(**changes)
            assert await visit(fake) == Finish("failed", reason)
        assert fake.seen == ["check-in", "join", "leave"]

    asyncio.run(scenario())


def test_a_crowd_of_cookies_is_not_carried_to_the_next_request() -> None:
    async def scenario() -> None:
        async with serving() as fake:
            accepted = wire.encode(Accepted(b"a", "next-word", "s"))
            fake.replace["check-in"] = raw(accepted, headers={"Set-Cookie": "device=42; Path=/"})
            assert (await visit(fake)).ending == "counted"
        assert not any("Cookie" in headers for headers in fake.headers)

    asyncio.run(scenario())


def test_a_device_does_not_take_part_against_its_history_after_a_restart(tmp_path: Path) -> None:
    """The server offers the task again and again; the device knows better."""

    async def scenario() -> None:
        async with serving() as fake:
            fake.joined = joined(participation_gap_s=0.0)
            config = structs.replace(QUICK, participation_floor_s=3600.0)
            endings = []
            for _ in range(3):
                async with process() as host:
                    with device(
                        host, fake.url, config=config, store=tmp_path / "device.db"
                    ) as phone:
                        endings.append((await phone.visit()).ending)
        assert endings == ["counted", "gave_up", "gave_up"]
        assert fake.seen.count("chunk") == 2
        assert [m.excluded for m in fake.messages if hasattr(m, "excluded")] == [
            (),
            ("next-word",),
            ("next-word",),
        ]

    asyncio.run(scenario())


@settings(max_examples=25)
@given(
    st.dictionaries(
        st.sampled_from((*STAGES, "heartbeat")),
        st.one_of(
            st.binary(max_size=200),
            st.sampled_from(WRONG).map(wire.encode),
            st.sampled_from([wire.encode(message) for message in WRONG]).flatmap(
                lambda whole: st.integers(0, len(whole)).map(lambda cut: whole[:cut])
            ),
        ),
    )
)
@example({"join": wire.encode(JOINED), "report": b""})  # time for the report by the device's limits
def test_whatever_is_answered_a_visit_ends(answers: dict[str, bytes]) -> None:
    limits = DeviceLimits(max_training_s=1.0, max_upload_s=0.05, max_heartbeat_s=0.2)

    async def scenario() -> None:
        async with serving() as fake:
            fake.joined = joined(training_timeout_s=0.2, heartbeat_s=0.2)
            fake.replace |= {where: raw(body) for where, body in answers.items()}
            config = structs.replace(IMPATIENT, give_up_s=0.05, request_timeout_s=0.05)
            async with asyncio.timeout(300):
                await visit(fake, config, limits)

    asyncio.run(scenario())
