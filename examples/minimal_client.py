"""A device in plain Python, written from docs/spec/protocol.md alone, without importing Papaya.

It takes part once. It does not train: it uploads an update of zeros for one example, which changes
nothing. With `--history` it keeps its participations in a file, as every real device must.

    python examples/minimal_client.py --server http://127.0.0.1:8750 --token-file device.token

A real device also has an example store, eligibility checks and training: see that page.
"""

import argparse
import hashlib
import json
import os
import random
import struct
import sys
import threading
import time
import uuid
import zlib
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from urllib.parse import urlsplit

PROTOCOL = 1
GIVE_UP_S = 60.0


class SessionOver(Exception):
    """The server ended the session, or does not want this device."""


class Server:
    """Repeats each request until it is answered; the protocol allows it for all requests."""

    def __init__(self, url, token):
        self.url, self.token = urlsplit(url), token
        self.ended = None  # the answer to a heartbeat that ended the session

    def ask(self, message, timeout_s=10.0):
        return self.repeat(*self.encoded(message), timeout_s)

    def encoded(self, message):
        path = {"CheckIn": "/v1/check-in"}.get(message["type"], f"/v1/{message['type'].lower()}")
        headers = {"Content-Type": "application/json"}
        if message["type"] == "CheckIn":
            headers["Authorization"] = f"Bearer {self.token}"
        return "POST", path, json.dumps(message).encode(), headers

    def repeat(self, method, path, body, headers, timeout_s=10.0):
        ends_at, failures = time.monotonic() + GIVE_UP_S, 0
        while time.monotonic() < ends_at:
            if self.ended is not None:
                raise SessionOver(self.ended)
            after_s = 0.0
            try:
                answer = json.loads(self.once(method, path, body, headers, timeout_s)[1])
                if answer["type"] in ("Aborted", "Refused"):
                    raise SessionOver(answer)
                if answer["type"] != "Retry":
                    return answer
                after_s = answer["after_s"]
            except (OSError, HTTPException, ValueError, KeyError, TypeError):
                pass  # no answer, or not a valid one
            failures += 1
            time.sleep(after_s + random.random() * min(5.0, 0.5 * 2**failures))
        raise SessionOver("no answer came in time")

    def once(self, method, path, body, headers, timeout_s):
        kind = HTTPSConnection if self.url.scheme == "https" else HTTPConnection
        connection = kind(self.url.hostname, self.url.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


class Heartbeats:
    """Sends heartbeats from Joined until the visit is over, with the newest `ticket`."""

    def __init__(self, server, joined):
        self.server, self.ticket, self.every_s = server, joined["ticket"], joined["heartbeat_s"]
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()

    def run(self):
        wait_s = self.every_s
        while not self.stopped.wait(wait_s):
            wait_s = min(self.every_s, random.uniform(0, 5))  # after one that fails
            try:
                answer = self.send()
                if answer["type"] == "Alive":
                    wait_s = self.every_s
                elif answer["type"] != "Retry":
                    self.server.ended = answer
                    return
            except (OSError, HTTPException, ValueError, KeyError, TypeError):
                pass

    def send(self):
        request = self.server.encoded({"type": "Heartbeat", "ticket": self.ticket})
        return json.loads(self.server.once(*request, 10.0)[1])


class History:
    """For each task: how often this device took part, when last, and the task's limits."""

    def __init__(self, path, floor_s):
        self.path, self.floor_s, self.entries = path, floor_s, {}
        if path and os.path.exists(path):
            with open(path) as file:
                self.entries = json.load(file)

    def allows(self, task, gap_s, limit):
        count, last_at = self.entries.get(task, (0, -1e18))[:2]
        is_rested = time.time() >= last_at + max(gap_s, self.floor_s)
        return is_rested and (limit is None or count < limit)

    def excluded(self):
        return [
            task for task, (_, _, *rule) in self.entries.items() if not self.allows(task, *rule)
        ]

    def record(self, task, gap_s, limit):
        count = self.entries.get(task, (0,))[0] + 1
        self.entries[task] = (count, time.time(), gap_s, limit)
        if self.path:
            with open(self.path + ".new", "w") as file:
                json.dump(self.entries, file)
                file.flush()
                os.fsync(file.fileno())  # before the first byte of the update is sent
            os.replace(self.path + ".new", self.path)


def read_parameters(data, length):
    """The numbers in a parameters file: a header of JSON, then one float32 vector."""
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])["parameters"]
    assert entry == {"dtype": "F32", "shape": [length], "data_offsets": [0, 4 * length]}, entry
    return struct.unpack(f"<{length}f", data[8 + size :])


def download(server, joined):
    """The parameters, or None. A broken download goes on where it broke."""
    key, data = joined["parameters"], b""
    for _ in range(5):
        headers = {}
        if data:
            headers = {"Range": f"bytes={len(data)}-", "If-Range": f'"{key[-32:]}"'}
        try:
            status, part = server.once("GET", f"/v1/parameters/{key}", None, headers, 60.0)
        except IncompleteRead as broken:
            data += broken.partial
            continue
        except (OSError, HTTPException):
            continue
        data = data + part if status == 206 else part
        if hashlib.sha256(data).hexdigest()[:32] == key[-32:]:
            return read_parameters(data, joined["model_length"])
        data = b""  # the beginning may have been wrong: ask for the whole
    return None


def upload(server, ticket, chunk_bytes, update):
    upload_id = uuid.uuid4().hex
    missing = range(-(-len(update) // chunk_bytes))
    while True:
        for index in missing:
            chunk = update[index * chunk_bytes : (index + 1) * chunk_bytes]
            headers = {"Papaya-Ticket": ticket, "Papaya-Crc32": f"{zlib.crc32(chunk):08x}"}
            path = f"/v1/uploads/{upload_id}/chunks/{index}"
            answer = server.repeat("PUT", path, chunk, headers)
            if answer["type"] == "Completed":
                return answer
        answer = server.ask({"type": "Complete", "ticket": ticket, "upload": upload_id})
        if answer["type"] == "Completed":
            return answer
        missing = answer["missing"]


def check_in(server, history, modules, patience_s):
    """Accepted, or the last Rejected. A rejected device comes back in the window it was given."""
    ends_at = time.monotonic() + patience_s
    while True:
        message = {"type": "CheckIn", "protocol": PROTOCOL, "excluded": history.excluded()[:64]}
        message["capabilities"] = {"engine": "torch", "modules": modules}
        answer = server.ask(message, timeout_s=30.0)  # the server may hold it
        if answer["type"] != "Rejected" or time.monotonic() >= ends_at:
            return answer
        time.sleep(random.uniform(answer["retry_from_s"], answer["retry_until_s"]))


def take_part(server, history, accepted):
    joined = server.ask({"type": "Join", "ticket": accepted["ticket"]})
    with Heartbeats(server, joined) as heartbeats:
        return participate(server, history, joined, heartbeats)


def participate(server, history, joined, heartbeats):
    task, rule = joined["task"], (joined["participation_gap_s"], joined["max_participations"])
    if joined["evaluates"] or joined.get("secure") or not history.allows(task, *rule):
        return leave(server, joined, "declined")
    parameters = download(server, joined)
    if parameters is None:
        return leave(server, joined, "no_parameters")
    update = struct.pack(f"<{joined['update_length']}f", *(0.0 for _ in parameters))
    granted = server.ask({"type": "Report", "ticket": joined["ticket"], "examples": 1})
    heartbeats.ticket = granted["ticket"]
    history.record(task, *rule)
    return upload(server, granted["ticket"], granted["chunk_bytes"], update)


def leave(server, joined, reason):
    return server.ask({"type": "Leave", "ticket": joined["ticket"], "reason": reason})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="http://127.0.0.1:8750", help="address of a selector")
    parser.add_argument("--token-file", required=True, help="file that holds the device token")
    parser.add_argument("--history", help="file for participations; without it they are forgotten")
    parser.add_argument(
        "--floor", type=float, default=3600.0, help="minimum seconds between two participations"
    )
    parser.add_argument(
        "--module", action="append", default=[], help="hash of a task file that this device has"
    )
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds to keep coming back when rejected"
    )
    options = parser.parse_args()
    with open(options.token_file) as file:
        server = Server(options.server, file.read().strip())
    history = History(options.history, options.floor)
    try:
        answer = check_in(server, history, options.module, options.patience)
        if answer["type"] == "Accepted":
            answer = take_part(server, history, answer)
    except SessionOver as over:
        answer = over.args[0]
    print(json.dumps(answer))
    return 0 if answer == {"type": "Completed", "discarded": None} else 1


if __name__ == "__main__":
    sys.exit(main())
