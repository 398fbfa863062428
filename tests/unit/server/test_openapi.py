"""The device API's description: sound as OpenAPI 3.1, and true of what is parsed and answered."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from schemathesis.core.result import Ok

from papaya.attestation.verify import MAX_COLLATERAL_BYTES, MAX_QUOTE_BYTES
from papaya.http.routes import Buffered, Routes
from papaya.messages import wire
from papaya.messages.base import Message
from papaya.messages.participation import Incomplete, Joined, Refused, Retry
from papaya.messages.paths import PARAMETERS_PATH, PATHS
from papaya.messages.selection import Located
from papaya.secagg.offer import KEY_BYTES, OFFER_BYTES
from papaya.secagg.parameters import MAX_ENCODED_BYTES
from papaya.server.device_openapi import DEVICE_ROUTES, device_document
from papaya.server.openapi import Api, ApiAnswer, ApiRoute, Json, Raw, document
from papaya.server.public_log import is_public
from tests.unit.messages.strategies import TO_DEVICE, a_message

DOCUMENT = device_document()
SCHEMAS: Json = DOCUMENT["components"]["schemas"]
API = schemathesis.openapi.from_dict(DOCUMENT)


def operations() -> Iterator[tuple[str, str, Json]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def every_dict(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from every_dict(item)
    elif isinstance(value, list):
        for item in value:
            yield from every_dict(item)


def validator(name: str) -> Any:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return jsonschema_rs.Draft202012Validator(schema)


# -- sound ----------------------------------------------------------------------------------


def test_it_has_what_openapi_demands() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    assert set(DOCUMENT["info"]) >= {"title", "version"}
    for path, method, operation in operations():
        assert path.startswith("/")
        assert method in ("get", "put", "post")
        assert operation["responses"]
        for status, response in operation["responses"].items():
            assert re.fullmatch(r"[1-5][0-9][0-9]|default", status)
            assert response["description"]
    assert msgspec.json.decode(msgspec.json.encode(DOCUMENT)) == DOCUMENT


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(names)) == len(names) == len(DEVICE_ROUTES)


def test_every_placeholder_of_a_path_is_described_and_required() -> None:
    for path, _, operation in operations():
        described = {p["name"]: p for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert list(described) == re.findall(r"\{(\w+)\}", path)
        assert all(parameter["required"] for parameter in described.values())


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    targets = {f"#/components/schemas/{name}" for name in SCHEMAS}
    used = {found["$ref"] for found in every_dict(DOCUMENT) if "$ref" in found}
    assert used == targets
    for found in every_dict(DOCUMENT):
        if "schema" in found:
            jsonschema_rs.meta.validate(found["schema"])
    for schema in SCHEMAS.values():
        jsonschema_rs.meta.validate(schema)


def test_a_pattern_is_one_that_other_languages_understand() -> None:
    patterns = [found["pattern"] for found in every_dict(DOCUMENT) if "pattern" in found]
    assert patterns
    assert [p for p in patterns if not (p.startswith("^") and p.endswith("$"))] == []
    assert [p for p in patterns if "\\A" in p or "\\Z" in p] == []


def test_a_check_in_shows_the_token_and_nothing_else_does() -> None:
    [scheme] = DOCUMENT["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    secured = [path for path, _, operation in operations() if operation["security"]]
    assert secured == ["/v1/check-in"]


def test_schemathesis_reads_it() -> None:
    labels = [found.ok().label for found in API.get_all_operations() if isinstance(found, Ok)]
    assert labels == [f"{route.method} {route.path}" for route in DEVICE_ROUTES]


# -- true -----------------------------------------------------------------------------------


def test_every_request_of_a_device_is_described() -> None:
    described = [route.request for route in DEVICE_ROUTES if isinstance(route.request, type)]
    assert described == list(PATHS)
    chunk = [route for route in DEVICE_ROUTES if isinstance(route.request, Raw)]
    assert [route.method for route in chunk] == ["PUT"]


def test_the_key_of_parameters_is_where_the_server_looks_for_it() -> None:
    routes = Routes([Buffered("GET", PARAMETERS_PATH, lambda exchange, body: None)])
    found = routes.find("GET", f"/v1/parameters/next-word/3/version-12-{'0a' * 16}")
    assert found is not None
    assert found[1]["key"] == f"next-word/3/version-12-{'0a' * 16}"


@settings(max_examples=100, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_what_the_schema_allows_is_parsed(data: st.DataObject) -> None:
    """A client written against the description is never told that it sends garbage."""
    kind, path = data.draw(st.sampled_from(list(PATHS.items())))
    body = _without_fractions(data.draw(API[path]["POST"].as_strategy()).body)
    assert type(wire.from_device.parse(msgspec.json.encode(body))) is kind


def _without_fractions(value: Any) -> Any:
    """To JSON Schema 1.0 is an integer; the API says in words that it is to be written as 1."""
    if isinstance(value, dict):
        return {key: _without_fractions(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_fractions(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@settings(max_examples=100)
@given(a_message(*TO_DEVICE))
def test_what_the_server_answers_is_described(message: Message) -> None:
    name = type(message).__name__
    validator(name).validate(msgspec.json.decode(wire.encode(message)))


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("Join", {"type": "Join"}),
        ("Join", {"type": "Leave", "ticket": ""}),
        ("Join", {"type": "Join", "ticket": "not base64!"}),
        ("Join", {"type": "Join", "ticket": "QUJD" * 400}),
        ("Report", {"type": "Report", "ticket": "QUJD", "examples": 0}),
        ("Report", {"type": "Report", "ticket": "QUJD", "examples": 2**31 + 1}),
        ("CheckIn", {"type": "CheckIn", "protocol": 1, "capabilities": {"engine": "<script>"}}),
        ("CheckIn", {"type": "CheckIn", "protocol": 1, "capabilities": {}, "excluded": ["a"] * 65}),
    ],
)
def test_a_bound_of_the_parser_is_a_bound_of_the_schema(name: str, body: Json) -> None:
    assert not validator(name).is_valid(body)


def test_every_answer_of_the_protocol_appears_and_errors_do_everywhere() -> None:
    answered: set[type] = set()
    for route in DEVICE_ROUTES:
        by_status = {answer.status: answer.body for answer in route.answers}
        assert by_status[503] == (Retry,)
        assert by_status[None] == (Refused, Retry)
        for body in by_status.values():
            answered |= set() if isinstance(body, Raw) else set(body)
    assert answered == {*TO_DEVICE, Located}


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("checkpoint", "/v1/log/checkpoint"),
        ("tile/entries/000", "/v1/log/tile/{level}/{tile}"),
        ("tile/0/007.p/255", "/v1/log/tile/{level}/{tile}.p/{width}"),
    ],
)
def test_the_files_of_the_log_are_described_as_they_are_served(path: str, template: str) -> None:
    assert is_public(path)
    described = {p["name"]: p["schema"] for p in DOCUMENT["paths"][template]["get"]["parameters"]}
    pattern = re.escape(template.removeprefix("/v1/log/"))
    for name, schema in described.items():
        if "pattern" in schema:
            pattern = pattern.replace(rf"\{{{name}\}}", schema["pattern"].strip("^$"))
    assert re.fullmatch(pattern, path)


def test_the_fields_of_an_offer_have_the_bounds_of_the_checks() -> None:
    """Lengths in characters of base64, which is what JSON Schema counts."""
    fields = SCHEMAS["SecureOffer"]["properties"]
    for name, most_bytes in (
        ("parameters", MAX_ENCODED_BYTES),
        ("offer", OFFER_BYTES),
        ("identity", KEY_BYTES),
        ("evidence", MAX_QUOTE_BYTES),
        ("collateral", MAX_COLLATERAL_BYTES),
    ):
        assert fields[name]["maxLength"] == len(b64encode(bytes(most_bytes))), name
    assert fields["offer"]["minLength"] == fields["offer"]["maxLength"]
    assert fields["identity"]["minLength"] == fields["identity"]["maxLength"]


# -- for other documents --------------------------------------------------------------------


class Inner(Struct):
    """Part of a message."""

    size: int


class Thing(Struct, tag=True):
    """A message of some other API."""

    inner: Inner


def test_other_routes_make_other_documents() -> None:
    route = ApiRoute(
        "GET", "/things", "things", "All.", (ApiAnswer(200, "Them.", (Thing,)),), token="me"
    )
    found = document(Api("Things", "2", "A test.", (("me", "My token."),)), [route])
    assert found["info"]["title"] == "Things"
    assert set(found["components"]["schemas"]) == {"Inner", "Thing"}
    assert found["paths"]["/things"]["get"]["security"] == [{"me": []}]
    content = found["paths"]["/things"]["get"]["responses"]["200"]["content"]
    assert content == {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}


def test_two_methods_share_a_path() -> None:
    routes = [
        ApiRoute(method, "/thing", method.lower(), "It.", (ApiAnswer(204, "Done."),))
        for method in ("PUT", "DELETE")
    ]
    found = document(Api("Things", "2", ""), routes)
    assert set(found["paths"]["/thing"]) == {"put", "delete"}
    assert "content" not in found["paths"]["/thing"]["put"]["responses"]["204"]


def test_bounds_of_answers_are_described_too() -> None:
    assert SCHEMAS["Incomplete"]["properties"]["missing"]["items"]["exclusiveMaximum"] == 4096
    assert {*SCHEMAS["Joined"]["required"], "secure", "norms", "upload_bits"} == {
        "type",
        *Joined.__struct_fields__,
    }
    assert SCHEMAS["Incomplete"]["properties"]["type"]["enum"] == [Incomplete.__name__]
