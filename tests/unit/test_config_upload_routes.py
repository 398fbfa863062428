"""`upload_routes`: which names lead to which aggregators, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from papaya.config import Deployment
from papaya.config.upload_routes import UploadRoutes
from papaya.errors import ConfigError
from papaya.server.deployment_file import read_deployment

STAR = {"*.uploads.example": "*.aggregators.internal:8750"}


def test_a_name_in_full_leads_to_its_aggregator_only() -> None:
    routes = UploadRoutes({"aggregator-1.uploads.example": "10.0.0.21:8750"})
    assert routes.find("aggregator-1.uploads.example") == ("10.0.0.21", 8750)
    for other in ("", "aggregator-2.uploads.example", "uploads.example", "aggregator-1", "example"):
        assert routes.find(other) is None


@pytest.mark.parametrize("label", ["aggregator-1", "a", "7", "_a_", "xn--bcher-kva", "a" * 63])
def test_a_star_is_the_same_label_on_both_sides(label: str) -> None:
    routes = UploadRoutes(STAR)
    assert routes.find(f"{label}.uploads.example") == (f"{label}.aggregators.internal", 8750)


def test_a_name_in_full_comes_before_a_star() -> None:
    full = {"aggregator-1.uploads.example": "10.0.0.21:9000"}
    for routes in (UploadRoutes(STAR | full), UploadRoutes(full | STAR)):
        assert routes.find("aggregator-1.uploads.example") == ("10.0.0.21", 9000)
        assert routes.find("aggregator-2.uploads.example") == (
            "aggregator-2.aggregators.internal",
            8750,
        )


def test_several_stars_do_not_mix() -> None:
    routes = UploadRoutes(STAR | {"*.eu.uploads.example": "*.eu.internal:8751"})
    assert routes.find("a.uploads.example") == ("a.aggregators.internal", 8750)
    assert routes.find("a.eu.uploads.example") == ("a.eu.internal", 8751)
    assert routes.find("eu.uploads.example") == ("eu.aggregators.internal", 8750)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "uploads.example",
        ".uploads.example",
        "a.b.uploads.example",
        "a.uploads.example.",
        "a.uploads.example.org",
        "a.uploadsXexample",
        "Aggregator-1.uploads.example",
        "-a.uploads.example",
        "a-.uploads.example",
        "a b.uploads.example",
        "a\0.uploads.example",
        "a\n.uploads.example",
        "a/b.uploads.example",
        "a:1.uploads.example",
        "[.uploads.example",
        "*.uploads.example",
        "**.uploads.example",
        "a*.uploads.example",
        "ü.uploads.example",
        f"{'a' * 64}.uploads.example",
    ],
)
def test_names_that_a_star_does_not_match(name: str) -> None:
    assert UploadRoutes(STAR).find(name) is None


def test_without_routes_no_name_leads_anywhere() -> None:
    assert UploadRoutes({}).find("a.uploads.example") is None
    assert UploadRoutes({}).find("") is None


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("10.0.0.21:1", ("10.0.0.21", 1)),
        ("10.0.0.21:65535", ("10.0.0.21", 65535)),
        ("[2001:db8::21]:8750", ("2001:db8::21", 8750)),
        ("aggregator-1:8750", ("aggregator-1", 8750)),
        ("aggregator-1.internal.:8750", ("aggregator-1.internal.", 8750)),
        ("Aggregator_1.Internal:8750", ("Aggregator_1.Internal", 8750)),
    ],
)
def test_addresses_of_aggregators(target: str, found: tuple[str, int]) -> None:
    assert UploadRoutes({"a.example": target}).find("a.example") == found


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A.example",
        "a.Example",
        ".example",
        "a..example",
        "a.example.",
        "a example",
        "a.example:443",
        "https://a.example",
        "a.example\n",
        "ü.example",
        "-a.example",
        "a-.example",
        f"{'a' * 64}.example",
        ".".join(["a" * 50] * 5),
        "[2001:db8::1]",
        "10.0.0.1",  # clients send no name for an address
    ],
)
def test_a_name_that_devices_do_not_ask_for_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a host name in lower case") as caught:
        UploadRoutes({name: "10.0.0.21:8750"})
    assert f"upload_routes = {name!r}" in str(caught.value)
    assert "upload_url" in caught.value.hint


@pytest.mark.parametrize(
    "name", ["*", "*.", "a.*.example", "*.*.example", "a*.example", "*a.example"]
)
def test_a_star_anywhere_but_in_front_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a host name in lower case"):
        UploadRoutes({name: "*.aggregators.internal:8750"})


@pytest.mark.parametrize(
    "target",
    [
        "",
        "10.0.0.21",
        "10.0.0.21:",
        ":8750",
        "10.0.0.21:0",
        "10.0.0.21:65536",
        "10.0.0.21:70000",
        "10.0.0.21:123456",
        "10.0.0.21:-1",
        "10.0.0.21:x",
        "10.0.0.21:٨",
        "10.0.0.21:8750\n",
        "https://10.0.0.21:8750",
        "10.0.0.21:8750/path",
        "2001:db8::21:8750",
        "[2001:db8::21]",
        "[a.example]:8750",
        "a b:8750",
        "ü:8750",
        "a.*.internal:8750",
        "*:8750",
        "a..b:8750",
        ".:8750",
        "-:8750",
        f"{'a' * 64}.internal:8750",
        "[::::]:8750",
        "[1]:8750",
        "[10.0.0.1]:8750",
        "10.0.0.256:8750",
        "1.2.3:8750",
    ],
)
def test_what_is_no_address_of_an_aggregator_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port with a port") as caught:
        UploadRoutes({"a.example": target})
    assert f"upload_routes['a.example'] = {target!r}" in str(caught.value)
    assert "write the address of the aggregator's listener" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("*.uploads.example", "10.0.0.21:8750"),
        ("*.uploads.example", "aggregators.internal:8750"),
        ("*.uploads.example", "[2001:db8::21]:8750"),
        ("a.uploads.example", "*.aggregators.internal:8750"),
    ],
)
def test_a_star_on_one_side_only_is_refused(name: str, target: str) -> None:
    with pytest.raises(ConfigError, match=r"use \* in both") as caught:
        UploadRoutes({name: target})
    assert "each name must lead to one aggregator" in caught.value.hint


def test_one_invalid_route_among_valid_ones_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"upload_routes\['b.example'\]"):
        UploadRoutes(STAR | {"b.example": "nowhere"})


# -- as a setting -----------------------------------------------------------------------------


def with_tls(routes: dict[str, str]) -> Deployment:
    return Deployment(upload_routes=routes, tls_certificate="c.pem", tls_key="c.key")


def test_a_deployment_has_no_routes_by_default() -> None:
    assert Deployment().upload_routes == {}


def test_routes_need_tls() -> None:
    """Without TLS no client names an aggregator: nothing would ever be passed on."""
    with pytest.raises(ConfigError, match="needs TLS") as caught:
        Deployment(upload_routes=STAR)
    assert "upload_routes" in str(caught.value)
    assert "set tls_certificate and tls_key" in caught.value.hint
    assert with_tls(STAR).upload_routes == STAR


def test_a_star_of_an_ip_address_is_refused() -> None:
    """Clients would choose the first number."""
    with pytest.raises(ConfigError, match="is not host:port"):
        UploadRoutes({"*.uploads.example": "*.0.0.1:8750"})


def test_a_route_to_the_selector_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="leads to this server itself"):
        with_tls({"a.example": Deployment().devices})


def test_a_deployment_refuses_invalid_routes() -> None:
    with pytest.raises(ConfigError, match="is not host:port with a port"):
        with_tls({"a.example": "nowhere"})


def test_routes_are_a_table_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "papaya.toml"
    file.write_text(
        'tls_certificate = "c.pem"\n'
        'tls_key = "c.key"\n'
        "[upload_routes]\n"
        '"*.uploads.example" = "*.aggregators.internal:8750"\n'
    )
    assert read_deployment(file).upload_routes == STAR
    file.write_text('[upload_routes]\n"a.example" = 8750\n')
    with pytest.raises(ConfigError, match=r"papaya\.toml"):
        read_deployment(file)
