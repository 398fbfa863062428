"""Tiles: names as in the specification, hashes and entries that come back, nothing short."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.tiles import (
    TileNodes,
    entries_path,
    join_entries,
    split_entries,
    split_hashes,
    tile_path,
    width_of,
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (tile_path(0, 0, 256), "tile/0/000"),
        (tile_path(0, 0, 1), "tile/0/000.p/1"),
        (tile_path(1, 5, 17), "tile/1/005.p/17"),
        (tile_path(0, 999, 256), "tile/0/999"),
        (tile_path(0, 1000, 256), "tile/0/x001/000"),
        (tile_path(0, 1234067, 256), "tile/0/x001/x234/067"),
        (entries_path(1234067, 8), "tile/entries/x001/x234/067.p/8"),
    ],
)
def test_paths_are_those_of_the_specification(path: str, expected: str) -> None:
    assert path == expected


@pytest.mark.parametrize(("number", "width"), [(0, 0), (0, 257), (-1, 1)])
def test_tiles_that_cannot_be_have_no_path(number: int, width: int) -> None:
    with pytest.raises(LogError):
        tile_path(0, number, width)


def test_a_tree_of_70_000_has_the_tiles_of_the_specification() -> None:
    """C2SP: 273 full and one of 112 at level 0; one full and one of 17 at level 1; one of 1."""
    assert [width_of(70_000, 0, n) for n in (0, 272, 273, 274)] == [256, 256, 112, 0]
    assert [width_of(70_000, 1, n) for n in (0, 1, 2)] == [256, 17, 0]
    assert [width_of(70_000, 2, n) for n in (0, 1)] == [1, 0]
    assert [width_of(256, level, 0) for level in (0, 1, 2)] == [256, 1, 0]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=256))
def test_entries_come_back(entries: list[bytes]) -> None:
    assert split_entries(join_entries(entries), len(entries)) == entries


def test_a_partial_bundle_is_the_beginning_of_the_full_one() -> None:
    full = [bytes([i]) for i in range(256)]
    assert split_entries(join_entries(full), 3) == full[:3]
    assert split_hashes(bytes(256 * 32), 3) == [bytes(32)] * 3


@pytest.mark.parametrize("raw", [b"", b"\x00", b"\x00\x02a", b"\x00\x01a\x00", b"\x00\x01ab"])
def test_broken_bundles_are_refused(raw: bytes) -> None:
    with pytest.raises(LogError):
        split_entries(raw, 1)


@given(st.binary(max_size=600), st.integers(1, 256))
def test_arbitrary_bundles_are_refused_or_have_their_width(raw: bytes, width: int) -> None:
    with contextlib.suppress(LogError):
        assert len(split_entries(raw, width)) == width


@pytest.mark.parametrize("size", [0, 32, 95, 97, 128])
def test_broken_tiles_are_refused(size: int) -> None:
    with pytest.raises(LogError):
        split_hashes(bytes(size), 3)


def test_an_entry_that_is_too_long_is_refused() -> None:
    with pytest.raises(LogError, match="longer than 65535"):
        join_entries([bytes(65536)])


def test_nodes_that_no_tree_has_are_refused() -> None:
    nodes = TileNodes(lambda path: bytes(32 * 5), 5)
    with pytest.raises(LogError, match="not complete"):
        nodes(2, 1)
    with pytest.raises(LogError, match="no tile 1 at level 0"):
        nodes(0, 256)
    with pytest.raises(LogError, match="no tile 0 at level 1"):
        nodes(8, 0)
