"""A device loads no server code: it is installed without the extra `serve`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import papaya.device

FOLDER = Path(papaya.device.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("modules", [["device"], MODULES], ids=["device", "all"])
def test_a_device_loads_neither_the_http_server_nor_any_server_code(modules: list[str]) -> None:
    script = (
        "import importlib, json, sys\n"
        f"for module in {modules!r}: importlib.import_module(f'papaya.device.{{module}}')\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True
    )
    loaded = json.loads(ran.stdout)
    assert "papaya.device.device" in loaded
    server_side = ("papaya.http", "papaya.server", "uvloop", "prometheus_client")
    assert [module for module in loaded if module.startswith(server_side)] == []
