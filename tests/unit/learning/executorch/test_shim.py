"""The shim is built once; what is missing for it is told, with the way out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from papaya.errors import OperatorError
from papaya.learning.executorch import shim
from papaya.learning.executorch.shim import shim_library


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_it_is_built_once(tmp_path: Path) -> None:
    built = shim_library()
    assert built.is_relative_to(tmp_path)
    made_at = built.stat().st_mtime_ns
    assert shim_library() == built
    assert built.stat().st_mtime_ns == made_at
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [built]


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OperatorError, match="needs a C\\+\\+ compiler") as refused:
        shim_library()
    assert "--engine torch" in refused.value.hint


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(OperatorError, match=r"cannot compile shim\.cc"):
        shim_library()


def test_a_compiler_that_does_not_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\nexec sleep 600\n")
    endless.chmod(0o755)
    monkeypatch.setenv("CXX", str(endless))
    monkeypatch.setattr(shim, "_COMPILE_S", 0.1)
    with pytest.raises(OperatorError, match=r"did not end within 0\.1 s") as refused:
        shim_library()
    assert "--engine torch" in refused.value.hint


def test_another_version_of_executorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    with pytest.raises(OperatorError, match=r"is version 9\.9, expected 1\.5\.1"):
        shim_library()


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OperatorError, match="is not installed") as refused:
        shim_library()
    assert "pip install --no-deps executorch==1.5.1" in refused.value.hint
