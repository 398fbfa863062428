"""Which URLs of a server a device may use."""

from __future__ import annotations

import pytest

from papaya.device.allowed_hosts import AllowedHosts
from papaya.errors import ConfigError

SECURE, PLAIN = "https://selector.example:8750", "http://127.0.0.1:8750"
HOSTS = AllowedHosts(
    [
        "Uploads.Example",
        "uploads.example:8750",
        "*.aggregators.example",
        "*.ports.example:8750",
        "*.any.example:*",
        "::1",
        "[::1]:8750",
    ]
)


@pytest.mark.parametrize(
    "url",
    [
        "https://uploads.example",
        "https://uploads.example:443",
        "https://UPLOADS.example:8750",
        "https://aggregator-3.ports.example:8750",
        "https://a.b.aggregators.example",
        "https://a.any.example",
        "https://a.any.example:1",
        "https://[::1]",
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
        # Other services of the same host.
        "https://uploads.example:22",
        "https://uploads.example:80",
        "https://uploads.example:0",
        "https://a.aggregators.example:8750",
        "https://a.ports.example",
        "https://a.ports.example:8751",
        "https://[::1]:8751",
        "//uploads.example",
        # The device adds a path: these would turn it into a query or a fragment.
        "https://uploads.example?",
        "https://uploads.example#",
        # What resolvers do with these differs. Some take the address at the beginning.
        "https://[fe80::1%25eth0.aggregators.example]",
        "https://[::1%1.aggregators.example]",
        "https://127.0.0.1 .aggregators.example",
        "https://127.0.0.1\x00.aggregators.example",
        "https://127.0.0.1%2f.aggregators.example",
        "https://127.0.0.1\\.aggregators.example",
        "https://.aggregators.example",
        "https://a..aggregators.example",
        "https://aggregator-3.aggregators.example.",
        "https://uploads.example.",
        "https://\uff55ploads.example",
        "https://b\xfccher.aggregators.example",
        "https://up\tloads.example",
        " https://uploads.example",
    ],
)
def test_everything_else_is_not_used(url: str) -> None:
    assert not HOSTS.allows_upload(url, SECURE)


def test_http_is_used_only_if_the_selector_is_reached_by_http() -> None:
    assert HOSTS.allows_upload("http://uploads.example", PLAIN)
    assert HOSTS.allows_upload("http://uploads.example:80", PLAIN)
    assert not HOSTS.allows_upload("http://uploads.example:443", PLAIN)


def test_a_name_without_a_port_may_stand_for_all_of_them() -> None:
    """As it does for downloads."""
    hosts = AllowedHosts(["uploads.example", "bucket.example:9000"], any_port=True)
    assert hosts.checked("https://uploads.example:9000/blob", SECURE)
    assert hosts.checked("https://bucket.example:9000/blob", SECURE)
    assert not hosts.checked("https://bucket.example/blob", SECURE)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "*",
        "*.",
        "*.*.example",
        "a.*.example",
        "*.::1",
        "*.0.0.1",
        "*.0.0.1:8750",
        "*.0.0.0x1",
        "[::1]",
        "example.",
        "uploads.example:",
        "uploads.example:0",
        "uploads.example:65536",
        "uploads.example:https",
        "uploads.example:8750:8750",
        "uploads.example:8750/",
        "uploads.example/",
        ":8750",
        "*:8750",
        "[uploads.example]:8750",
        "https://uploads.example",
        "b\xfccher.example",
        "a b",
    ],
)
def test_what_is_not_the_name_of_a_host_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a host"):
        AllowedHosts(["uploads.example", name])


def test_without_names_nothing_is_allowed() -> None:
    none = AllowedHosts()
    assert not none
    assert not none.allows_upload("https://", SECURE)
    assert not none.allows_upload("https://uploads.example", SECURE)
