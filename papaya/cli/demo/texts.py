"""The data of `papaya demo`: texts that are on every machine with Python, one for each device.

The standard library's own sources and documentation (papaya/device/texts.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

from papaya.cli.output import writing
from papaya.device.texts import LEAST_BYTES, LIBRARY, library_texts
from papaya.errors import OperatorError

_DOCUMENTATION = Path("pydoc_data", "topics.py")


def find_texts(count: int, seed: int, library: Path = LIBRARY) -> list[Path]:
    """The documentation, and as many other texts as are wanted, drawn by the seed."""
    found = library_texts(library)
    if len(found) < count:
        raise OperatorError(
            f"{library} has {len(found)} texts of {LEAST_BYTES} bytes or more, not {count}",
            hint=f"--devices {len(found)}" if found else "use a Python that has its library here",
        )
    first = [path for path in found if path == library / _DOCUMENTATION]
    others = [path for path in found if path not in first]
    return first + Random(seed).sample(others, count - len(first))


def deal_out(texts: Sequence[Path], folders: Sequence[Path], library: Path = LIBRARY) -> list[int]:
    """Copy them into one folder for each process; how many each got."""
    dealt = [0] * len(folders)
    for number, text in enumerate(texts):
        at = number % len(folders)
        dealt[at] += 1
        name = f"{dealt[at]:04}-{'.'.join(text.relative_to(library).parts)}"
        with writing(folders[at]):
            folders[at].mkdir(parents=True, exist_ok=True)
            shutil.copyfile(text, folders[at] / name)
    return dealt
