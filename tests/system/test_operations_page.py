"""Follows the shell commands of docs/operations.md."""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from papaya.config import Deployment
from papaya.server.certificates import Certificates
from papaya.store.backup import JUMP
from tests.system.fleet import briefly, fleet
from tests.system.oracle import Books
from tests.system.processes import PAPAYA, Installation
from tests.system.test_roles_anywhere import CLEAR
from tests.system.test_secure import GOAL, STEP_S, admin_of, counted, url

DOCS = Path(__file__).resolve().parents[2] / "docs"
_SHELL_S = 600.0


def commands(page: str, heading: str) -> list[str]:
    """The blocks of shell commands under a heading."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {heading}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return re.findall(r"^```sh\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL)


def follow(folder: Path, block: str) -> None:
    papaya = f'papaya() {{ {shlex.join(PAPAYA)} "$@"; }}\n'
    done = subprocess.run(
        ["sh", "-e", "-c", papaya + block],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_SHELL_S,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_backup_and_restore(tmp_path: Path) -> None:
    """tests/system/test_backup.py has what a restoration does."""
    with Installation(tmp_path) as installation:
        server = installation.add().start()
        admin_of(installation, server).submit(CLEAR)
        asyncio.run(_train(installation, url(server), GOAL))
        admin = admin_of(installation, server)
        admin.until_task(CLEAR.task, lambda line: line["version"] >= 1, STEP_S)
        [back_up] = commands("operations.md", "Back up")
        follow(tmp_path, back_up)
        assert server.stop() == 0
        [restore] = commands("operations.md", "Restore")
        follow(tmp_path, restore)
        assert Books(installation.data, CLEAR.task).newest > JUMP
        server.start()
        assert server.stop() == 0


async def _train(installation: Installation, selector: str, count: int) -> None:
    folder, token = installation.folder / "devices", installation.secret("device.token")
    async with fleet(folder, [selector], token, 8, briefly) as flying:
        await counted(flying.book, count)
        await flying.go_home(STEP_S)


def test_a_new_admin_token(tmp_path: Path) -> None:
    with Installation(tmp_path) as installation:
        server = installation.add().start()
        old = admin_of(installation, server)
        assert old.ask("GET", "/admin/status")[0] == 200
        [renew] = commands("operations.md", "Tokens")
        follow(tmp_path, renew)
        assert server.stop() == 0
        server.start()
        assert old.ask("GET", "/admin/status")[0] == 401
        assert admin_of(installation, server).ask("GET", "/admin/status")[0] == 200
        assert server.stop() == 0


def test_a_new_authority(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    for block in commands("run-the-servers.md", "Certificates between roles"):
        follow(tmp_path, block)
    own = Certificates(
        Deployment(
            servers_certificate=str(tmp_path / "role.pem"),
            servers_key=str(tmp_path / "role.key"),
            servers_authority=str(tmp_path / "authority.pem"),
        ),
        ("aggregator",),
    )
    caplog.set_level(logging.INFO)
    for block in commands("operations.md", "The authority between roles"):
        caplog.clear()
        follow(tmp_path, block)
        own.refresh()
        assert "certificates_read" in caplog.text
        assert "certificates_refused" not in caplog.text
