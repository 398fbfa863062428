"""The owners in the file of a device's policy."""

from __future__ import annotations

import pytest

from papaya.device.owners import parse_owners
from papaya.errors import ConfigError
from tests.unit.bundle.builders import KEY, PIN, public


def test_owners_are_read_from_a_file() -> None:
    text = f'[owners.acme]\nkey = "{public(KEY).hex()}"\ncollections = ["digits"]\n'
    [(owner, policy)] = parse_owners(text.encode(), "owners.toml").items()
    assert owner == PIN.owner
    assert policy.engines == ("executorch",), "code of others runs only where a person said so"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[owners.a]\n", "key"),
        ('[owners.a]\nkey = "zz"\n', "key"),
        (f'[owners.a]\nkey = "{"0" * 64}"\nmax_examples = 0\n', "max_examples"),
        (f'[owners.a]\nkey = "{"0" * 64}"\nmax_memory_mb = 0\n', "max_memory_mb"),
        (f'[owners.a]\nkey = "{"0" * 64}"\nengine = "torch"\n', "engine"),
        (f'[owners.a]\nkey = "{"0" * 64}"\n[owners.b]\nkey = "{"0" * 64}"\n', "a key twice"),
        ("".join(f'[owners.o{n}]\nkey = "{n:064x}"\n' for n in range(33)), "more than 32"),
        ("owners = 1", "owners"),
    ],
)
def test_an_invalid_list_of_owners_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        parse_owners(text.encode(), "owners.toml")
    assert raised.value.hint
    assert "regex" not in str(raised.value)


def test_a_key_that_is_no_key_is_named_in_words() -> None:
    text = f'[owners.a]\nkey = "{"0" * 63}"\n'
    with pytest.raises(ConfigError, match=r"owners.toml: key = '0{63}': must be 64 hex digits"):
        parse_owners(text.encode(), "owners.toml")
