"""Every route of the admin API with every role, over HTTP; and what happens to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from papaya.bundle.manifest import run_id
from papaya.http.exchange import Exchange
from papaya.http.routes import HttpRoute, Receiver
from papaya.messages.events import CertificatesRefused, StorageFailed, TsaBack, TsaUnreachable
from papaya.messages.owner import evaluation_id
from papaya.messages.storage import AccountRole, EventRow, Transaction, event_key
from papaya.server.admin import accounts
from papaya.server.admin.access import ACCESS, Caller, Gate, refusal
from papaya.server.admin.accounts import Identities
from papaya.server.admin.routes import AdminRoutes
from papaya.server.admin.service import AdminService
from papaya.server.admin.views import NewAccount, ProblemBody
from tests.unit.cli.admin_server import AdminServer, admin_server
from tests.unit.http.loopback import a_client, a_server, run
from tests.unit.server.admin.builders import BY
from tests.unit.server.admin.test_routes import ask

ROLES: tuple[AccountRole, ...] = ("viewer", "owner", "operator")


def all_routes() -> list[HttpRoute]:
    nobody = AdminService.__new__(AdminService), Identities.__new__(Identities)
    return AdminRoutes(*nobody).routes()


ROUTES = [(route.method, route.path) for route in all_routes()]

# Written out by hand, so that a change of the table is noticed here.
FOR_VIEWERS = {
    ("GET", "/admin/status"),
    ("GET", "/admin/whoami"),
    ("GET", "/admin/events"),
    ("GET", "/admin/tasks"),
    ("GET", "/admin/tasks/{task}"),
    ("GET", "/admin/tasks/{task}/points"),
    ("GET", "/admin/tasks/{task}/versions"),
    ("GET", "/admin/tasks/{task}/revisions"),
}
FOR_OPERATORS = {
    ("POST", "/admin/maintenance"),
    ("POST", "/admin/maintenance/end"),
    ("POST", "/admin/keys/rotate"),
    ("POST", "/admin/tasks/{task}/share"),
    ("GET", "/admin/revocations"),
    ("POST", "/admin/revocations"),
    ("GET", "/admin/accounts"),
    ("POST", "/admin/accounts"),
    ("POST", "/admin/accounts/{account}/revoke"),
    ("POST", "/admin/accounts/{account}/quota"),
    ("GET", "/admin/audit"),
    ("POST", "/admin/audit/prune"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    with admin_server(Path(tmp_path_factory.mktemp("access"))) as found:
        yield found


@pytest.fixture(scope="module")
def tokens(server: AdminServer) -> dict[str, str]:
    return {
        role: server.call(
            accounts.add(
                server.system.service,
                NewAccount(f"a-{role}", role, ("vision-",) if role == "owner" else ()),
                BY,
            )
        ).token
        for role in ROLES
    }


def test_the_table_has_exactly_the_routes_that_exist() -> None:
    assert sorted(ACCESS) == sorted(ROUTES)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_with_every_role(
    server: AdminServer, tokens: dict[str, str], method: str, path: str, role: str
) -> None:
    """What passes the gate fails later: the task does not exist, or the body is empty."""

    def status(task: str) -> int:
        where = path.replace("{task}", task).replace("{version}", "1").replace("{account}", "x")
        body = b"[]" if method != "GET" else b""
        return ask(server, method, where, body, tokens[role])[0]

    passes = {
        "viewer": (method, path) in FOR_VIEWERS,
        "owner": (method, path) not in FOR_OPERATORS,
        "operator": True,
    }[role]
    assert (status("vision-1") != 403) == passes
    if role == "owner" and (method, path) not in FOR_VIEWERS and "{task}" in path:
        assert status("speech-1") == 403
        assert status("visio") == 403


@pytest.mark.parametrize("role", ROLES)
def test_only_operators_see_paths_and_addresses_in_events(
    server: AdminServer, tokens: dict[str, str], role: str
) -> None:
    secret = "/srv/papaya on 10.1.2.3"
    events = [
        StorageFailed("blobs", "vision-1", f"cannot write {secret}: the disk is full"),
        CertificatesRefused(f"cannot read {secret}"),
        TsaUnreachable(secret, f"no TSA at {secret}: connection refused"),
        TsaBack(secret, 2.5),
    ]
    rows = tuple(
        (
            event_key(1.0, "agg-1", number),
            EventRow(1.0, "agg-1", event.name(), event.level, msgspec.json.encode(event.fields)),
        )
        for number, event in enumerate(events)
    )
    server.call(server.system.state.transact(Transaction(put=rows)))
    status, answer = ask(server, "GET", "/admin/events", token=tokens[role])
    found = msgspec.json.decode(answer)
    assert status == 200
    shown = [each["fields"] for each in found]
    if role == "operator":
        assert shown == [event.fields for event in events]
    else:
        assert shown == [{"part": "blobs", "task": "vision-1"}, {}, {}, {"after_s": 2.5}]


def test_a_path_that_is_not_in_the_table_is_refused_for_everybody() -> None:
    operator = Caller("admin", "operator")
    problem = refusal("POST", "/admin/new", operator)
    assert problem is not None
    assert problem.status == 403
    assert refusal("GET", "/admin/status", operator) is None


def test_an_owner_without_prefixes_owns_nothing() -> None:
    assert not Caller("x", "owner").owns("vision-1")
    assert not Caller("x", "viewer", ("vision-",)).owns("vision-1")
    assert Caller("x", "owner", ("a-", "vision-")).owns("vision-1")


def test_the_name_of_a_task_decides_who_owns_its_runs_and_evaluations() -> None:
    """The id of a run of `vision` begins with `vision-`."""
    anna = Caller("anna", "owner", ("vision-",))
    for name, is_own in (("vision-digits", True), ("vision", False)):
        run = run_id("an owner", name, 1)
        for task in (name, run, evaluation_id(name, 3), evaluation_id(run, 3, 1)):
            assert anna.owns(task) is is_own, task
    long = "vision-" + "digits-" * 8
    assert anna.owns(run_id("an owner", long, 1))
    assert anna.owns(evaluation_id(run_id("an owner", long, 1), 1_000_000))


@pytest.mark.parametrize(
    "token",
    ["papaya-account.a-viewer." + "x" * 43, "papaya-account.nobody." + "x" * 43, "x" * 400],
)
def test_a_wrong_token_gets_401_and_its_body_is_not_received(
    server: AdminServer, tokens: dict[str, str], token: str
) -> None:
    path = "/admin/tasks/vision-1/parameters?model_length=1000"
    status, answer = ask(server, "PUT", path, b"a" * 4000, token)
    assert status == 401
    assert msgspec.json.decode(answer, type=ProblemBody).hint


def test_a_body_is_received_after_the_account_was_found(
    server: AdminServer, tokens: dict[str, str]
) -> None:
    """The connection waits, without reading, until the state store has answered."""
    path = "/admin/tasks/vision-9/parameters?model_length=100000"
    status, answer = ask(server, "PUT", path, b"a" * 400_000, tokens["owner"])
    assert (status, b"invalid parameters" in answer) == (400, True)


def test_a_store_that_does_not_answer_is_not_a_wrong_token(
    server: AdminServer, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(prefixes: tuple[str, ...]) -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr("papaya.server.admin.access._IDENTIFY_S", 0.05)
    monkeypatch.setattr(server.system.state, "read", never)
    status, answer = ask(server, "GET", "/admin/status", token=tokens["viewer"])
    assert (status, b"cannot be checked now" in answer) == (503, True)


class LookedUp:
    """Everybody is the operator, after a look into the store."""

    def at_once(self, authorization: str | None) -> Caller | None:
        return None

    async def identify(self, authorization: str | None) -> Caller | None:
        return Caller("anna", "operator")


@pytest.mark.parametrize("body", [b"", b"parameters"])
def test_a_caller_with_an_account_is_answered_if_there_is_no_memory_for_the_body(
    body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection was paused, so nobody would notice that the caller has given up."""

    def begin(caller: Caller, exchange: Exchange) -> Receiver | None:
        raise MemoryError

    async def main() -> None:
        route = Gate(LookedUp()).route("PUT", "/admin/tasks/{task}/parameters", begin, 1000)
        async with a_server([route]) as server, a_client(server.port) as client:
            assert (await client.ask("PUT", "/admin/tasks/a/parameters", body)).status == 500

    run(main())
    assert "MemoryError" in caplog.text
