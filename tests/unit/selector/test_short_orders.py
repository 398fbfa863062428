"""Orders without the catalogue that a selector already has."""

from __future__ import annotations

from papaya.messages.control import SelectorReport
from tests.unit.selector.builders import (
    BOOT,
    accepted,
    an_open_selector,
    assign,
    check_in,
    orders,
    report,
)

SHORT = {"advertised": (), "routes": (), "over": (), "is_short": True}


def test_short_orders_keep_the_catalogue_and_replace_the_rest() -> None:
    selector = an_open_selector()
    selector.receive(BOOT, orders(1, catalogue=7))
    kept = selector._orders
    selector.receive(BOOT, orders(2, catalogue=7, wanting=(), check_ins_per_s=9.0, **SHORT))
    now = selector._orders
    assert kept is not None
    assert now is not None
    assert (now.number, now.wanting, now.check_ins_per_s) == (2, (), 9.0)
    assert (now.advertised, now.routes) == (kept.advertised, kept.routes)


def test_a_report_names_the_catalogue() -> None:
    selector = an_open_selector()
    selector.receive(BOOT, orders(1, catalogue=7))
    told = report(selector.wake(BOOT + 100.0))
    assert isinstance(told, SelectorReport)
    assert told.catalogue == 7


def test_short_orders_for_another_catalogue_still_assign_clients() -> None:
    """The selector keeps what it has, and its next report says which that is."""
    selector = an_open_selector()
    selector.receive(BOOT, orders(1, catalogue=7))
    selector.receive(BOOT, check_in(), "phone")
    strange = orders(2, catalogue=8, assignments=(assign("s1"),), **SHORT)
    assert accepted(selector.receive(BOOT, strange)) == {"phone": "s1"}
    kept = selector._orders
    assert kept is not None
    assert (kept.number, kept.catalogue) == (1, 7)
