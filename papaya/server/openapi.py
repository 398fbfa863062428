"""OpenAPI 3.1 from descriptions of routes; schemas come from the message types that are parsed.

The bounds of a field are those that the parser enforces. Patterns are written so that regular
expressions of every language understand them (`^…$` for Python's `\\A…\\Z`), and bytes in JSON are
padded base64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_JSON, _RAW = "application/json", "application/octet-stream"


class ApiParameter(NamedTuple):
    """Part of a path, or a header."""

    name: str
    where: Literal["path", "header", "query"]
    schema: Json
    description: str
    required: bool = True


class Raw(NamedTuple):
    """A body that is not a message."""

    description: str
    max_bytes: int | None = None
    content_type: str = _RAW


class ApiAnswer(NamedTuple):
    """An answer with one status: one of several messages, raw bytes, or no body.

    Without a status it describes every status that is not listed.
    """

    status: int | None
    description: str
    body: tuple[type, ...] | Raw = ()
    headers: tuple[ApiParameter, ...] = ()


class ApiRoute(NamedTuple):
    """One operation. `token` names the security scheme that it needs."""

    method: str
    path: str
    operation: str
    summary: str
    answers: tuple[ApiAnswer, ...]
    request: type | Raw | None = None
    parameters: tuple[ApiParameter, ...] = ()
    token: str | None = None


class Api(NamedTuple):
    """Title and description. `tokens` are bearer schemes: name and description."""

    title: str
    version: str
    description: str
    tokens: tuple[tuple[str, str], ...] = ()


def document(api: Api, routes: Sequence[ApiRoute]) -> Json:
    """The whole description, ready to be encoded as JSON."""
    types = list(dict.fromkeys(_types(routes)))
    references, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, references, strict=True))
    paths: dict[str, Json] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    schemes = {
        name: {"type": "http", "scheme": "bearer", "description": description}
        for name, description in api.tokens
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": api.title, "version": api.version, "description": api.description},
        "paths": paths,
        "components": {"schemas": _portable(schemas), "securitySchemes": schemes},
    }


def _types(routes: Iterable[ApiRoute]) -> Iterable[type]:
    for route in routes:
        if isinstance(route.request, type):
            yield route.request
        for answer in route.answers:
            if not isinstance(answer.body, Raw):
                yield from answer.body


def _operation(route: ApiRoute, schema_of: dict[type, Json]) -> Json:
    operation: Json = {"operationId": route.operation, "summary": route.summary}
    if route.parameters:
        operation["parameters"] = [
            {"name": p.name, "in": p.where, **_described(p)} for p in route.parameters
        ]
    if route.request is not None:
        content = _content((route.request,), schema_of)
        operation["requestBody"] = {"required": True, "content": content}
    operation["responses"] = {
        str(answer.status or "default"): _response(answer, schema_of) for answer in route.answers
    }
    operation["security"] = [{route.token: []}] if route.token is not None else []
    return operation


def _response(answer: ApiAnswer, schema_of: dict[type, Json]) -> Json:
    response: Json = {"description": answer.description}
    if answer.headers:
        response["headers"] = {header.name: _described(header) for header in answer.headers}
    if answer.body:
        body = (answer.body,) if isinstance(answer.body, Raw) else answer.body
        response["content"] = _content(body, schema_of)
    return response


def _described(parameter: ApiParameter) -> Json:
    return {
        "description": parameter.description,
        "required": parameter.required,
        "schema": parameter.schema,
    }


def _content(body: tuple[type | Raw, ...], schema_of: dict[type, Json]) -> Json:
    first = body[0]
    if isinstance(first, Raw):
        schema: Json = {"type": "string", "format": "binary", "description": first.description}
        if first.max_bytes is not None:
            schema |= {"minLength": 1, "maxLength": first.max_bytes}
        return {first.content_type: {"schema": schema}}
    references = [schema_of[kind] for kind in body if not isinstance(kind, Raw)]
    if len(references) == 1:
        return {_JSON: {"schema": references[0]}}
    mapping = {reference["$ref"].rpartition("/")[2]: reference["$ref"] for reference in references}
    discriminator = {"propertyName": "type", "mapping": mapping}
    return {_JSON: {"schema": {"oneOf": references, "discriminator": discriminator}}}


def _portable(schema: Any) -> Any:
    """The same schema without constructs that only Python and msgspec understand."""
    if isinstance(schema, list | tuple):
        return [_portable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _portable(value) for key, value in schema.items()}
    if isinstance(found.get("pattern"), str):
        found["pattern"] = found["pattern"].replace(r"\A", "^").replace(r"\Z", "$")
    if found.get("contentEncoding") == "base64":
        found["pattern"] = _BASE64
    return found
