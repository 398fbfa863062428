"""Public vectors and real quotes: in the folder that PAPAYA_TEST_VECTORS names, or a skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "PAPAYA_TEST_VECTORS"


def public(path: str) -> Path:
    """A file or folder of the public vectors."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} does not name a folder with public vectors")
    found = Path(folder) / path
    if not found.exists():
        pytest.skip(f"{found} is not there")
    return found
