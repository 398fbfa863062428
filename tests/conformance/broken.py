"""Clients that break one rule each: the minimal client or the reference device, with one change.

`examples/minimal_client.py` imports nothing of Papaya and passes the kit; each function here takes
a fresh copy of it and spoils it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from papaya.conformance.kit import ClientSetup

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "minimal_client.py"
PATIENCE_S = 300.0
IGNORED = 3  # how often a client ignores that its visit is over
Break = Callable[[ModuleType], None]
BREAKS: dict[str, tuple[str, Break]] = {}
"""By rule: the scenario that has to catch it, and the change."""


def breaks(rule: str, scenario: str) -> Callable[[Break], Break]:
    def register(change: Break) -> Break:
        BREAKS[rule] = (scenario, change)
        return change

    return register


def minimal_client() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_client", CLIENT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.GIVE_UP_S = PATIENCE_S  # type: ignore[attr-defined]
    return module


async def minimal_visit(setup: ClientSetup, change: Break) -> None:
    client: Any = minimal_client()
    change(client)
    await asyncio.to_thread(_visit, client, setup)


def _visit(client: Any, setup: ClientSetup) -> None:
    server = client.Server(setup.server, setup.token)
    history = client.History(str(setup.state / "history.json"), 0.0)
    try:
        answer = client.check_in(server, history, [], PATIENCE_S)
        if answer["type"] == "Accepted":
            client.take_part(server, history, answer)
    except client.SessionOver:
        pass
    except (OSError, ValueError, KeyError, TypeError, client.HTTPException):
        pass  # it crashed


# -- requests -------------------------------------------------------------------------------


def _changing(client: Any, kind: str, **changes: Any) -> None:
    """Change fields of one type of message."""
    encoded = client.Server.encoded

    def other(self: Any, message: dict[str, Any]) -> Any:
        return encoded(self, {**message, **changes} if message["type"] == kind else message)

    client.Server.encoded = other


@breaks("message", "plain")
def a_number_as_a_string(client: Any) -> None:
    _changing(client, "Report", examples="1")


@breaks("ticket", "plain")
def another_ticket(client: Any) -> None:
    take_part = client.take_part

    def with_the_wrong_one(server: Any, history: Any, accepted: Any) -> Any:
        _changing(client, "Report", ticket=accepted["ticket"])
        return take_part(server, history, accepted)

    client.take_part = with_the_wrong_one


@breaks("token", "plain")
def no_token(client: Any) -> None:
    encoded = client.Server.encoded

    def bare(self: Any, message: Any) -> Any:
        method, path, body, _ = encoded(self, message)
        return method, path, body, {}

    client.Server.encoded = bare


@breaks("framing", "plain")
def chunked(client: Any) -> None:
    once = client.Server.once

    def in_pieces(self: Any, method: str, path: str, body: Any, headers: Any, wait_s: Any) -> Any:
        pieces = iter([body]) if method == "POST" else body
        return once(self, method, path, pieces, headers, wait_s)

    client.Server.once = in_pieces


@breaks("repeat", "lost-answers")
def gives_up_at_once(client: Any) -> None:
    def ask_once(self: Any, *request: Any) -> Any:
        return json.loads(self.once(*request, *([10.0] if len(request) == 4 else []))[1])

    client.Server.repeat = ask_once


@breaks("garbage", "proxy-pages")
def believes_every_body(client: Any) -> None:
    gives_up_at_once(client)


@breaks("status", "other-status")
def acts_on_the_status(client: Any) -> None:
    once = client.Server.once

    def strict(self: Any, *request: Any) -> Any:
        status, body = once(self, *request)
        if status not in (200, 206):
            raise client.SessionOver({"type": status})
        return status, body

    client.Server.once = strict


@breaks("unknown-fields", "unknown-fields")
def refuses_unknown_fields(client: Any) -> None:
    repeat = client.Server.repeat

    def strict(self: Any, *request: Any) -> Any:
        answer = repeat(self, *request)
        if "introduced_later" in answer:
            raise client.SessionOver("an unknown field")
        return answer

    client.Server.repeat = strict


@breaks("upload-url", "upload-url")
def gives_up_if_it_cannot_upload_directly(client: Any) -> None:
    repeat = client.Server.repeat

    def direct(self: Any, *request: Any) -> Any:
        answer = repeat(self, *request)
        if answer.get("upload_url"):
            raise ConnectionRefusedError
        return answer

    client.Server.repeat = direct


@breaks("redirect", "redirect")
def follows_redirects(client: Any) -> None:
    once = client.Server.once

    def following(self: Any, method: str, path: str, *rest: Any) -> Any:
        status, body = once(self, method, path, *rest)
        if status == 307:
            return once(self, method, "/v1/elsewhere", *rest)
        return status, body

    client.Server.once = following


@breaks("retry", "retry")
def does_not_wait(client: Any) -> None:
    class Hurried(dict[str, Any]):
        """Reads every delay as none."""

        def __getitem__(self, name: str) -> Any:
            return 0.0 if name == "after_s" else super().__getitem__(name)

    _reading(client, lambda text: json.loads(text, object_hook=Hurried))
    _drawing(client, lambda low, high: low)


def _reading(client: Any, loads: Callable[[bytes], Any]) -> None:
    client.json = SimpleNamespace(dump=json.dump, dumps=json.dumps, load=json.load, loads=loads)


def _drawing(client: Any, uniform: Callable[[float, float], float]) -> None:
    client.random = SimpleNamespace(random=lambda: 0.05, uniform=uniform)


@breaks("rejected", "rejected")
def comes_back_at_once(client: Any) -> None:
    _drawing(client, lambda low, high: 0.05)


# -- the session ----------------------------------------------------------------------------


@breaks("heartbeat", "slow-commit")
def no_heartbeats(client: Any) -> None:
    client.Heartbeats.run = lambda self: None


@breaks("aborted", "abort")
def goes_on_after_an_abort(client: Any) -> None:
    _goes_on_after(client, "Aborted")


@breaks("refused", "refused")
def goes_on_after_a_refusal(client: Any) -> None:
    _goes_on_after(client, "Refused")


def _goes_on_after(client: Any, kind: str) -> None:
    """Reads the first `IGNORED` answers of this kind as Retry."""
    ignored = iter(range(IGNORED))

    def loads(text: bytes) -> Any:
        answer = json.loads(text)
        if answer["type"] == kind and next(ignored, None) is not None:
            return {"type": "Retry", "after_s": 1.5}
        return answer

    _reading(client, loads)


@breaks("completed", "plain")
def completes_twice(client: Any) -> None:
    upload = client.upload

    def twice(server: Any, ticket: str, *rest: Any) -> Any:
        answer = upload(server, ticket, *rest)
        client.time.sleep(1.5)
        # Not with `ask`: that sends nothing if a regular heartbeat was answered Completed.
        server.once(*server.encoded({"type": "Heartbeat", "ticket": ticket}), PATIENCE_S)
        return answer

    client.upload = twice


@breaks("reason", "wrong-parameters")
def tells_its_error(client: Any) -> None:
    _changing(client, "Leave", reason="ValueError: my example")


@breaks("leave", "wrong-parameters")
def goes_without_a_word(client: Any) -> None:
    client.leave = lambda *_: None


@breaks("history", "history")
def forgets(client: Any) -> None:
    client.History.record = lambda *_: None


# -- bytes ----------------------------------------------------------------------------------


@breaks("hash", "wrong-parameters")
def does_not_check_the_hash(client: Any) -> None:
    def download(server: Any, joined: Any) -> Any:
        path = f"/v1/parameters/{joined['parameters']}"
        data = server.once("GET", path, None, {}, 60.0)[1]
        return client.read_parameters(data, joined["model_length"])

    client.download = download


@breaks("download", "broken-download")
def gives_up_a_broken_download(client: Any) -> None:
    once = client.Server.once

    def fragile(self: Any, *request: Any) -> Any:
        try:
            return once(self, *request)
        except client.IncompleteRead as error:
            raise client.SessionOver("broken") from error

    client.Server.once = fragile


@breaks("range", "broken-download")
def no_if_range(client: Any) -> None:
    once = client.Server.once

    def unconditional(
        self: Any, method: str, path: str, body: Any, headers: Any, *rest: Any
    ) -> Any:
        kept = {name: value for name, value in headers.items() if name != "If-Range"}
        return once(self, method, path, body, kept, *rest)

    client.Server.once = unconditional


@breaks("chunks", "plain")
def capital_checksum(client: Any) -> None:
    repeat = client.Server.repeat

    def loud(self: Any, method: str, path: str, body: Any, headers: Any, *rest: Any) -> Any:
        if "Papaya-Crc32" in headers:
            headers = {**headers, "Papaya-Crc32": "0X" + headers["Papaya-Crc32"][2:]}
        return repeat(self, method, path, body, headers, *rest)

    client.Server.repeat = loud


@breaks("counted", "plain")
def not_a_number(client: Any) -> None:
    upload = client.upload

    def poisoned(server: Any, ticket: str, chunk_bytes: int, update: bytes) -> Any:
        return upload(
            server, ticket, chunk_bytes, client.struct.pack("<f", float("nan")) + update[4:]
        )

    client.upload = poisoned


@breaks("evaluation", "evaluation")
def trains_in_an_evaluation(client: Any) -> None:
    """The update has the length of an evaluation, and fills no bucket."""
    participate, download = client.participate, client.download

    def trains(server: Any, history: Any, joined: Any, heartbeats: Any) -> Any:
        return participate(server, history, {**joined, "evaluates": False}, heartbeats)

    client.participate = trains
    client.download = lambda server, joined: download(server, joined)[: joined["update_length"]]


def _uploading(client: Any, *, all_again: bool, other_bytes: bool) -> None:
    def upload(server: Any, ticket: str, chunk_bytes: int, update: bytes) -> Any:
        name, count = client.uuid.uuid4().hex, -(-len(update) // chunk_bytes)
        missing, turn = list(range(count)), 0
        while True:
            for index in missing:
                chunk = update[index * chunk_bytes : (index + 1) * chunk_bytes]
                if other_bytes and turn:
                    chunk = bytes(len(chunk) - 1) + b"\1"
                crc32 = f"{client.zlib.crc32(chunk):08x}"
                headers = {"Papaya-Ticket": ticket, "Papaya-Crc32": crc32}
                server.repeat("PUT", f"/v1/uploads/{name}/chunks/{index}", chunk, headers)
            answer = server.ask({"type": "Complete", "ticket": ticket, "upload": name})
            if answer["type"] == "Completed":
                return answer
            turn += 1
            missing = list(range(count)) if all_again else answer["missing"]

    client.upload = upload


@breaks("incomplete", "incomplete")
def sends_everything_again(client: Any) -> None:
    _uploading(client, all_again=True, other_bytes=False)


@breaks("same-bytes", "incomplete")
def sends_other_bytes(client: Any) -> None:
    _uploading(client, all_again=False, other_bytes=True)
