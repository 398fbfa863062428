"""Partitions: which client gets which row of a table.

    ByColumn       each value of a column is a client: users, devices, hospitals; rows without a
                   value are refused, and so are columns with values like 1 and "1", which would
                   become two clients with the same name
    Dirichlet      label skew: the rows of each label are shared out by Dirichlet(alpha) weights
                   over the clients (Yurochkin et al. 2019; small alpha: few labels per client)
    LabelShards    label skew: rows sorted by label, cut into equal shards, some for each client
                   (McMahan et al. 2017: two each)
    Sizes          no label skew: rows at random, in sizes from a distribution

A partition is a function of its settings, its seed and the rows. Clients may remain without rows;
`Memory.left_out` counts them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from papaya.config.checks import require, require_count
from papaya.errors import OperatorError

_Rows: TypeAlias = npt.NDArray[np.int64]
_MOST_SPREAD: Final = 10.0


class _Table(Protocol):
    """`TableRows` in tables.py."""

    @property
    def name(self) -> str: ...

    @property
    def examples(self) -> list[bytes]: ...

    def column(self, name: str) -> Sequence[Any]: ...

    def place(self, row: int) -> str: ...


class ByColumn(Struct, frozen=True, forbid_unknown_fields=True, tag="by_column"):
    """Each value of `column` is a client, in the order of its first row."""

    column: str

    @property
    def described(self) -> str:
        return f"by {self.column}"


class Dirichlet(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="dirichlet"):
    clients: int
    alpha: float = 0.5
    label: str = "y"
    seed: int = 0

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        problem, remedy = "must be above 0 and at most 1e6", "use 0.1 to 1 for much label skew"
        require(0 < self.alpha <= 1e6, "alpha", self.alpha, problem, remedy)

    @property
    def described(self) -> str:
        return f"Dirichlet({self.alpha:g}) of {self.label}"


class LabelShards(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="shards"):
    clients: int
    per_client: int = 2
    label: str = "y"
    seed: int = 0

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        require_count("per_client", self.per_client)

    @property
    def described(self) -> str:
        return f"{self.per_client} shards of {self.label} each"


class Sizes(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="sizes"):
    """Sizes are in proportion to draws: exp(spread × z) with z normal, or rank to the power of
    −spread, or all equal.
    """

    clients: int
    distribution: Literal["lognormal", "zipf", "equal"] = "lognormal"
    spread: float = 1.2
    seed: int = 0

    def __post_init__(self) -> None:
        require_count("clients", self.clients)
        problem, remedy = f"must be from 0 to {_MOST_SPREAD:g}", "use 1"
        require(0 <= self.spread <= _MOST_SPREAD, "spread", self.spread, problem, remedy)

    @property
    def described(self) -> str:
        spread = "" if self.distribution == "equal" else f"({self.spread:g})"
        return f"sizes {self.distribution}{spread}"


Partition: TypeAlias = ByColumn | Dirichlet | LabelShards | Sizes


def shares(partition: Partition, table: _Table) -> Iterator[tuple[str, list[bytes]]]:
    """The clients by name, with their examples in the order of the rows."""
    examples = table.examples
    if not isinstance(partition, ByColumn) and partition.clients > len(examples):
        raise OperatorError(
            f"{table.name} has {len(examples):,} rows for {partition.clients:,} clients",
            hint=f"use at most {len(examples):,} clients",
        )
    for name, rows in _SHARED[type(partition)](partition, table):
        yield name, [examples[row] for row in rows]


def _by_column(partition: ByColumn, table: _Table) -> Iterator[tuple[str, list[int]]]:
    values = _plain_column(table, partition.column)
    if missing := [row for row, value in enumerate(values) if value is None or value != value]:
        have = "row has" if len(missing) == 1 else "rows have"
        raise OperatorError(
            f"{table.name}: {len(missing):,} {have} no value in the column {partition.column!r}; "
            f"the first is {table.place(missing[0])}",
            hint="leave such rows out, or name a client in each",
        )
    named: dict[str, Hashable] = {}
    for value, rows in _grouped(values).items():
        name = str(value)
        if name in named:
            kinds = " and as ".join(type(each).__name__ for each in (named[name], value))
            raise OperatorError(
                f"{table.name}: the column {partition.column!r} contains {name} as {kinds}, which "
                "would be two clients with the same name",
                hint="convert the column to one type, for example to text",
            )
        named[name] = value
        yield name, rows


def _dirichlet(partition: Dirichlet, table: _Table) -> Iterator[tuple[str, list[int]]]:
    rng = np.random.default_rng(partition.seed)
    owned: list[list[int]] = [[] for _ in range(partition.clients)]
    for rows in _by_label(table, partition.label):
        weights = rng.dirichlet(np.full(partition.clients, partition.alpha))
        ends = np.rint(np.cumsum(weights) * len(rows)).astype(np.int64)
        for own, piece in zip(owned, np.split(rng.permutation(rows), ends[:-1]), strict=True):
            own += piece.tolist()
    return _numbered(owned)


def _shards(partition: LabelShards, table: _Table) -> Iterator[tuple[str, list[int]]]:
    rng = np.random.default_rng(partition.seed)
    count = partition.clients * partition.per_client
    ordered = np.concatenate([rng.permutation(rows) for rows in _by_label(table, partition.label)])
    if count > len(ordered):
        raise OperatorError(
            f"{table.name} has {len(ordered):,} rows for {count:,} shards",
            hint="use fewer clients, or fewer shards for each",
        )
    pieces = np.array_split(ordered, count)
    dealt = rng.permutation(count).reshape(partition.clients, partition.per_client)
    return _numbered([np.concatenate([pieces[i] for i in own]).tolist() for own in dealt])


def _sizes(partition: Sizes, table: _Table) -> Iterator[tuple[str, list[int]]]:
    rng = np.random.default_rng(partition.seed)
    clients, rows = partition.clients, len(table.examples)
    if partition.distribution == "lognormal":
        weights = np.exp(partition.spread * rng.standard_normal(clients))
    elif partition.distribution == "zipf":
        weights = np.arange(1, clients + 1) ** -float(partition.spread)
    else:
        weights = np.ones(clients)
    # Everyone has one row; the rest is in proportion.
    ends = np.rint(np.cumsum(weights / weights.sum()) * (rows - clients)).astype(np.int64)
    ends += np.arange(1, clients + 1)
    return _numbered([p.tolist() for p in np.split(rng.permutation(rows), ends[:-1])])


def _by_label(table: _Table, label: str) -> list[_Rows]:
    """The rows of each label, in an order that does not depend on the rows."""
    groups = _grouped(_plain_column(table, label))
    ordered = sorted(groups, key=lambda value: (str(type(value)), value))
    return [np.array(groups[value], np.int64) for value in ordered]


def _grouped(values: Sequence[Any]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for row, value in enumerate(values):
        groups.setdefault(value, []).append(row)
    return groups


def _plain_column(table: _Table, name: str) -> Sequence[Any]:
    """Refuses lists, structs and arrays, which cannot name clients or labels."""
    values = table.column(name)
    for row, value in enumerate(values):
        try:
            hash(value)
        except TypeError as error:
            raise OperatorError(
                f"{table.name}: {table.place(row)} has the {type(value).__name__} "
                f"{str(value)[:40]} in the column {name!r}, which has to name clients or labels",
                hint="use a column of numbers or texts",
            ) from error
    return values


def _numbered(owned: Sequence[list[int]]) -> Iterator[tuple[str, list[int]]]:
    return ((str(client), sorted(rows)) for client, rows in enumerate(owned))


_SHARED: Final[dict[type, Any]] = {
    ByColumn: _by_column,
    Dirichlet: _dirichlet,
    LabelShards: _shards,
    Sizes: _sizes,
}
