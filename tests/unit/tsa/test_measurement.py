"""The manifest: exactly what the enclave imports, and one hash for it; locks that make sense."""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from packaging.tags import compatible_tags, cpython_tags

from papaya.tsa.measurement import (
    LOCK,
    MAX_LOCK_BYTES,
    LockError,
    installed,
    manifest,
    measure,
    read_lock,
)

ROOT = Path(__file__).resolve().parents[3]
ENTRY = "papaya/tsa/__main__.py"


# What it offers to users of the package is imported when they ask for it; the enclave never does.
OFFERS = "papaya/__init__.py"


def imported_by(file: str) -> Iterator[str]:
    """Files of papaya that a file imports, and the packages around them."""
    if file == OFFERS:
        return
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                path = "/".join(parts[:end])
                for candidate in (f"{path}.py", f"{path}/__init__.py"):
                    if parts[0] == "papaya" and (ROOT / candidate).exists():
                        yield candidate


def closure(entry: str) -> list[str]:
    found, todo = {entry}, [entry]
    while todo:
        new = set(imported_by(todo.pop())) - found
        found |= new
        todo += sorted(new)
    return sorted(found)


def test_the_lock_lists_what_the_enclave_imports_and_no_more() -> None:
    assert list(read_lock(installed).sources) == closure(ENTRY)


def test_the_enclave_imports_nothing_that_the_package_offers_to_users() -> None:
    code = "import sys, papaya.tsa.tsa; print('papaya.study' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == "False\n"


def test_the_enclave_imports_numpy_cryptography_and_what_they_need() -> None:
    assert [wheel.name for wheel in read_lock(installed).wheels] == [
        *("cffi", "cryptography", "numpy", "pycparser")
    ]


def test_the_manifest_has_every_file_with_its_hash() -> None:
    lines = manifest(installed).decode().splitlines()
    listed = {path: digest for digest, path in (line.split("  ") for line in lines)}
    assert list(listed) == sorted(listed)
    lock = read_lock(installed)
    assert listed.keys() == {LOCK, *lock.sources, *(f"wheels/{w.file}" for w in lock.wheels)}
    assert listed[ENTRY] == hashlib.sha256((ROOT / ENTRY).read_bytes()).hexdigest()
    assert measure() == hashlib.sha256(manifest(installed)).digest()


@pytest.mark.parametrize("path", [LOCK, ENTRY, "papaya/secagg/mask.py"])
def test_a_change_to_any_file_is_another_measurement(path: str) -> None:
    def changed(wanted: str) -> bytes:
        return installed(wanted) + (b"\n" if wanted == path else b"")

    assert measure(changed) != measure()


def test_a_change_outside_the_enclave_is_not() -> None:
    def read(wanted: str) -> bytes:
        assert wanted == LOCK or wanted in read_lock(installed).sources
        return installed(wanted)

    assert measure(read) == measure()


LOCK_TEXT = (ROOT / LOCK).read_text()
WHEEL = """[[wheels]]
name = "a{0}"
version = "1"
file = "a{0}-1-py3-none-any.whl"
sha256 = "0000000000000000000000000000000000000000000000000000000000000000"
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"papaya/__init__.py"', '"papaya/../../etc/passwd"'),
        ('"papaya/__init__.py"', '"/etc/passwd"'),
        ('"papaya/__init__.py"', '"papaya/tsa/enclave.toml"'),
        ('"papaya/__init__.py"', '"papaya/a.py\\n"'),
        ('"papaya/__init__.py"', "7"),
        ('file = "', 'file = "../'),
        ('sha256 = "', 'sha256 = "x'),
        ('name = "cffi"', 'name = "cffi --index-url http://evil"'),
        ('name = "cffi"', 'name = "cffi"\nmore = 1'),
        ('name = "cffi"', 'name = "nobody-has-it"'),
        ('name = "cffi"', 'name = "cff"'),
        ('version = "2.1.1"', 'version = "2.1.2"'),
        ('version = "2.1.1"', 'version = "2.1"'),
        ('version = "2.1.1"', 'version = "latest"'),
        # pip would build a file of this name in the current folder.
        (
            'version = "2.1.1"\nfile = "cffi-2.1.1-',
            'version = "2.1.1.zip"\nfile = "cffi-2.1.1.zip-',
        ),
        # Files that exist, but not for the Python version of the lock, so pip would not find them.
        ('python = "3.11"', 'python = "3.1.1"'),
        ('python = "3.11"', 'python = "3.0"'),
        ('python = "3.11"', 'python = "3.10"'),
        ('python = "3.11"', 'python = "x"'),
        ("cffi-2.1.1-cp311-cp311-", "cffi-2.1.1-cp311-cp311t-"),
        ("cffi-2.1.1-cp311-cp311-", "cffi-2.1.1-cp312-abi3-"),
        ("cffi-2.1.1-cp311-cp311-", "cffi-2.1.1-py2-none-"),
        ("cffi-2.1.1-cp311-cp311-", f"cffi-2.1.1-{'cp311.' * 60}cp311-cp311-"),
        ("platforms = [", "platforms = [" + '"x", ' * 40),
        ("[[wheels]]", "".join(map(WHEEL.format, range(40))) + "[[wheels]]"),
        ('file = "cffi-2.1.1-', 'file = "nobody_has_it-2.1.1-'),
        (
            'name = "cffi"\nversion = "2.1.1"\nfile = "',
            'name = "-cffi"\nversion = "2.1.1"\nfile = "_',
        ),
        (
            'name = "cffi"\nversion = "2.1.1"\nfile = "',
            'name = ".cffi"\nversion = "2.1.1"\nfile = "_',
        ),
        ('version = "2.1.1"\nfile = "cffi-2.1.1', 'version = "-2.1.1"\nfile = "cffi-_2.1.1'),
        ('platforms = ["', 'platforms = ["--find-links", "'),
        ('python = "3.11"', 'python = "--pre"'),
        ('python = "3.11"', 'python = "3.12"'),
        ("platforms = [", 'platforms = ["win32"]\nmore = ['),
        ('python = "3.11"', ""),
        ('python = "3.11"', "python = 3.11"),
        ("[[wheels]]", "[[wheels"),
        ('python = "3.11"', f"python = {'[' * 10_000}"),
        ('python = "3.11"', f"python = {'9' * 5_000}"),
        ('python = "3.11"', f"python = 0x{'f' * 5_000}"),
        ('python = "3.11"', f"python.{'a.' * 1_200}a = 1"),
        ('python = "3.11"', f"python = '{'x' * 10_000}!'"),
        ('name = "cffi"', f'name = "cffi"\n{"x" * 10_000} = 1'),
    ],
)
def test_locks_that_cannot_be_meant_are_refused(old: str, new: str) -> None:
    assert old in LOCK_TEXT
    changed = LOCK_TEXT.replace(old, new, 1).encode()
    assert len(changed) <= MAX_LOCK_BYTES
    with pytest.raises(LockError) as refused:
        manifest(lambda path: changed if path == LOCK else installed(path))
    assert len(str(refused.value)) < 300


def test_a_wheel_is_taken_for_a_python_version_if_pip_takes_it() -> None:
    pythons = [f"{kind}3{minor}" for kind in ("cp", "py") for minor in ("", *range(15))]
    for minor in range(2, 15):
        lock = replace(read_lock(installed), python=f"3.{minor}")
        version, abis = (3, minor), [lock.abi, "abi3", "none"]
        there = {*cpython_tags(version, abis, ["x"]), *compatible_tags(version, lock.abi, ["x"])}
        expected = {(tag.interpreter, tag.abi) for tag in there if tag.platform == "x"}
        tags = product([*pythons, "py2", "pp310"], [*abis, "cp39", "cp311", "cp313t", "abi3t"])
        assert {tag for tag in tags if lock.takes(*tag)} == expected


@pytest.mark.parametrize(
    ("name", "version", "file"),
    [
        ("zope.interface", "7.2", "zope.interface-7.2-cp311-cp311-manylinux2014_x86_64.whl"),
        ("PyYAML", "6.0.3", "PyYAML-6.0.3-cp311-cp311-manylinux2014_x86_64.whl"),
        ("a", "1.0rc1.post2.dev3", "a-1.0rc1.post2.dev3-py3-none-any.whl"),
        ("old", "1.0", "old-1.0-py2.py36-none-any.whl"),
        ("ruamel-yaml", "0.18", "ruamel.yaml-0.18-1build-py2.py3-none-any.whl"),
        ("cryptography", "50.0.2", "cryptography-50.0.2-cp37-abi3-manylinux_2_28_x86_64.whl"),
    ],
)
def test_a_wheel_s_file_name_may_be_normalized_as_package_indexes_do(
    name: str, version: str, file: str
) -> None:
    found = read_lock(installed).wheels[0]
    changed = LOCK_TEXT.replace(f'"{found.file}"', f'"{file}"')
    changed = changed.replace(f'name = "{found.name}"', f'name = "{name}"')
    changed = changed.replace(f'version = "{found.version}"', f'version = "{version}"')
    wheel = read_lock(lambda _: changed.encode()).wheels[0]
    assert (wheel.name, wheel.version, wheel.file) == (name, version, file)


@pytest.mark.parametrize("more", [b"#", b"#" * 10_000, b"\xff"], ids=["one", "many", "no text"])
def test_a_long_lock_is_refused_before_it_is_parsed(more: bytes) -> None:
    """tomllib needs 14 GB of memory for 120 KB of dotted keys."""
    longest = LOCK_TEXT.encode().ljust(MAX_LOCK_BYTES, b"#")
    assert read_lock(lambda _: longest) == read_lock(installed)
    with pytest.raises(LockError, match=f"is longer than {MAX_LOCK_BYTES}"):
        read_lock(lambda _: longest + more)
