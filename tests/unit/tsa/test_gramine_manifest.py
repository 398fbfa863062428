"""The Gramine template: nothing from the host decides what runs, and nothing goes unmeasured."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from papaya.tsa import __main__ as entry

TEMPLATE = Path(__file__).resolve().parents[3] / "deploy/gramine/tsa.manifest.template"
VALUES = {
    "gramine.libos": "/gramine/libsysdb.so",
    "gramine.runtimedir()": "/gramine/runtime",
    "python": "/usr/bin/python3.11",
    "stdlib": "/usr/lib/python3.11",
    "arch_libdir": "/lib/x86_64-linux-gnu",
    "enclave": "/srv/enclave",
}


@pytest.fixture
def manifest() -> dict[str, Any]:
    text = TEMPLATE.read_text()
    return tomllib.loads(re.sub(r"{{ (.+?) }}", lambda match: VALUES[match[1]], text))


def keys(table: dict[str, Any]) -> list[str]:
    found = []
    for name, value in table.items():
        found += [name, *(keys(value) if isinstance(value, dict) else [])]
    return found


def test_nothing_comes_from_the_host(manifest: dict[str, Any]) -> None:
    assert [key for key in keys(manifest) if key.startswith("insecure__")] == []
    assert "allowed_files" not in manifest["sgx"]
    assert all(isinstance(value, str) for value in manifest["loader"]["env"].values())


def test_it_is_a_production_enclave_that_attests(manifest: dict[str, Any]) -> None:
    assert manifest["sgx"]["debug"] is False
    assert manifest["sgx"]["remote_attestation"] == "dcap"
    assert manifest["loader"]["log_level"] == "error"


def test_every_mount_is_measured(manifest: dict[str, Any]) -> None:
    measured = manifest["sgx"]["trusted_files"]
    for mount in manifest["fs"]["mounts"]:
        assert [file for file in measured if file.startswith(mount["uri"])], mount


def test_it_starts_the_entry_point_with_arguments_that_it_takes(
    manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = manifest["loader"]["argv"]
    at = arguments.index("-m")
    assert arguments[at + 1] == "papaya.tsa"
    served: list[str] = []
    monkeypatch.setattr(
        entry, "serve_until_signal", lambda address, ready, quote: served.append(address)
    )
    assert entry.main(arguments[at + 2 :]) == 0
    assert served == ["tcp:127.0.0.1:8760"]


@pytest.mark.parametrize("arguments", [[], ["sgx"], ["software", "tcp:127.0.0.1:0"], ["sgx"] * 3])
def test_the_entry_point_takes_nothing_else(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.main(arguments) == 2
    assert "usage" in capsys.readouterr().err


def test_an_address_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["sgx", "tcp:example.org:1"]) == 2
    assert "cannot listen" in capsys.readouterr().err
