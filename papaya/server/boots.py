"""Boot numbers: each start of a node takes the next number from its row `boot/<node>`.

A report, an order or a fence with a lower number belongs to an earlier process of the node. The
number comes from the state store and not from a clock, so it increases whatever the clock says. A
process that finds a later number than its own must stop: another one runs under its name.
"""

from __future__ import annotations

from collections.abc import Mapping

from papaya import __version__
from papaya.errors import OperatorError
from papaya.messages.base import NodeId
from papaya.messages.storage import FORMAT, BootRow, Row, Transaction, boot_key
from papaya.server.state_thread import AsyncState

_ATTEMPTS = 5


class Boots:
    """The boots of all nodes in this process."""

    def __init__(self, state: AsyncState) -> None:
        self._state = state
        self._taken: dict[NodeId, int] = {}

    async def take(self, node: NodeId) -> int:
        """The number of this boot. Only one process gets it."""
        key = boot_key(node)
        for _ in range(_ATTEMPTS):
            last = (await self._state.read((key,))).get(key)
            number = last.number + 1 if isinstance(last, BootRow) else 1
            taken = BootRow(number, FORMAT, __version__)
            change = Transaction(require=((key, last),), put=((key, taken),))
            # A number whose outcome is unknown may be taken by another process: try the next one.
            if await self._state.transact(change) == "committed":
                self._taken[node] = number
                return number
        raise OperatorError(
            f"cannot store the boot number of {node}",
            hint="the log says why the state store failed; check for a full disk",
        )

    def check(self, rows: Mapping[str, Row]) -> None:
        """Raises OperatorError if a later process of one of the nodes has started.

        `rows`: those under `BOOTS`.
        """
        for node, number in self._taken.items():
            row = rows.get(boot_key(node))
            if isinstance(row, BootRow) and row.number > number:
                raise OperatorError(
                    f"another process has started as {node}: it has boot number {row.number}, "
                    f"this one has {number}",
                    hint="stop one of them, or give it an address of its own",
                )
