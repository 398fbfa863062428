"""Rows of a table as examples: pandas, Hugging Face `datasets`, torch datasets, CSV, Parquet.

A row becomes the bytes of a JSON object, one field per column, so a task's `batch` begins with
`[json.loads(example) for example in examples]`, as with LEAF's format. Items of a torch dataset
that are pairs get the fields `x` and `y`. A partition (partition.py) says whose each row is:

    source = table_source(frame, ByColumn("user"))
    source = table_source(torch_dataset, Dirichlet(clients=100, alpha=0.3))

A field that is NaN counts as missing and becomes null. Refused: values that JSON cannot hold
(bytes, images, decimals, infinity or a NaN inside a list), a table without rows. Nothing is
downloaded: `hf:FOLDER` is a folder that `Dataset.save_to_disk` wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import msgspec

from papaya.errors import OperatorError
from papaya.study.data.csv_file import csv_columns
from papaya.study.data.partition import ByColumn, Partition, shares
from papaya.study.data.source import Memory

_ROWS_AT_ONCE: Final = 1000
_INSTALL: Final = "pip install 'papaya-fl[data]'"
_EXACT: Final = frozenset({str, int, bool, type(None)})  # JSON represents them exactly
_NOT_JSON: Final = (TypeError, NotImplementedError, UnicodeEncodeError)  # unpaired surrogates
_HINT: Final = "make numbers, texts or lists of them, or leave the column out"


@dataclass(frozen=True, eq=False)
class TableRows:
    """Examples that belong to no client yet, with their columns. `lines`: of a file with a line for
    each row, the lines of the rows.
    """

    name: str
    examples: list[bytes]
    columns: Mapping[str, Sequence[Any]]
    lines: Sequence[int] = ()

    def place(self, row: int) -> str:
        """Where a row is, for people."""
        return f"line {self.lines[row]}" if self.lines else f"row {row}, counted from 0"

    def column(self, name: str) -> Sequence[Any]:
        if name not in self.columns:
            known = ", ".join(map(str, self.columns)) or "none"
            raise OperatorError(
                f"{self.name} has no column {name!r}", hint=f"its columns are: {known}"
            )
        return self.columns[name]


def table_source(table: object, partition: Partition) -> Memory:
    """Clients of a pandas DataFrame, a Hugging Face or torch dataset, or `TableRows`.

    A column that names the client is not part of its examples.
    """
    without = (partition.column,) if isinstance(partition, ByColumn) else ()
    rows = rows_of_table(table, without)
    return Memory.named(f"{rows.name}, {partition.described}", shares(partition, rows))


def rows_of_table(table: object, without: Sequence[str] = ()) -> TableRows:
    """`without` names columns that are kept out of the examples."""
    if isinstance(table, TableRows):
        return table
    kind = type(table)
    if kind.__module__.split(".")[0] == "pandas":
        return _of_columns("a DataFrame", _frame_columns(table), without)
    if kind.__module__.split(".")[0] == "datasets":
        return _hugging_face(table, without)
    if hasattr(table, "__getitem__") and hasattr(table, "__len__"):
        return _items(table, without)
    if hasattr(table, "__iter__"):
        return _items(list(table), without)
    raise OperatorError(
        f"cannot read examples from a {kind.__module__}.{kind.__qualname__}",
        hint="use a DataFrame, a dataset of Hugging Face or torch, or lists of bytes",
    )


def csv_rows(path: Path, without: Sequence[str] = ()) -> TableRows:
    columns, lines = _reading(path, lambda: csv_columns(path, without))
    return replace(_of_columns(f"CSV {path}", columns, without), lines=lines)


def parquet_rows(path: Path, without: Sequence[str] = ()) -> TableRows:
    frame = _reading(path, lambda: _pandas().read_parquet(path))
    return _of_columns(f"Parquet {path}", _frame_columns(frame), without)


def hugging_face_rows(folder: str, without: Sequence[str] = ()) -> TableRows:
    """A folder of `save_to_disk`; `FOLDER#train` names one part of a DatasetDict."""
    path, _, part = folder.partition("#")
    try:
        import datasets
    except ImportError as error:
        raise OperatorError(
            "reading hf: needs the package datasets, which is not installed",
            hint="pip install datasets",
        ) from error
    found = _reading(Path(path), lambda: datasets.load_from_disk(path))
    if part:
        try:
            found = found[part]
        except KeyError:
            raise OperatorError(
                f"{path} has no part {part!r}", hint=f"its parts are: {', '.join(found)}"
            ) from None
    rows = _hugging_face(found, without)
    return TableRows(f"dataset {folder}", rows.examples, rows.columns)


def _reading(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except OSError as error:
        problem = error.strerror or str(error)
        raise OperatorError(f"cannot read {path}: {problem}", hint="check its name") from error
    except (ValueError, ImportError) as error:
        hint = _INSTALL if isinstance(error, ImportError) else "check its format"
        raise OperatorError(f"cannot read {path}: {error}", hint=hint) from error


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise OperatorError(
            "reading Parquet needs pandas, which is not installed", hint=_INSTALL
        ) from error
    return pandas


def _frame_columns(frame: Any) -> dict[str, list[Any]]:
    """Plain values: a missing one is None, an array a list."""
    whole = frame.astype(object).where(frame.notna(), None)
    return {str(name): whole[name].tolist() for name in frame.columns}


def _hugging_face(dataset: Any, without: Sequence[str]) -> TableRows:
    if isinstance(dataset, dict):
        raise OperatorError(
            f"this dataset has several parts: {', '.join(dataset)}",
            hint="name one of them, like dataset['train']; on the command line hf:FOLDER#train",
        )
    plain = dataset.with_format(None)
    columns: dict[str, list[Any]] = {name: [] for name in plain.column_names}
    for first in range(0, len(plain), _ROWS_AT_ONCE):
        for name, values in plain[first : first + _ROWS_AT_ONCE].items():
            columns[name] += values
    return _of_columns("a dataset", columns, without)


def _items(dataset: Any, without: Sequence[str]) -> TableRows:
    """A dataset of torch: items are mappings, or pairs of input and label."""
    items = [_plain_fields(dataset[index], index) for index in range(len(dataset))]
    names = dict.fromkeys(name for item in items for name in item)
    columns = {name: [item.get(name) for item in items] for name in names}
    return _of_columns("a dataset", columns, without)


def _plain_fields(item: Any, index: int) -> dict[str, Any]:
    fields = _fields(item)
    for name, value in fields.items():
        try:
            fields[name] = _plain(value)
        except NotImplementedError as error:
            hint = "convert it with a transform, e.g. torchvision.transforms.ToTensor() for images"
            raise _refusal("a dataset", index, name, error, hint) from error
    return fields


def _fields(item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, tuple | list) and len(item) == 2:
        return {"x": item[0], "y": item[1]}
    raise OperatorError(
        f"an item of the dataset is a {type(item).__name__}, expected a pair or a mapping",
        hint="wrap it: [{'x': x, 'y': y} for x, y, *more in dataset]",
    )


def _of_columns(name: str, columns: dict[str, list[Any]], without: Sequence[str]) -> TableRows:
    kept = {column: values for column, values in columns.items() if column not in without}
    if not columns or not next(iter(columns.values())):
        raise OperatorError(f"{name} has no rows", hint="use data that is not empty")
    return TableRows(name, list(_encoded(name, kept)), columns)


def _encoded(name: str, columns: dict[str, list[Any]]) -> Iterator[bytes]:
    for column in columns:
        _require_exact(name, column, columns[column])
    encoder = msgspec.json.Encoder(enc_hook=_plain)
    for number, values in enumerate(zip(*columns.values(), strict=True)):
        row = dict(zip(columns, values, strict=True))
        try:
            yield encoder.encode(row)
        except _NOT_JSON as error:
            column = next(c for c in row if not _is_encoded(encoder, row[c]))
            raise _refusal(name, number, column, error) from error


def _is_encoded(encoder: msgspec.json.Encoder, value: Any) -> bool:
    try:
        encoder.encode(value)
    except _NOT_JSON:
        return False
    return True


def _refusal(name: str, row: int, column: str, problem: object, hint: str = _HINT) -> OperatorError:
    return OperatorError(
        f"row {row} of {name} cannot be written as JSON: column {column!r}: {problem}", hint=hint
    )


def _require_exact(name: str, column: str, values: Sequence[Any]) -> None:
    if set(map(type, values)) <= _EXACT:
        return
    for row, value in enumerate(values):
        if isinstance(value, float) and math.isnan(value):
            continue  # missing
        for part in _changed_parts(value):
            kind = type(part).__name__
            if isinstance(part, float):
                hint = "replace it with a finite number, or leave the column out"
                raise _refusal(name, row, column, f"the {kind} {part} is not finite", hint)
            if isinstance(part, Decimal):
                hint = "convert it to a float or to a text, or leave the column out"
                raise _refusal(name, row, column, f"the {kind} {part} is not a JSON number", hint)
            hint = "decode it to a text or to a list of numbers, or leave the column out"
            raise _refusal(name, row, column, f"{kind} is not a number or a text", hint)


def _changed_parts(value: Any) -> Iterator[Any]:
    """What msgspec would change silently: bytes to base64, decimals to texts, NaN and infinity to
    null.
    """
    if isinstance(value, bytes | bytearray | memoryview | Decimal):
        yield value
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield value
    elif isinstance(value, Mapping):
        yield from _changed_parts(list(value.values()))
    elif isinstance(value, list | tuple | set | frozenset):
        kinds = set(map(type, value))
        if kinds <= _EXACT or (kinds == {float} and all(map(math.isfinite, value))):
            return  # the fast way for long lists of numbers
        for part in value:
            yield from _changed_parts(part)
    elif hasattr(value, "tolist"):
        yield from _changed_parts(value.tolist())


def _plain(value: Any) -> Any:
    """Tensors, arrays and their scalars as lists and numbers; the rest as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, str | int | float | list | tuple | dict | None):
        return value
    raise NotImplementedError(f"{type(value).__name__} is not a number, a text or a list of them")
