"""Parameters: bounded, checked by the hash in their key, from any source, once per process."""

from __future__ import annotations

import asyncio
from hashlib import sha256

import pytest
from aiohttp import web

from papaya.device.download import Downloads, task_of
from papaya.device.selectors import open_session
from papaya.errors import ProtocolError
from tests.unit.device.fake_selector import (
    KEY,
    PARAMETERS,
    FakeSelector,
    Handler,
    raw,
    reset,
    serving,
)

LENGTH = len(PARAMETERS) // 4


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        while True:
            await response.write(b"x" * 65536)
    except ConnectionError:
        return response


async def fetched(*fakes: FakeSelector, blobs_url: str | None = None) -> bytes:
    async with open_session() as session:
        downloads = Downloads(session, 10.0, blobs_url)
        try:
            return await downloads.get(KEY, LENGTH, [fake.url for fake in fakes])
        finally:
            await downloads.aclose()


@pytest.mark.parametrize(
    "bad",
    [
        raw(b"other bytes"),
        raw(PARAMETERS[:-1]),
        raw(PARAMETERS, 404),
        raw(PARAMETERS, 302, {"Location": "http://127.0.0.1:1/"}),
        raw(b"x" * (4 * LENGTH + 100_000)),
        endless,
        reset,
    ],
)
def test_bad_bytes_are_thrown_away_and_the_next_source_is_asked(bad: Handler) -> None:
    async def scenario() -> None:
        async with serving() as hostile, serving() as honest:
            hostile.replace["parameters"] = bad
            assert await fetched(hostile, honest) == PARAMETERS
            assert set(hostile.seen) == {"parameters"}  # a reset GET may be tried twice
            with pytest.raises(ProtocolError, match="cannot download the parameters"):
                await fetched(hostile)

    asyncio.run(scenario())


def test_a_cdn_is_asked_first_and_selectors_stand_in() -> None:
    async def scenario() -> None:
        async with serving() as cdn, serving() as honest:
            cdn.replace["parameters"] = raw(PARAMETERS)
            assert await fetched(honest, blobs_url=f"{cdn.url}/v1/parameters") == PARAMETERS
            assert (cdn.seen, honest.seen) == (["parameters"], [])
            cdn.replace["parameters"] = raw(b"", 503)
            assert await fetched(honest, blobs_url=f"{cdn.url}/v1/parameters") == PARAMETERS
            assert honest.seen == ["parameters"]

    asyncio.run(scenario())


def test_many_devices_download_a_version_once() -> None:
    async def scenario() -> None:
        async with serving() as fake, open_session() as session:
            downloads = Downloads(session, 10.0)
            asked = [downloads.get(KEY, LENGTH, [fake.url]) for _ in range(20)]
            assert await asyncio.gather(*asked) == [PARAMETERS] * 20
            assert await downloads.get(KEY, LENGTH, [fake.url]) == PARAMETERS
            assert fake.seen == ["parameters"]
            await downloads.aclose()

    asyncio.run(scenario())


def test_a_device_that_leaves_does_not_take_the_download_from_the_others() -> None:
    async def scenario() -> None:
        async with serving() as fake, open_session() as session:
            go_on = asyncio.Event()

            async def slow(request: web.Request) -> web.StreamResponse:
                await go_on.wait()
                return web.Response(body=PARAMETERS)

            fake.replace["parameters"] = slow
            downloads = Downloads(session, 10.0)
            leaves = asyncio.create_task(downloads.get(KEY, LENGTH, [fake.url]))
            stays = asyncio.create_task(downloads.get(KEY, LENGTH, [fake.url]))
            await fake.arrival("parameters").wait()
            leaves.cancel()
            await asyncio.gather(leaves, return_exceptions=True)
            go_on.set()
            assert await stays == PARAMETERS
            assert fake.seen == ["parameters"]
            await downloads.aclose()

    asyncio.run(scenario())


def test_a_failed_download_is_tried_anew() -> None:
    async def scenario() -> None:
        async with serving() as fake, open_session() as session:
            downloads = Downloads(session, 10.0)
            fake.replace["parameters"] = raw(b"", 503)
            with pytest.raises(ProtocolError, match="503"):
                await downloads.get(KEY, LENGTH, [fake.url])
            del fake.replace["parameters"]
            assert await downloads.get(KEY, LENGTH, [fake.url]) == PARAMETERS
            await downloads.aclose()

    asyncio.run(scenario())


def test_the_cache_stays_within_its_bytes() -> None:
    async def scenario() -> None:
        blobs = {
            f"t/0/version-{n}-{sha256(bytes([n]) * 100).hexdigest()[:32]}": n for n in (1, 2, 3)
        }

        async def serve(request: web.Request) -> web.StreamResponse:
            key = request.path.removeprefix("/v1/parameters/")
            return web.Response(body=bytes([blobs[key]]) * 100)

        async with serving() as fake, open_session() as session:
            fake.replace["parameters"] = serve
            downloads = Downloads(session, 10.0, cache_bytes=200)
            for key in (*blobs, *reversed(blobs)):
                await downloads.get(key, 25, [fake.url])
            assert len(fake.seen) == 4  # only the oldest had to go
            await downloads.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "key",
    [
        "",
        "../secret",
        KEY.upper(),
        KEY[:-1],
        KEY + "\n",
        KEY + "/..",
        "/" + KEY,
        KEY.replace("/3/", "/3/../"),
        KEY.replace("next-word", "next word"),
        KEY.replace("next-word", "x" * 65),
    ],
)
def test_a_key_of_another_form_is_asked_of_nobody(key: str) -> None:
    async def scenario() -> None:
        async with serving() as fake, open_session() as session:
            downloads = Downloads(session, 10.0)
            with pytest.raises(ProtocolError, match="key"):
                await downloads.get(key, LENGTH, [fake.url])
            assert fake.seen == []
            await downloads.aclose()

    asyncio.run(scenario())


def test_a_key_names_its_task() -> None:
    assert task_of(KEY) == "next-word"
