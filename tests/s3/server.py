"""An S3 server in a process of its own (moto), with faults that a test can choose.

    python tests/s3/server.py FOLDER [HOST:PORT]     prints its port; the bucket `papaya` exists

A fault is the content of the file FOLDER/fault, read for every request:

    unconditional       the conditions of a write are ignored
    code:STATUS:CODE    every request is answered with this status and error code
    hang                requests are not answered
    (empty)             none

What this does not show: real network latency, limits of rates, and what a store loses.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BUCKET = "papaya"
KEY_ID, SECRET = "TESTKEYTESTKEYTESTKE", "secretsecretsecretsecretsecretsecretsecr"


def key_file(folder: Path) -> Path:
    """A file for `blobs_credentials`."""
    file = folder / "bucket.keys"
    file.touch(mode=0o600)
    lines = ["[default]", f"aws_access_key_id = {KEY_ID}", f"aws_secret_access_key = {SECRET}"]
    file.write_text("\n".join(lines) + "\n", encoding="ascii")
    return file


class S3Server:
    """A running server."""

    def __init__(self, folder: Path, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._fault = folder / "fault"

    def fail(self, fault: str) -> None:
        self._fault.write_text(fault, encoding="ascii")

    @contextmanager
    def failing(self, fault: str) -> Iterator[None]:
        self.fail(fault)
        try:
            yield
        finally:
            self.fail("")


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server in a process, and end it."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fault").write_text("", encoding="ascii")
        command = [sys.executable, __file__, name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, "the S3 server did not start"
            yield S3Server(folder, int(line))
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


# -- in the process of the server -----------------------------------------------------------------


class Faulty:
    """A WSGI application in front of moto's."""

    def __init__(self, app: Any, fault: Path) -> None:
        self._app = app
        self._fault = fault

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        fault = self._fault.read_text(encoding="ascii")
        if fault == "unconditional":
            environ.pop("HTTP_IF_NONE_MATCH", None)
        while fault == "hang":
            time.sleep(0.05)
            fault = self._fault.read_text(encoding="ascii")
        if fault.startswith("code:"):
            _, status, code = fault.split(":")
            body = f"<Error><Code>{code}</Code><AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId></Error>"
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{status} Fault", [("Content-Length", str(len(body)))])
            return [body.encode()]
        found: Iterable[bytes] = self._app(environ, start_response)
        return found


def main(folder: Path, listen: str = "127.0.0.1:0") -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server
    from werkzeug.test import Client

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    Client(app).put(f"/{BUCKET}", headers={"Host": "127.0.0.1"})
    host, port = listen.rsplit(":", 1)
    server = make_server(host, int(port), Faulty(app, folder / "fault"), threaded=True)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
