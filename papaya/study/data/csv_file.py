"""The columns of a CSV file, with one type for each column.

The first line names the columns. A column has the first of these types that fits all its values:

    whole numbers   12, -3            within 64 bits
    numbers         0.5, 1e-3, 12     the nearest float
    booleans        true, False       in lower case, in upper case or with a capital
    texts           everything else   as it stands in the file

A column that names clients has texts. An empty value and the words in `MISSING` are None. The file
is UTF-8 text with commas, or such a file compressed with gzip (`.gz`). Refused (ValueError): lines
with more or fewer values than there are columns, two columns with one name, damaged compression. A
column with at least ten times as many numbers as other values is probably meant to have numbers
only: its first other value is refused (OperatorError), because it would turn the whole column into
texts.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from papaya.errors import OperatorError

MISSING: Final = frozenset({"", "NA", "N/A", "NaN", "nan", "NULL", "null", "None"})
_WHOLE: Final = re.compile(r"\s*[+-]?[0-9]+\s*")
_NUMBER: Final = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
_BOOLEANS: Final = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_BITS: Final = 64
_LONGEST_WHOLE: Final = 20  # characters; Python refuses to read thousands of digits
_LONGEST_VALUE: Final = 1 << 28
_MOSTLY: Final = 10


def csv_columns(
    path: Path, names_of_clients: Sequence[str] = ()
) -> tuple[dict[str, list[Any]], list[int]]:
    """The values of each column, in the order of the file, and for each row the line of the file at
    which it ends, counted from 1. A column that names clients has texts: 007 and 7 are two clients.
    """
    csv.field_size_limit(_LONGEST_VALUE)  # the default is 128 KiB, which a text may exceed
    with _opened(path) as file:
        lines = csv.reader(file, strict=True)
        try:
            names = next(lines, [])
            found = [(lines.line_num, _checked(row, names, lines.line_num)) for row in lines if row]
        except csv.Error as error:
            raise ValueError(f"line {lines.line_num}: {error}") from error
        except (EOFError, zlib.error) as error:
            raise ValueError(f"the compressed file is damaged: {error}") from error
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{count} columns have the name {name!r}")
    rows = [row for _, row in found]
    texts = zip(*rows, strict=True) if rows else ([] for _ in names)
    columns = {}
    for name, column in zip(names, texts, strict=True):
        if name in names_of_clients:
            columns[name] = _names(column)
            continue
        columns[name] = _typed(column)
        odd = _odd_one(column, columns[name])
        if odd is not None:
            raise OperatorError(
                f"{path}, line {found[odd][0]}: the column {name!r} has numbers, but here "
                f"{column[odd]!r}",
                hint="correct the value, or leave it empty if it is unknown; if the column has "
                "texts, use parquet:FILE, or give a DataFrame to papaya.simulate",
            )
    return columns, [line for line, _ in found]


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _checked(row: list[str], names: list[str], line: int) -> list[str]:
    if len(row) != len(names):
        raise ValueError(f"line {line} has {len(row)} values for {len(names)} columns")
    return row


def _odd_one(texts: Sequence[str], typed: Sequence[Any]) -> int | None:
    """The place of the first value that is not a number, if nearly all others are."""
    given = [place for place, value in enumerate(typed) if isinstance(value, str)]
    odd = [place for place in given if not _NUMBER.fullmatch(texts[place])]
    return odd[0] if odd and len(given) - len(odd) >= _MOSTLY * len(odd) else None


def _names(texts: Sequence[str]) -> list[str | None]:
    """As they stand in the file, but for spaces around numbers."""
    plain = (text.strip() if _NUMBER.fullmatch(text) else text for text in texts)
    return [None if text in MISSING else text for text in plain]


def _typed(texts: Sequence[str]) -> list[Any]:
    given = [text for text in texts if text not in MISSING]
    if all(map(_WHOLE.fullmatch, given)):
        # Longer ones are identifiers, not quantities: a float would change them.
        if all(len(t.strip()) <= _LONGEST_WHOLE and int(t).bit_length() < _BITS for t in given):
            return [None if text in MISSING else int(text) for text in texts]
    elif all(map(_NUMBER.fullmatch, given)):
        return [None if text in MISSING else float(text) for text in texts]
    elif all(text in _BOOLEANS for text in given):
        return [_BOOLEANS.get(text) for text in texts]
    return [None if text in MISSING else text for text in texts]
