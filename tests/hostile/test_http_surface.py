"""The whole HTTP surface of a real server, fuzzed by its own description, and without any.

Whatever is sent: the answer is one that the OpenAPI document names, its body is the message that
the document says, no request is answered 500, and an honest client is served afterwards.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import checks

from papaya.messages.paths import PATHS
from papaya.server.device_openapi import device_document
from tests.hostile.running_server import DEADLINE_S, RunningServer
from tests.hostile.test_device_api import is_served

schema = schemathesis.openapi.from_dict(device_document())
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("server"), device_tokens="none") as running:
        running.submit(concurrency=5000)  # more than strangers check in here
        is_served(running)
        yield running
        is_served(running)


@schema.parametrize()
@settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)
def test_every_answer_is_one_that_the_document_names(
    case: schemathesis.Case[Any], server: RunningServer
) -> None:
    host, port = server.address("devices")
    response = case.call(base_url=f"http://{host}:{port}", timeout=DEADLINE_S)
    assert response.status_code != 500, response.text
    case.validate_response(response, checks=CHECKS)


HEADER = st.tuples(
    st.sampled_from(["Content-Length", "Papaya-Ticket", "Papaya-Crc32", "Expect", "Connection"]),
    st.one_of(
        st.integers(-1, 2**40).map(str),
        st.sampled_from(["AAAA", "deadbeef", "100-continue", "close", "\x00", "é"]),
        st.text(max_size=20),
    ),
)


@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", ""]),
    path=st.one_of(
        st.sampled_from([*PATHS.values(), "/v1/uploads/u/chunks/0", "/v1/parameters/x", "*"]),
        st.text(max_size=30),
    ),
    headers=st.lists(HEADER, max_size=6),
    body=st.binary(max_size=300),
)
@settings(max_examples=150)
def test_no_bytes_make_it_fall(
    server: RunningServer, method: str, path: str, headers: list[tuple[str, str]], body: bytes
) -> None:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{k}: {v}" for k, v in headers)]
    request = "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body
    with socket.create_connection(server.address("devices"), DEADLINE_S) as peer:
        peer.sendall(request)
        peer.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while piece := peer.recv(65536):
                answer += piece
        except ConnectionResetError:
            return  # it may cut off who sends nonsense
    assert b" 500 " not in answer.split(b"\r\n", 1)[0]
