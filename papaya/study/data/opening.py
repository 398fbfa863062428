"""`--data` and `--partition`: the words that name data, and the source that they stand for.

    leaf:PATH     LEAF's JSON                     csv:FILE, parquet:FILE   tables
    text:FOLDER   a file for each client          hf:FOLDER                `Dataset.save_to_disk`
    stdlib        Python's own sources            saved:FILE               what `save_source` wrote

Tables need a partition: `column:user`, `dirichlet:clients=100,alpha=0.3,label=y`,
`shards:clients=100,per_client=2,label=y`, `sizes:clients=100,distribution=zipf,spread=1`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import msgspec

from papaya.errors import ConfigError, OperatorError
from papaya.learning.task import LoadedTask
from papaya.sim.jobs import write_whole
from papaya.study.data.leaf import leaf_source
from papaya.study.data.partition import ByColumn, Dirichlet, LabelShards, Partition, Sizes
from papaya.study.data.source import Memory, Source
from papaya.study.data.tables import (
    TableRows,
    csv_rows,
    hugging_face_rows,
    parquet_rows,
    table_source,
)
from papaya.study.data.texts import folder_source, library_source, loader_of

_TABLES: Final[dict[str, Callable[[str, Sequence[str]], TableRows]]] = {
    "csv": lambda path, without: csv_rows(Path(path), without),
    "parquet": lambda path, without: parquet_rows(Path(path), without),
    "hf": hugging_face_rows,
}
_WITH_CLIENTS: Final = ("leaf", "text", "saved")
_PARTITIONS: Final[dict[str, type[Partition]]] = {
    "dirichlet": Dirichlet,
    "shards": LabelShards,
    "sizes": Sizes,
}
_EXAMPLE: Final = "column:user, or dirichlet:clients=100,alpha=0.3,label=y"


def open_source(data: str, loaded: LoadedTask, partition: Partition | None = None) -> Source:
    """The source that these words name; OperatorError says what is wrong with them."""
    kind, _, path = data.partition(":")
    if kind in _TABLES and path:
        if partition is None:
            raise OperatorError(
                f"{data} does not say which row belongs to which client",
                hint=f"add --partition {_EXAMPLE}",
            )
        without = (partition.column,) if isinstance(partition, ByColumn) else ()
        return table_source(_TABLES[kind](path, without), partition)
    if data != "stdlib" and not (kind in _WITH_CLIENTS and path):
        raise _unknown(data)
    if partition is not None:
        raise OperatorError(f"{data} has its own clients", hint="leave --partition out")
    if kind == "leaf":
        return leaf_source(Path(path))
    if kind == "text":
        return folder_source(Path(path), loader_of(loaded))
    if kind == "saved":
        return read_source(Path(path))
    return library_source(loader_of(loaded))


def _unknown(data: str) -> OperatorError:
    kind, _, path = data.partition(":")
    hint = (
        "use leaf:FOLDER, text:FOLDER, csv:FILE, parquet:FILE, hf:FOLDER or stdlib (the source "
        "code of Python's standard library)"
    )
    if close := path and get_close_matches(kind, [*_TABLES, *_WITH_CLIENTS], n=1):
        hint = f"did you mean {close[0]}:{path}?"
    elif Path(data).exists():
        hint = f"did you mean leaf:{data} (LEAF's JSON) or text:{data} (a file for each client)?"
        if (suffix := Path(data).suffix.removeprefix(".")) in _TABLES:
            hint = f"did you mean {suffix}:{data}?"
    return OperatorError(f"unknown data source: {data!r}", hint=hint)


def parse_partition(text: str) -> Partition:
    """`KIND:SETTINGS`, as on the command line."""
    kind, _, rest = text.partition(":")
    if kind == "column" and rest:
        return ByColumn(rest)
    if kind not in _PARTITIONS:
        raise OperatorError(
            f"unknown partition: {text!r}; use column, {', '.join(_PARTITIONS)}", hint=_EXAMPLE
        )
    settings = dict(_pair(text, piece) for piece in rest.split(",") if piece)
    try:
        found: Partition = msgspec.convert(settings, _PARTITIONS[kind], strict=False)
    except ConfigError:
        raise
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from error
        raise OperatorError(f"invalid partition {text!r}: {error}", hint=_EXAMPLE) from error
    return found


def _pair(text: str, piece: str) -> tuple[str, str]:
    name, is_given, value = piece.partition("=")
    if not is_given:
        raise OperatorError(f"invalid partition {text!r}: {piece!r} has no =", hint=_EXAMPLE)
    return name, value


class _Saved(msgspec.Struct, frozen=True):
    name: str
    clients: Sequence[tuple[str, Sequence[bytes]]]


def save_source(source: Memory, path: Path) -> None:
    """Write clients and examples to a file that `saved:FILE` names, for other processes."""
    encoded = msgspec.msgpack.encode(_Saved(source.name, source.clients()))
    write_whole(path, lambda partly: partly.write_bytes(encoded))


def read_source(path: Path) -> Memory:
    try:
        found = msgspec.msgpack.decode(path.read_bytes(), type=_Saved)
    except OSError as error:
        raise OperatorError(
            f"cannot read {path}: {error.strerror}", hint="check its name"
        ) from error
    except msgspec.MsgspecError as error:
        raise OperatorError(f"{path} is not a file of saved clients: {error}") from error
    return Memory.named(found.name, found.clients)
