"""The public log over HTTP: its files, and a 404 for every other path."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from papaya.server.public_log import route
from papaya.verifiable_log.folder import LogFolder
from papaya.verifiable_log.note import LOG_SIGNATURE, SignerKey
from tests.unit.http.loopback import a_request, answers


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = LogFolder(tmp_path / "log")
    key = SignerKey("example.org/log", bytes(32), LOG_SIGNATURE)
    folder.create(key)
    folder.append([b"a release"], key)
    return tmp_path / "log"


def test_the_files_of_the_log_are_served(log: Path) -> None:
    paths = ["checkpoint", "tile/entries/000.p/1", "tile/0/000.p/1"]
    found = answers([route(log)], *(a_request("GET", f"/v1/log/{path}") for path in paths))
    assert [response.status for response in found] == [200] * len(paths)
    assert found[0].body == (log / "checkpoint").read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        *("tile/0", "tile/0/", "tile", "tile/0/000/1", "tile/0/000.p", "tile/0/999", "tile/00000"),
        *("x", f"tile/0/{'x000/' * 6}000", f"tile/{'0' * 90}"),
    ],
)
def test_any_other_path_is_a_404_without_a_traceback(
    log: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        [response] = answers([route(log)], a_request("GET", f"/v1/log/{path}"))
    assert response.status in (400, 404)
    assert "Traceback" not in caplog.text
    assert "failed" not in caplog.text
