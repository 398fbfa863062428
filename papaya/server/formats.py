"""The format that all processes of a cluster write: the row `cluster/format` (docs/adr/0051).

Processes of two successive versions work together while they are replaced one after the other. The
newer ones write the older format until every process can read the newer one: each announces in its
boot row the newest format that it can read, and the leader raises the cluster's format by one when
all processes have announced the next. From then on a process of the older version must not write:
it would lose what it does not know. It does not start, or hands its tasks over and stops.

A format on demand is raised by the transaction that first needs it, and not before: until then the
older version can be installed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from papaya.errors import OperatorError
from papaya.messages.base import NodeId
from papaya.messages.storage import (
    BOOTS,
    FIRST_FORMAT,
    FORMAT,
    FORMAT_KEY,
    PRIVATE_FORMAT,
    BootRow,
    FormatRow,
    Row,
    Transaction,
    boot_key,
)

ON_DEMAND = frozenset({PRIVATE_FORMAT})


class Formats:
    """Compares the cluster's format with the newest one that this process can read and write."""

    prefixes = (BOOTS, FORMAT_KEY)

    def __init__(self, newest: int = FORMAT, on_demand: frozenset[int] = ON_DEMAND) -> None:
        self._newest = newest
        self._on_demand = on_demand

    def check(self, rows: Mapping[str, Row]) -> None:
        """Raises OperatorError if the cluster's format is newer than this process."""
        found = _format(rows.get(FORMAT_KEY))
        if found > self._newest:
            raise OperatorError(
                f"the servers write format {found}, this Papaya knows formats up to {self._newest}",
                hint="install the version that the other servers run; `papaya --version` shows it",
            )

    def raised(self, rows: Mapping[str, Row], nodes: Iterable[NodeId]) -> Transaction | None:
        """Raises the format by one; None unless all of these nodes have announced the next one.

        A node that starts again with an older version in the meantime makes the transaction fail.
        """
        following = _format(rows.get(FORMAT_KEY)) + 1
        if following in self._on_demand:
            return None
        return self._raised_to(following, rows, nodes)

    def with_private_tasks(
        self, rows: Mapping[str, Row], nodes: Iterable[NodeId]
    ) -> Transaction | None:
        """What a transaction with a private task needs too; None if a node does not know them."""
        if _format(rows.get(FORMAT_KEY)) >= PRIVATE_FORMAT:
            return Transaction()
        return self._raised_to(PRIVATE_FORMAT, rows, nodes)

    def _raised_to(
        self, wanted: int, rows: Mapping[str, Row], nodes: Iterable[NodeId]
    ) -> Transaction | None:
        boots = [(boot_key(node), rows.get(boot_key(node))) for node in nodes]
        announced = (boot.format if isinstance(boot, BootRow) else 0 for _, boot in boots)
        if wanted > min((self._newest, *announced)):
            return None
        return Transaction(
            require=((FORMAT_KEY, rows.get(FORMAT_KEY)), *boots),
            put=((FORMAT_KEY, FormatRow(wanted)),),
        )


def _format(row: Row | None) -> int:
    return row.format if isinstance(row, FormatRow) else FIRST_FORMAT
