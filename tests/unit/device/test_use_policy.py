"""Policies from the owner's TOML: what is declared, what is refused, and with which words."""

from __future__ import annotations

import pytest

from papaya.device.use_policy import MAX_COLLECTIONS, UsePolicy, check_collections, parse_policies
from papaya.errors import ConfigError


def test_a_file_declares_collections() -> None:
    toml = b"""
    [collections.keyboard]
    tasks = ["next-word", "emoji-*"]
    max_age_s = 86400
    max_count = 100

    [collections.photos]
    """
    assert parse_policies(toml, "policies.toml") == {
        "keyboard": UsePolicy(tasks=("next-word", "emoji-*"), max_age_s=86400.0, max_count=100),
        "photos": UsePolicy(),
    }
    assert parse_policies(b"", "policies.toml") == {}


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("[collections.a]\nmax_age_s = 0", "max_age_s"),
        ("[collections.a]\nmax_age_s = inf", "max_age_s"),
        ("[collections.a]\nmax_count = -1", "max_count"),
        ("[collections.a]\nmax_count = 'many'", "max_count"),
        ("[collections.a]\nmax_bytes = 0", "max_bytes"),
        ("[collections.a]\nvalidation = 0.6\ntest = 0.6", "validation"),
        ("[collections.a]\ntest = -0.1", "test"),
        ("[collections.a]\ntasks = ['']", "tasks"),
        ("[collections.a]\ntasks = 'next-word'", "tasks"),
        ("[collections.a]\nmax_agee_s = 3", "max_agee_s"),
        ("[collection.a]", "collection"),
        ("[collections.'a b']", "a b"),
        ("[collections.a", "policies.toml"),
        ("\x00", "policies.toml"),
    ],
)
def test_what_cannot_work_is_refused_with_a_hint(toml: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_policies(toml.encode(), "policies.toml")
    assert caught.value.hint


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="invalid list of collections"):
        parse_policies(b"\xff\xfe", "policies.toml")


def test_there_may_be_so_many_collections() -> None:
    check_collections({f"c{number}": UsePolicy() for number in range(MAX_COLLECTIONS)})
    with pytest.raises(ConfigError, match="more than"):
        check_collections({f"c{number}": UsePolicy() for number in range(MAX_COLLECTIONS + 1)})
