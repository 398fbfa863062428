"""The TOML file of `papaya serve --config`."""

from __future__ import annotations

from pathlib import Path

import pytest

from papaya.errors import ConfigError
from papaya.server.deployment_file import read_deployment


def test_paths_start_at_the_folder_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "papaya.toml"
    file.write_text('data = "rows"\ntsa_collateral = "/etc/collateral.json"\n')
    found = read_deployment(file)
    assert found.data == str(tmp_path / "rows")
    assert found.tsa_collateral == "/etc/collateral.json"
    assert found.tls_key is None


@pytest.mark.parametrize("text", ["data = [", "unknown_key = 1"])
def test_a_file_that_cannot_be_meant_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "papaya.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"papaya\.toml") as caught:
        read_deployment(file)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("adress = 'x'", "docs/configuration.md"),
        ("tsa_plattform = 'sgx'", "did you mean tsa_platform?"),
        ("heartbeat_s = 2.0", "did you mean heartbeat_s in the table [server]?"),
        ("[server]\nhartbeat_s = 2.0", "did you mean heartbeat_s in the table [server]?"),
        ("[server]\nproxies = []", "proxies belongs above the first [table]"),
    ],
)
def test_a_misspelt_name_is_recognized(tmp_path: Path, text: str, meant: str) -> None:
    file = tmp_path / "papaya.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_deployment(file)
    assert meant in caught.value.hint
