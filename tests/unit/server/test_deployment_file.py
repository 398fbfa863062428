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


def test_keys_renamed_in_0_3_are_accepted_for_one_release(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "papaya.toml"
    file.write_text(
        'trusted_party = "unix:/run/tsa.sock"\ntrusted_platform = "sgx"\n'
        'trusted_collateral = "collateral.json"\ntrusted_leaf = 7\n'
    )
    found = read_deployment(file)
    assert (found.tsa, found.tsa_platform, found.tsa_leaf) == ("unix:/run/tsa.sock", "sgx", 7)
    assert found.tsa_collateral == str(tmp_path / "collateral.json")
    assert "trusted_leaf is now called tsa_leaf" in caplog.text


def test_an_old_and_a_new_name_together_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "papaya.toml"
    file.write_text("trusted_leaf = 7\ntsa_leaf = 8\n")
    with pytest.raises(ConfigError, match="trusted_leaf = 7: is the old name of tsa_leaf"):
        read_deployment(file)


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
    ],
)
def test_a_misspelt_name_is_recognized(tmp_path: Path, text: str, meant: str) -> None:
    file = tmp_path / "papaya.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_deployment(file)
    assert meant in caught.value.hint
