"""Which URLs of a server a device may use."""

from __future__ import annotations

import pytest

from papaya.device.allowed_hosts import AllowedHosts

SECURE, PLAIN = "https://selector.example:8750", "http://127.0.0.1:8750"
HOSTS = AllowedHosts(["Uploads.Example", "*.aggregators.example", "::1"])


@pytest.mark.parametrize(
    "url",
    [
        "https://uploads.example",
        "https://UPLOADS.example:8750",
        "https://aggregator-3.aggregators.example:8750",
        "https://a.b.aggregators.example",
        "https://[::1]:8750",
    ],
)
def test_hosts_that_the_owner_has_named(url: str) -> None:
    assert HOSTS.allows_upload(url, SECURE)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "aggregator-1",
        "http://uploads.example",  # less secure than the selector
        "ftp://uploads.example",
        "https://aggregators.example",
        "https://evilaggregators.example",
        "https://aggregators.example.evil",
        "https://uploads.example.evil",
        "https://10.0.0.1",
        "https://user@uploads.example",
        "https://uploads.example@evil.example",
        "https://uploads.example#x",
        "https://uploads.example/path",
        "https://uploads.example?query",
        "https://uploads.example:port",
        "https://uploads.example:99999",
        "https://[::1",
        "//uploads.example",
    ],
)
def test_everything_else_is_not_used(url: str) -> None:
    assert not HOSTS.allows_upload(url, SECURE)


def test_http_is_used_only_if_the_selector_is_reached_by_http() -> None:
    assert HOSTS.allows_upload("http://uploads.example", PLAIN)


def test_without_names_nothing_is_allowed() -> None:
    none = AllowedHosts()
    assert not none
    assert not none.allows_upload("https://", SECURE)
    assert not none.allows_upload("https://uploads.example", SECURE)
