"""Frozen tensors of bundles, and the cache of a device: its bounds, and what a crash leaves."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from msgspec import structs

from papaya.bundle.manifest import BlobRef
from papaya.device.bundles import Bundle, BundleStore
from papaya.device.download import Downloads, DownloadsFrom
from papaya.device.selectors import open_session
from papaya.errors import OperatorError, ProtocolError
from papaya.learning.definition import ClientSGD
from papaya.learning.frozen_file import FrozenTensor, encode_frozen, map_frozen
from tests.unit.bundle.builders import ARCHIVE, NOW, a_manifest
from tests.unit.device.bundle_server import (
    FROZEN,
    Open,
    Server,
    anything,
    fetch,
    offer_frozen,
    offered,
    refusal,
    with_frozen,
)
from tests.unit.device.fake_selector import raw, serving
from tests.unit.device.test_download import breaking


def test_frozen_tensors_are_a_blob_of_their_own_and_downloaded_once(
    opened: Open, server: Server
) -> None:
    """A revision that changes the rate, a new run and a restart download the head only."""
    store = opened()
    bundle = fetch(store, server, offer_frozen(server, with_frozen()))
    assert bundle.frozen is not None
    assert map_frozen(bundle.frozen)["base"].shape == (2, 500)
    assert [key.split("/")[2].split("-")[0] for key in server.asked] == [
        *("bundle", "program", "frozen")
    ]
    later = [
        with_frozen(revision=4, client=ClientSGD(rate=0.05)),
        with_frozen(run=int(NOW * 1000), revision=1),
    ]
    for manifest in later:
        server.asked.clear()
        head = offer_frozen(server, manifest)
        assert fetch(store, server, head).frozen == bundle.frozen
        assert server.asked == [head]
    server.asked.clear()
    head = offer_frozen(server, later[-1])
    fetch(opened(), server, head)
    assert server.asked == [head]


@pytest.mark.parametrize(
    "wrong",
    [
        FROZEN[:-1],
        FROZEN + b"x",
        bytes([*FROZEN[:-1], FROZEN[-1] ^ 1]),
        encode_frozen({}),
        ARCHIVE,
    ],
    ids=["truncated", "longer", "flipped", "another file", "the program"],
)
def test_other_frozen_tensors_than_the_signed_ones_are_refused(
    opened: Open, server: Server, tmp_path: Path, wrong: bytes
) -> None:
    store, manifest = opened(), with_frozen()
    key = offer_frozen(server, manifest, wrong)
    error = refusal(store, server, key)
    assert (error.reason, str(error)) == (
        "wrong_bytes",
        "frozen tensors: not the bytes that the owner signed",
    )
    assert store.lacks(key, NOW)
    assert list((tmp_path / "bundles" / "parts").iterdir()) == []
    assert fetch(store, server, offer_frozen(server, manifest)).frozen is not None


def test_frozen_tensors_that_were_damaged_on_disk_are_fetched_again(
    opened: Open, server: Server
) -> None:
    key = offer_frozen(server, with_frozen())
    path = fetch(opened(), server, key).frozen
    assert path is not None
    for damage in (FROZEN[:100], FROZEN[:-1] + b"?"):
        path.write_bytes(damage)
        assert fetch(opened(), server, key).frozen == path
        assert path.read_bytes() == FROZEN


def test_a_device_that_was_restarted_goes_on_with_a_download(
    opened: Open, server: Server, tmp_path: Path
) -> None:
    key, begun, is_cut = offer_frozen(server, with_frozen()), 1000, True
    asked: list[tuple[str, str | None]] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        data = server.blobs[request.path.removeprefix("/v1/parameters/")]
        part = request.headers.get("Range")
        asked.append((request.path.split("/")[-1].split("-")[0], part))
        if not (is_cut and data == FROZEN):
            return await breaking(data, after=len(data))(request)
        return await (breaking(data, after=begun) if part is None else raw(b"", 503))(request)

    async def fetched() -> Bundle:
        async with serving() as selector, open_session() as session:
            selector.replace["parameters"] = reply
            source = DownloadsFrom(Downloads(session, 120.0), [selector.url])
            store = opened()
            try:
                return await store.fetch(key, source, anything, NOW)
            finally:
                store.close()

    with pytest.raises(ProtocolError, match="cannot download the frozen"):
        asyncio.run(fetched())
    [part] = (tmp_path / "bundles" / "parts").iterdir()
    assert part.read_bytes() == FROZEN[:begun]
    asked.clear()
    is_cut = False
    bundle = asyncio.run(fetched())
    assert bundle.frozen is not None
    assert bundle.frozen.read_bytes() == FROZEN
    assert asked == [("bundle", None), ("frozen", f"bytes={begun}-")]


def test_frozen_tensors_count_in_the_cache_and_in_the_policy(
    opened: Open, server: Server, tmp_path: Path
) -> None:
    store = opened(max_bytes=len(FROZEN) + 2 * len(ARCHIVE))
    first = fetch(store, server, offer_frozen(server, with_frozen()))
    assert first.frozen is not None
    other = encode_frozen({"other": FrozenTensor("U8", (900,), np.zeros(900, np.uint8))})
    with pytest.raises(OperatorError, match="no room for"):
        fetch(store, server, offer_frozen(server, with_frozen(other, task="other"), other))
    assert first.frozen.exists(), "it is in use"
    large = structs.replace(with_frozen(), frozen_file=BlobRef("0" * 64, 1 << 26))
    error = refusal(opened(), server, server.offer(large))
    assert error.reason == "not_allowed"
    assert f"a download of {(1 << 26) + len(ARCHIVE)} bytes" in str(error)


def test_frozen_tensors_do_not_displace_the_program_of_their_bundle(
    opened: Open, server: Server
) -> None:
    key = offer_frozen(server, with_frozen())
    for _ in range(2):
        store = opened(max_bytes=len(FROZEN) + len(ARCHIVE) - 1)
        with pytest.raises(OperatorError, match="no room for"):
            fetch(store, server, key)
        store.close()
    assert sum("frozen" in asked for asked in server.asked) == 0, "it does not fit anyway"


def cached_bytes(folder: Path) -> int:
    parts = (folder / "blobs", folder / "programs")
    return sum(f.stat().st_size for part in parts for f in part.rglob("*") if f.is_file())


def test_the_cache_is_bounded_with_its_unpacked_copies(
    opened: Open, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "bundles" / "programs" / ".unpacking-1").mkdir(parents=True)
    (tmp_path / "bundles" / "programs" / ".unpacking-1" / "left").write_bytes(bytes(2_000))
    for number in range(8):
        store = opened(max_bytes=4_500)  # a restart: nothing is in use
        fetch(store, server, offered(server, number))
        store.close()
        assert 1_800 < cached_bytes(tmp_path / "bundles") <= 4_500
    assert not (tmp_path / "bundles" / "programs" / ".unpacking-1").exists()


def test_a_cache_full_of_programs_in_use_takes_no_other(
    opened: Open, server: Server, tmp_path: Path
) -> None:
    store = opened(max_bytes=4_500)
    keys = [offered(server, number) for number in range(3)]
    used = [fetch(store, server, key) for key in keys[:2]]
    with pytest.raises(OperatorError, match=r"no room for .* in the cache of 4500 bytes"):
        fetch(store, server, keys[2])
    assert cached_bytes(tmp_path / "bundles") <= 4_500
    assert all((bundle.program / "task.py").stat().st_size == 900 for bundle in used)


@pytest.mark.parametrize("where", ["fsync", "write_bytes"])
def test_a_full_disk_has_a_reason_and_leaves_nothing_behind(
    opened: Open, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """While the blob is written, or while it is unpacked."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store, key = opened(), server.offer(a_manifest())
    with monkeypatch.context() as broken:
        broken.setattr(os if where == "fsync" else Path, where, full)
        with pytest.raises(
            OperatorError, match=r"cannot keep bundles in .*: No space left"
        ) as told:
            fetch(store, server, key)
    assert "--bundles DIR" in told.value.hint
    assert store.lacks(key, NOW)
    assert list((tmp_path / "bundles" / "programs").iterdir()) == []
    assert len(list((tmp_path / "bundles" / "blobs").iterdir())) == (where == "write_bytes")
    assert (fetch(store, server, key).program / "task.py").read_bytes() == b"task = 1\n"


@pytest.mark.parametrize("what", ["blob", "temporary blob", "unpacked file", "unpacked folder"])
def test_a_device_that_died_at_any_byte_of_a_write_goes_on(
    opened: Open, server: Server, tmp_path: Path, what: str
) -> None:
    manifest = a_manifest()
    key, folder = server.offer(manifest), tmp_path / "bundles"
    for size in range(0, len(ARCHIVE), 3):
        store = opened()
        fetch(store, server, key)
        store.close()
        blob = folder / "blobs" / manifest.program.sha256
        task_file = folder / "programs" / blob.name / "task.py"
        if what == "temporary blob":
            blob.rename(folder / "blobs" / ".half")
            shutil.rmtree(task_file.parent)
        if what == "unpacked folder":
            shutil.rmtree(task_file.parent / "tools")
        left = {"blob": blob, "temporary blob": folder / "blobs" / ".half"}.get(what, task_file)
        os.truncate(left, min(size, left.stat().st_size))
        store = opened()
        bundle = fetch(store, server, key)
        assert (bundle.program / "task.py").read_bytes() == b"task = 1\n"
        assert (bundle.program / "tools" / "words.py").read_bytes() == b"words = ()\n"
        store.close()


def test_a_disk_that_cannot_be_written_is_the_operators_business(tmp_path: Path) -> None:
    (tmp_path / "bundles").write_text("a file")
    with pytest.raises(OperatorError, match="cannot keep bundles in"):
        BundleStore(tmp_path / "bundles", {})
