"""The route table."""

from __future__ import annotations

import pytest

from papaya.http.errors import MisuseError
from papaya.http.exchange import Exchange
from papaya.http.routes import Buffered, Routes


def nothing(exchange: Exchange, body: bytes) -> None:
    raise AssertionError("a table only looks up")


def a_table(*routes: str) -> Routes:
    lines = (route.split(" ") for route in routes)
    return Routes(Buffered(method, path, nothing) for method, path in lines)


@pytest.mark.parametrize(
    ("request_line", "route", "captured"),
    [
        ("POST /v1/join", "POST /v1/join", {}),
        ("GET /v1/tasks/next-word", "GET /v1/tasks/{task}", {"task": "next-word"}),
        ("GET /v1/tasks/all", "GET /v1/tasks/all", {}),
        ("HEAD /v1/tasks/t", "GET /v1/tasks/{task}", {"task": "t"}),
        ("GET /v1/a/b/c.d", "GET /v1/a/{key...}", {"key": "b/c.d"}),
        ("PUT /v1/u/1/c/2", "PUT /v1/u/{u}/c/{c}", {"u": "1", "c": "2"}),
    ],
)
def test_the_route_of_a_request(request_line: str, route: str, captured: dict[str, str]) -> None:
    table = a_table(
        "POST /v1/join",
        "GET /v1/tasks/{task}",
        "GET /v1/tasks/all",
        "GET /v1/a/{key...}",
        "PUT /v1/u/{u}/c/{c}",
    )
    method, path = request_line.split(" ")
    found = table.find(method, path)
    assert found is not None
    assert f"{found[0].method} {found[0].path}" == route
    assert found[1] == captured


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/tasks/", 404, None),
        ("GET", "/v1/tasks/a/b", 404, None),
        ("GET", "/v1/tasksXt", 404, None),
        ("POST", "/v1/tasks/t", 405, "DELETE, GET"),
    ],
)
def test_no_route(method: str, path: str, status: int, allow: str | None) -> None:
    table = a_table("GET /v1/tasks/{task}", "DELETE /v1/tasks/{task}")
    assert table.find(method, path) is None
    error = table.missing(path)
    assert error.status == status
    assert dict(error.headers).get("Allow") == allow


@pytest.mark.parametrize(
    "routes", [["GET /a", "GET /a"], ["GET /a/{rest...}/b"], ["GET /a{b}"], ["GET /{A}"]]
)
def test_a_table_that_makes_no_sense(routes: list[str]) -> None:
    with pytest.raises(MisuseError):
        a_table(*routes)
