"""Versions of engines are compared by their numbers."""

from __future__ import annotations

import pytest

from papaya.config.versions import is_at_least


@pytest.mark.parametrize(
    ("version", "minimum", "expected"),
    [
        ("2.13.0", "2.6", True),
        ("2.6", "2.6.0", True),
        ("2.13.0+cpu", "2.13", True),
        ("2.5.9", "2.6", False),
        ("1.5.1", "1.5.1", True),
        ("1.5", "1.5.1", False),
        ("", "0.1", False),
        ("unknown", "1", False),
        ("9" * 64, "1", True),
        ("", None, True),
    ],
)
def test_a_version_is_at_least_another(version: str, minimum: str | None, expected: bool) -> None:
    assert is_at_least(version, minimum) is expected
