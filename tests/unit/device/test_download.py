"""Parameters: bounded, checked by the hash in their key, from any source, once per process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from papaya.device.allowed_hosts import AllowedHosts
from papaya.device.download import Downloads, DownloadsFrom, PartialFile, task_of
from papaya.device.selectors import open_session
from papaya.errors import ProtocolError
from papaya.messages.selection import Located
from tests.unit.device.fake_selector import (
    KEY,
    PARAMETERS,
    FakeSelector,
    Handler,
    answer,
    raw,
    reset,
    serving,
)

LENGTH = len(PARAMETERS) // 4
PATIENCE_S = 120.0  # no source here is given up because it is slow


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        while True:
            await response.write(b"x" * 65536)
    except ConnectionError:
        return response


async def fetched(
    *fakes: FakeSelector, blobs_url: str | None = None, hosts: Sequence[str] = ()
) -> bytes:
    async with open_session() as session:
        downloads = Downloads(
            session, PATIENCE_S, blobs_url, hosts=AllowedHosts(hosts, any_port=True)
        )
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


@pytest.mark.parametrize("kind", ["bundle", "program"])
def test_an_altered_bundle_is_not_called_parameters(kind: str) -> None:
    key = KEY.replace("/version-", f"/{kind}-")
    assert key != KEY

    async def scenario() -> None:
        async with serving() as hostile, open_session() as session:
            hostile.replace["parameters"] = raw(b"other bytes")
            downloads = Downloads(session, PATIENCE_S)
            problem = f"cannot download the {kind} .*: the bytes do not match the hash"
            with pytest.raises(ProtocolError, match=problem):
                await downloads.blob(key, 1000, [hostile.url])
            await downloads.aclose()

    asyncio.run(scenario())


def breaking(content: bytes, *, after: int, with_ranges: bool = True) -> Handler:
    """Sends at most `after` bytes of an answer, then breaks the connection."""

    async def reply(request: web.Request) -> web.StreamResponse:
        part = request.http_range if with_ranges else slice(0, None)
        start = part.start or 0
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(content) - start
        if start:
            where = f"bytes {start}-{len(content) - 1}/{len(content)}"
            response.headers["Content-Range"] = where
        await response.prepare(request)
        await response.write(content[start : start + after])
        if start + after < len(content):
            assert request.transport is not None
            request.transport.close()
        return response

    return reply


def test_a_broken_download_is_resumed_where_it_broke() -> None:
    async def scenario() -> None:
        async with serving() as fake:
            fake.replace["parameters"] = breaking(PARAMETERS, after=60)
            assert await fetched(fake) == PARAMETERS
            ranges = [headers.get("Range") for headers in fake.headers]
            assert ranges == [None, "bytes=60-", "bytes=120-", "bytes=180-"]
            tags = {headers.get("If-Range") for headers in fake.headers[1:]}
            assert tags == {f'"{KEY[-32:]}"'}

    asyncio.run(scenario())


def test_a_download_that_breaks_after_any_number_of_bytes_ends_whole_or_not_at_all() -> None:
    """From each source it breaks once, at every seventh byte; what arrives is never a part."""

    async def scenario() -> None:
        async with serving() as first, serving() as second:
            second.replace["parameters"] = ranged
            for after in range(0, len(PARAMETERS), 7):
                first.replace["parameters"] = breaking(PARAMETERS, after=after)
                assert await fetched(first, second) == PARAMETERS

    asyncio.run(scenario())


def test_another_source_goes_on_where_one_broke() -> None:
    async def scenario() -> None:
        async with serving() as first, serving() as second:
            served: list[int] = []

            async def breaks_once(request: web.Request) -> web.StreamResponse:
                served.append(1)
                after = 60 if len(served) == 1 else 0
                return await breaking(PARAMETERS, after=after)(request)

            first.replace["parameters"] = breaks_once
            second.replace["parameters"] = breaking(PARAMETERS, after=1000)
            assert await fetched(first, second) == PARAMETERS
            assert [headers.get("Range") for headers in second.headers] == ["bytes=60-"]

    asyncio.run(scenario())


def test_a_bad_beginning_does_not_spoil_an_honest_source() -> None:
    """A source cannot make a device combine its bytes with those of the next one."""

    async def scenario() -> None:
        for length in (100, 5000):  # shorter and longer than the parameters
            async with serving() as hostile, serving() as honest:
                hostile.replace["parameters"] = breaking(bytes(2 * length), after=length)
                honest.replace["parameters"] = ranged
                assert await fetched(hostile, honest) == PARAMETERS
                assert honest.headers[-1].get("Range") is None

    asyncio.run(scenario())


async def ranged(request: web.Request) -> web.StreamResponse:
    start = request.http_range.start or 0
    if start >= len(PARAMETERS):
        return web.Response(status=416)
    return await breaking(PARAMETERS, after=1000)(request)


def test_a_source_without_ranges_is_asked_for_the_whole() -> None:
    async def scenario() -> None:
        async with serving() as broken, serving() as honest:
            broken.replace["parameters"] = breaking(PARAMETERS, after=60, with_ranges=False)
            assert await fetched(broken, honest) == PARAMETERS

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "where",
    ["bytes 0-139/200", "bytes 61-199/200", "bytes 60-199/999999", "bytes */200", "nonsense", None],
)
def test_a_part_that_was_not_asked_for_is_not_used(where: str | None) -> None:
    async def scenario() -> None:
        async with serving() as hostile:

            async def other_part(request: web.Request) -> web.StreamResponse:
                if "Range" not in request.headers:
                    return await breaking(PARAMETERS, after=60)(request)
                headers = {} if where is None else {"Content-Range": where}
                return web.Response(body=PARAMETERS[60:], status=206, headers=headers)

            hostile.replace["parameters"] = other_part
            with pytest.raises(ProtocolError, match="Content-Range"):
                await fetched(hostile)

    asyncio.run(scenario())


def test_a_source_that_breaks_again_and_again_is_given_up() -> None:
    async def scenario() -> None:
        async with serving() as hostile, serving() as honest:
            hostile.replace["parameters"] = breaking(PARAMETERS, after=1)
            assert await fetched(hostile, honest) == PARAMETERS
            assert 2 <= len(hostile.seen) <= 20

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


def test_a_selector_may_send_a_device_to_hosts_that_its_owner_has_named() -> None:
    async def scenario() -> None:
        async with serving() as bucket, serving() as honest:
            url = f"{bucket.url}/v1/parameters/{KEY}?X-Amz-Signature=00"
            honest.replace["urls"] = answer(Located(url))
            assert await fetched(honest, hosts=["127.0.0.1"]) == PARAMETERS
            assert (bucket.seen, honest.seen) == (["parameters"], ["urls"])
            assert not {"Authorization", "Cookie", "Referer"} & bucket.headers[0].keys()

    asyncio.run(scenario())


def test_without_named_hosts_no_selector_is_asked_for_a_url() -> None:
    async def scenario() -> None:
        async with serving() as honest:
            assert await fetched(honest) == PARAMETERS
            assert honest.seen == ["parameters"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:{port}/v1/parameters/{key}",  # another host
        "http://user@127.0.0.1:{port}/v1/parameters/{key}",
        "http://127.0.0.1:{port}/v1/parameters/{key}#x",
        "http://127.0.0.1:{port}/v1/parameters/other",
        "http://127.0.0.1:{port}/?/{key}",
        "ftp://127.0.0.1:{port}/v1/parameters/{key}",
        "http://[127.0.0.1:{port}/v1/parameters/{key}",
        "http://127.0.0.1:99999/v1/parameters/{key}",
        "http://127.0.0.1:{port}/" + "x" * 2048 + "/{key}",
    ],
)
def test_other_urls_are_not_used(url: str) -> None:
    async def scenario() -> None:
        async with serving() as other, serving() as honest:
            port = other.url.rpartition(":")[2]
            body = b'{"type":"Located","url":"%s"}' % url.format(port=port, key=KEY).encode()
            honest.replace["urls"] = raw(body)
            assert await fetched(honest, hosts=["127.0.0.1"]) == PARAMETERS
            assert (other.seen, honest.seen) == ([], ["urls", "parameters"])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "bad", [raw(b"other"), raw(b"", 403), raw(b"", 302, {"Location": "http://127.0.0.1:1/"}), reset]
)
def test_a_url_that_fails_is_replaced_by_the_selectors(bad: Handler) -> None:
    async def scenario() -> None:
        async with serving() as bucket, serving() as honest:
            bucket.replace["parameters"] = bad
            honest.replace["urls"] = answer(Located(f"{bucket.url}/v1/parameters/{KEY}"))
            assert await fetched(honest, hosts=["127.0.0.1"]) == PARAMETERS
            assert honest.seen == ["urls", "parameters"]

    asyncio.run(scenario())


@pytest.mark.parametrize("bad", [raw(b"garbage"), raw(b"", 404), reset])
def test_a_selector_without_urls_sends_the_bytes_itself(bad: Handler) -> None:
    async def scenario() -> None:
        async with serving() as honest:
            honest.replace["urls"] = bad
            assert await fetched(honest, hosts=["127.0.0.1"]) == PARAMETERS

    asyncio.run(scenario())


def test_many_devices_download_a_version_once() -> None:
    async def scenario() -> None:
        async with serving() as fake, open_session() as session:
            downloads = Downloads(session, PATIENCE_S)
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
            downloads = Downloads(session, PATIENCE_S)
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
            downloads = Downloads(session, PATIENCE_S)
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
            downloads = Downloads(session, PATIENCE_S, cache_bytes=200)
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
            downloads = Downloads(session, PATIENCE_S)
            with pytest.raises(ProtocolError, match="key"):
                await downloads.get(key, LENGTH, [fake.url])
            assert fake.seen == []
            await downloads.aclose()

    asyncio.run(scenario())


def test_a_key_names_its_task() -> None:
    assert task_of(KEY) == "next-word"


def saved(path: Path, *fakes: FakeSelector) -> Coroutine[Any, Any, None]:
    async def save() -> None:
        async with open_session() as session:
            downloads = Downloads(session, PATIENCE_S)
            urls = [fake.url for fake in fakes]
            await DownloadsFrom(downloads, urls).file(KEY, len(PARAMETERS), path)

    return save()


def test_a_download_to_a_file_goes_on_after_a_restart_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "part"

    async def scenario() -> None:
        for had in range(0, len(PARAMETERS) + 1, max(1, len(PARAMETERS) // 40)):
            path.write_bytes(PARAMETERS[:had])
            async with serving() as fake:
                fake.replace["parameters"] = breaking(PARAMETERS, after=1000)
                await saved(path, fake)
            assert path.read_bytes() == PARAMETERS
            expected = {0: [None], len(PARAMETERS): []}
            ranges = [headers.get("Range") for headers in fake.headers]
            assert ranges == expected.get(had, [f"bytes={had}-"])

    asyncio.run(scenario())


@pytest.mark.parametrize("left", [b"wrong", PARAMETERS + b"x", PARAMETERS[::-1]])
def test_a_wrong_beginning_on_disk_is_replaced(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "part"
    path.write_bytes(left)

    async def scenario() -> None:
        async with serving() as fake:
            fake.replace["parameters"] = ranged
            await saved(path, fake)

    asyncio.run(scenario())
    assert path.read_bytes() == PARAMETERS


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "part"
    first = PartialFile(path)

    async def scenario() -> None:
        async with serving() as fake:
            fake.replace["parameters"] = ranged
            with pytest.raises(ProtocolError, match="another process is downloading it"):
                await saved(path, fake)
            first.close()
            await saved(path, fake)

    asyncio.run(scenario())
    assert path.read_bytes() == PARAMETERS
