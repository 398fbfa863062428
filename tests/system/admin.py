"""The admin API of a running server, as an owner's script would use it."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from papaya.config import TaskConfig
from papaya.learning import parameters
from papaya.learning.parameters import FLOAT32

_TIMEOUT_S = 120.0
_POLL_S = 0.05


class Admin:
    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._token = token
        self._tls = tls

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = self._connected()
        try:
            headers = {"Authorization": f"Bearer {self._token}"}
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        return self._good("GET", path, None)

    def post(self, path: str, body: object = None) -> Any:
        return self._good("POST", path, msgspec.json.encode({} if body is None else body))

    def submit(self, config: TaskConfig) -> None:
        """At version 0 all parameters are zero."""
        zeros = np.zeros(config.model_length, FLOAT32)
        data = parameters.encode(zeros, {"task": config.task, "version": "0"})
        path = f"/admin/tasks/{config.task}/parameters?model_length={config.model_length}"
        stored = self._good("PUT", path, data)
        self.post("/admin/tasks", {"config": config, "parameters": stored["parameters"]})

    def task(self, task: str) -> Any:
        return self.get(f"/admin/tasks/{task}")["task"]

    def until_task(self, task: str, is_so: Callable[[Any], bool], seconds: float) -> Any:
        """The task's line, once it is so."""
        path = f"/admin/tasks/{task}"
        return self.until(path, lambda found: is_so(found["task"]), seconds)["task"]

    def until(self, path: str, is_so: Callable[[Any], bool], seconds: float) -> Any:
        """The API tells states, not events: so it is asked again and again."""
        ends_at = time.monotonic() + seconds
        while not is_so(found := self.get(path)):
            assert time.monotonic() < ends_at, f"not within {seconds:g} s, but: {found}"
            time.sleep(_POLL_S)
        return found

    def _good(self, method: str, path: str, body: bytes | None) -> Any:
        status, answer = self.ask(method, path, body)
        assert status == 200, f"{method} {path}: {status} {answer[:500]!r}"
        return msgspec.json.decode(answer)

    def _connected(self) -> http.client.HTTPConnection:
        """Connected again if the handshake took longer than a server waits, on a busy machine."""
        if self._tls is None:
            return http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        ends_at = time.monotonic() + _TIMEOUT_S
        while True:
            connection = http.client.HTTPSConnection(
                self._address, timeout=_TIMEOUT_S, context=self._tls
            )
            try:
                connection.connect()
            except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
                connection.close()
                assert time.monotonic() < ends_at
                time.sleep(_POLL_S)
            else:
                return connection
