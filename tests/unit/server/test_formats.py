"""Formats: a newer one is written only after every process has announced it."""

from __future__ import annotations

from pathlib import Path

import pytest

from papaya.errors import OperatorError
from papaya.messages.storage import FORMAT_KEY, BootRow, FormatRow, Row, Transaction, boot_key
from papaya.server.formats import Formats
from papaya.store.state import SqliteState

_OLD, _NEW = BootRow(1), BootRow(1, format=2)


def rows_of(**boots: BootRow) -> dict[str, Row]:
    return {boot_key(node): boot for node, boot in boots.items()}


def test_the_format_is_raised_by_one_when_all_have_announced_the_next() -> None:
    later = BootRow(7, format=3)
    formats = Formats(newest=3, on_demand=frozenset())
    raised = formats.raised(rows_of(a=_NEW, b=later, gone=_OLD), ("a", "b"))
    assert raised is not None
    assert raised.put == ((FORMAT_KEY, FormatRow(2)),)
    assert raised.require == ((FORMAT_KEY, None), (boot_key("a"), _NEW), (boot_key("b"), later))


@pytest.mark.parametrize(
    ("rows", "newest"),
    [
        (rows_of(a=_NEW, b=_OLD), 2),
        (rows_of(a=_NEW), 2),  # b has never started
        (rows_of(a=_NEW, b=_NEW), 1),  # this process does not know it itself
        ({**rows_of(a=_NEW, b=_NEW), FORMAT_KEY: FormatRow(2)}, 2),
    ],
)
def test_otherwise_the_format_stays(rows: dict[str, Row], newest: int) -> None:
    assert Formats(newest, frozenset()).raised(rows, ("a", "b")) is None


def test_a_process_that_starts_again_with_an_older_version_prevents_it(tmp_path: Path) -> None:
    state = SqliteState(tmp_path / "state.db")
    state.transact(Transaction(put=tuple(rows_of(a=_NEW).items())))
    raised = Formats(2, frozenset()).raised(state.read(Formats.prefixes), ("a",))
    assert raised is not None
    state.transact(Transaction(put=((boot_key("a"), BootRow(2)),)))
    assert state.transact(raised) == "refused"
    state.close()


def test_the_first_private_task_raises_the_format_and_nothing_else_does() -> None:
    """A process of 0.4.0 would ignore `privacy`. It knows format 1 and stops when it meets 2."""
    rows = rows_of(a=_NEW, b=_NEW)
    assert Formats().raised(rows, ("a", "b")) is None, "until then 0.4.0 can be installed again"
    raised = Formats().with_private_tasks(rows, ("a", "b"))
    assert raised is not None
    assert raised.put == ((FORMAT_KEY, FormatRow(2)),)
    assert raised.require == ((FORMAT_KEY, None), *rows.items())
    assert Formats().with_private_tasks(rows_of(a=_NEW, b=_OLD), ("a", "b")) is None
    assert Formats().with_private_tasks({FORMAT_KEY: FormatRow(2)}, ("a",)) == Transaction()
    with pytest.raises(OperatorError):
        Formats(newest=1).check(dict(raised.put))


def test_a_process_that_does_not_know_the_format_must_not_write() -> None:
    Formats(2).check({FORMAT_KEY: FormatRow(2)})
    Formats(1).check({})
    with pytest.raises(OperatorError, match="write format 2, this Papaya knows formats up to 1"):
        Formats(1).check({FORMAT_KEY: FormatRow(2)})
