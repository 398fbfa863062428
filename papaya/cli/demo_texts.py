"""The data of `papaya demo`: texts that are on every machine with Python, one for each device.

The standard library's own sources and documentation. A few files are long and many are short, and
each has words of its own: heavy-tailed and non-IID, as the texts of people are. Tests, and tables
that a program wrote, are left out. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from papaya.cli.output import writing
from papaya.errors import OperatorError

LIBRARY = Path(os.__file__).parent
_DOCUMENTATION = Path("pydoc_data", "topics.py")
_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__")
)
_SETTINGS = "_sysconfigdata"
_SUFFIXES = (".py", ".txt")
_LEAST_BYTES = 4096  # so that each device has a dozen examples to be evaluated on


def find_texts(count: int, seed: int, library: Path = LIBRARY) -> list[Path]:
    """The documentation, and as many other texts as are wanted, drawn by the seed."""
    found = sorted(_texts_in(library))
    if len(found) < count:
        raise OperatorError(
            f"{library} has {len(found)} texts of {_LEAST_BYTES} bytes or more, not {count}",
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


def _texts_in(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for name in files:
            path = Path(where, name)
            if path.suffix in _SUFFIXES and not name.startswith(_SETTINGS) and _is_long(path):
                yield path


def _is_long(path: Path) -> bool:
    return path.is_file() and path.stat().st_size >= _LEAST_BYTES
