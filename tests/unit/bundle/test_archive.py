"""Archives: one encoding, no path outside, nothing that grows when it is unpacked."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papaya.bundle import archive
from papaya.bundle.archive import MAX_ARCHIVE_BYTES, MAX_FILES, pack, unpack
from papaya.bundle.errors import BundleError
from tests.unit.bundle.builders import ARCHIVE

parts = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
names = st.lists(parts, min_size=1, max_size=3).map("/".join)


@given(st.dictionaries(names, st.binary(max_size=50), min_size=1, max_size=5))
def test_files_come_back_as_they_were(files: dict[str, bytes]) -> None:
    if any(one.startswith(f"{other}/") for one in files for other in files):
        with pytest.raises(BundleError, match="inside another file"):
            pack(files)
        return
    packed = pack(files)
    assert unpack(packed) == files
    assert pack(dict(reversed(files.items()))) == packed, "the order does not matter"


def test_the_encoding_is_fixed() -> None:
    assert pack({"task.py": b"x = 1\n", "a/b.py": b""}) == (
        b'papaya-archive-1\n[["a/b.py",0],["task.py",6]]\nx = 1\n'
    )
    assert archive.digest(b"") == (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "/etc/passwd", "../task.py", "a/../b", "a//b", "a/", "./a", "a/.hidden"),
        *("a\\b", "a b", "a\0", "a\nb", "é.py", "a" * 201, "-rf"),
    ],
)
def test_a_path_that_could_lead_outside_is_refused(name: str) -> None:
    with pytest.raises(BundleError, match="invalid file name"):
        pack({name: b""})
    listed = b'papaya-archive-1\n[["%s",0]]\n' % name.encode()
    with pytest.raises(BundleError):
        unpack(listed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"papaya-archive-1",
        b"papaya-archive-1\n[]\n",
        b'papaya-archive-2\n[["a",0]]\n',
        b'papaya-archive-1\n[["a",1]]\n',  # truncated
        b'papaya-archive-1\n[["a",0]]\nx',  # more than is listed
        b'papaya-archive-1\n[["a",-1]]\nx',
        b'papaya-archive-1\n[["a",99999999999999999999]]\n',
        b'papaya-archive-1\n[["b",0],["a",0]]\n',  # not sorted
        b'papaya-archive-1\n[["a",0],["a",0]]\n',  # twice
        b'papaya-archive-1\n[["a",0],["a/b",0]]\n',  # a file that is a folder
        b'papaya-archive-1\n[["a", 0]]\n',  # a space
        b'papaya-archive-1\n{"a":0}\n',
        b"papaya-archive-1\n" + b"[" * 100_000 + b"\n",
        b"PK\x03\x04",
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(BundleError) as raised:
        unpack(data)
    assert raised.value.reason == "encoding"


def test_archives_are_limited() -> None:
    with pytest.raises(BundleError, match="an archive has 1 to 256"):
        pack({f"f{number}": b"" for number in range(MAX_FILES + 1)})
    with pytest.raises(BundleError, match="at most"):
        pack({"a": bytes(MAX_ARCHIVE_BYTES + 1)})
    with pytest.raises(BundleError, match="at most"):
        unpack(bytes(MAX_ARCHIVE_BYTES + 1))


def test_thousands_of_changed_archives_never_become_other_files() -> None:
    """Either the change is refused, or it is the canonical archive of other files."""
    rng = Random(1)
    for _ in range(3000):
        changed = bytearray(ARCHIVE)
        place = rng.randrange(len(changed))
        changed[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        try:
            files = unpack(bytes(changed))
        except BundleError:
            continue
        assert pack(files) == changed
