"""Tiles (C2SP tlog-tiles): a log's tree and entries as files of 256 hashes or entries each.

    checkpoint
    tile/<level>/<number>[.p/<width>]       hashes of complete subtrees of 256^level leaves
    tile/entries/<number>[.p/<width>]       entries, each after its length in two bytes

Partial tiles have their width in their name, so every file except `checkpoint` is immutable and can
be cached. Nothing is verified here: readers build proofs from tiles and verify those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from papaya.verifiable_log.errors import LogError, MissingFile
from papaya.verifiable_log.merkle import HASH_BYTES, node_hash

Fetch: TypeAlias = Callable[[str], bytes]

CHECKPOINT = "checkpoint"
TILE_WIDTH = 256
TILE_HEIGHT = 8
MAX_ENTRY_BYTES = 2**16 - 1
MAX_FILE_BYTES = TILE_WIDTH * (2 + MAX_ENTRY_BYTES)
_MAX_LEVEL = 63


def tile_path(level: int, number: int, width: int) -> str:
    return f"tile/{level}/{_numbered(number, width)}"


def entries_path(number: int, width: int) -> str:
    return f"tile/entries/{_numbered(number, width)}"


def _numbered(number: int, width: int) -> str:
    if not 1 <= width <= TILE_WIDTH or number < 0:
        raise LogError(f"there is no tile {number} of width {width}")
    digits = f"{number:03d}"
    digits = digits.zfill(-(-len(digits) // 3) * 3)
    groups = [digits[i : i + 3] for i in range(0, len(digits), 3)]
    path = "/".join([*(f"x{group}" for group in groups[:-1]), groups[-1]])
    return path if width == TILE_WIDTH else f"{path}.p/{width}"


def width_of(size: int, level: int, number: int) -> int:
    """How many hashes tile `number` of this level has in a tree of this size; 0 if none."""
    hashes = size >> (TILE_HEIGHT * level)
    return max(0, min(TILE_WIDTH, hashes - number * TILE_WIDTH))


class TileNodes:
    """`Nodes` for the proofs in `merkle`, over the tiles of one tree; caches tiles."""

    def __init__(self, fetch: Fetch, size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._tiles: dict[tuple[int, int], list[bytes]] = {}

    def __call__(self, level: int, index: int) -> bytes:
        tile_level, height = divmod(level, TILE_HEIGHT)
        number, offset = divmod(index << height, TILE_WIDTH)
        hashes = self._tile(tile_level, number)[offset : offset + (1 << height)]
        if len(hashes) != 1 << height:
            raise LogError(f"the subtree {index} at level {level} is not complete")
        return subtree_root(hashes)

    def _tile(self, level: int, number: int) -> list[bytes]:
        if (level, number) not in self._tiles:
            width = width_of(self._size, level, number)
            if level > _MAX_LEVEL or not width:
                raise LogError(f"a tree of {self._size} has no tile {number} at level {level}")
            raw = fetch_tile(self._fetch, lambda w: tile_path(level, number, w), width)
            self._tiles[level, number] = split_hashes(raw, width)
        return self._tiles[level, number]


def fetch_tile(fetch: Fetch, path: Callable[[int], str], width: int) -> bytes:
    """Fetch a tile; the full one if the partial one was removed."""
    try:
        return fetch(path(width))
    except MissingFile:
        if width == TILE_WIDTH:
            raise
        return fetch(path(TILE_WIDTH))


def split_hashes(raw: bytes, width: int) -> list[bytes]:
    """The first `width` hashes of a tile."""
    if len(raw) not in (width * HASH_BYTES, TILE_WIDTH * HASH_BYTES):
        raise LogError(f"a tile of {width} hashes has {len(raw)} bytes")
    return [raw[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(width)]


def subtree_root(hashes: Sequence[bytes]) -> bytes:
    """The root of neighbouring hashes; their number must be a power of two."""
    while len(hashes) > 1:
        hashes = [node_hash(hashes[i], hashes[i + 1]) for i in range(0, len(hashes), 2)]
    return hashes[0]


def join_entries(entries: Sequence[bytes]) -> bytes:
    for entry in entries:
        if len(entry) > MAX_ENTRY_BYTES:
            raise LogError(f"an entry of {len(entry)} bytes is longer than {MAX_ENTRY_BYTES}")
    return b"".join(len(entry).to_bytes(2) + entry for entry in entries)


def split_entries(raw: bytes, width: int) -> list[bytes]:
    """The first `width` entries of a bundle."""
    entries: list[bytes] = []
    at = 0
    while at < len(raw):
        end = at + 2 + int.from_bytes(raw[at : at + 2])
        if end > len(raw) or at + 2 > len(raw):
            raise LogError("the entry bundle ends within an entry")
        entries.append(raw[at + 2 : end])
        at = end
    if len(entries) not in (width, TILE_WIDTH):
        raise LogError(f"a bundle of {width} entries contains {len(entries)}")
    return entries[:width]
