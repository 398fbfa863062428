"""Tokens of an identity provider, with a local issuer that rotates keys, lies, or is away."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from papaya.config.oidc import OidcConfig, OidcRole
from papaya.errors import ConfigError
from papaya.server import oidc
from papaya.server.admin.access import Caller
from papaya.server.oidc import AGAIN_S, USABLE_S, IssuerUnreachable, OidcProvider

FIRST = ec.generate_private_key(ec.SECP256R1())
SECOND = ec.generate_private_key(ec.SECP256R1())
STRANGER = ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)


def public(key_id: str, key: Any, **more: str) -> dict[str, Any]:
    algorithm = jwt.algorithms.ECAlgorithm if key is not RSA else jwt.algorithms.RSAAlgorithm
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": key_id, **more}


class Issuer:
    """A server on this machine. `answers` by path; a number is a status, bytes are sent as is."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[str] = []
        self.keys = [public("first", FIRST), public("rsa", RSA)]
        self.answers: dict[str, Any] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                answer = outer.answers.get(self.path, outer.answer(self.path))
                status = answer if isinstance(answer, int) else 200
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", outer.url + "/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                """No-op."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str) -> Any:
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        return {"keys": self.keys} if path in ("/keys", "/elsewhere") else 404

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An issuer that answers slowly on a busy machine must not count as unreachable."""
    monkeypatch.setattr(oidc, "_FETCH_S", 60.0)


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.close()


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


ROLES = {
    "fl-admins": OidcRole("operator"),
    "vision": OidcRole("owner", ("vision-",)),
    "speech": OidcRole("owner", ("speech-",)),
    "staff": OidcRole("viewer"),
}


def provider(issuer: Issuer, clock: Time | None = None, **changes: Any) -> OidcProvider:
    config = {"issuer": issuer.url, "audience": "papaya", "roles": ROLES, **changes}
    return OidcProvider(OidcConfig(**config), clock or Time())


def token(issuer: Issuer, key: Any = FIRST, kid: str = "first", alg: str = "ES256", **claims: Any):  # type: ignore[no-untyped-def]
    given = {
        "iss": issuer.url,
        "aud": "papaya",
        "sub": "anna@example.com",
        "groups": ["staff", "vision"],
        "exp": time.time() + 300,
        **claims,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return jwt.encode(given, key, algorithm=alg, headers={"kid": kid})


def verify(found: OidcProvider, given: str) -> Caller | None:
    return asyncio.run(found.verify(f"Bearer {given}"))


def test_a_token_gives_a_name_a_role_and_prefixes(issuer: Issuer) -> None:
    found = provider(issuer)
    anna = Caller("oidc:anna@example.com", "owner", ("vision-",))
    assert verify(found, token(issuer)) == anna
    assert verify(found, token(issuer, RSA, "rsa", "RS256")) == anna
    both = token(issuer, groups=["vision", "speech"])
    assert verify(found, both) == Caller(anna.name, "owner", ("vision-", "speech-"))
    assert verify(found, token(issuer, groups="fl-admins")) == Caller(anna.name, "operator")
    assert verify(found, token(issuer, groups=["staff"])) == Caller(anna.name, "viewer")
    assert issuer.asked == ["/.well-known/openid-configuration", "/keys"], "fetched once"


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": 1},
        {"exp": None},
        {"aud": "another"},
        {"aud": None},
        {"iss": "https://another.example.com"},
        {"nbf": 2**40},
        {"groups": ["unknown"]},
        {"groups": None},
        {"groups": {"vision": True}},
        {"groups": [["vision"], {"vision": True}, 1]},
        {"sub": None},
        {"sub": "a name with spaces"},
        {"sub": "x" * 200},
    ],
)
def test_claims_that_do_not_fit_are_refused(issuer: Issuer, claims: dict[str, Any]) -> None:
    assert verify(provider(issuer), token(issuer, **claims)) is None


def test_forged_signatures_are_refused(issuer: Issuer) -> None:
    found = provider(issuer)
    assert verify(found, token(issuer, STRANGER)) is None
    assert verify(found, token(issuer, STRANGER, "unknown")) is None
    head, body, signature = token(issuer).split(".")
    unsigned = urlsafe_b64encode(b'{"alg":"none","kid":"first"}').rstrip(b"=").decode()
    assert verify(found, f"{unsigned}.{body}.{signature}") is None
    assert verify(found, f"{unsigned}.{body}.AA") is None
    assert verify(found, f"{head}.{body}.{signature[:-4]}AAAA") is None
    # The public key as a shared secret.
    pem = FIRST.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    head = urlsafe_b64encode(b'{"alg":"HS256","kid":"first"}').rstrip(b"=").decode()
    mac = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    signed = urlsafe_b64encode(mac.sign(f"{head}.{body}".encode(), pem)).rstrip(b"=").decode()
    assert verify(found, f"{head}.{body}.{signed}") is None
    # A listed algorithm, with a key of the issuer that is for another one.
    for algorithm, kid in (("RS256", "first"), ("ES256", "rsa")):
        named = json.dumps({"alg": algorithm, "kid": kid}).encode()
        head = urlsafe_b64encode(named).rstrip(b"=").decode()
        assert verify(found, f"{head}.{body}.{signature}") is None
    # An algorithm that is not listed, although the key is the issuer's.
    assert verify(found, token(issuer, RSA, "rsa", "RS512")) is None
    assert verify(provider(issuer, algorithms=("RS256",)), token(issuer)) is None


@pytest.mark.parametrize("text", ["", "x", "a.b", "a.b.c", "." * 3, "e30.e30.e30", "a" * 9000])
def test_what_is_no_token_is_refused_without_asking_the_issuer(issuer: Issuer, text: str) -> None:
    assert verify(provider(issuer), text) is None
    assert issuer.asked == []


def test_the_address_of_the_keys_may_have_a_query(issuer: Issuer) -> None:
    """Some providers name a tenant or a policy there."""
    issuer.answers = {
        "/.well-known/openid-configuration": {
            "issuer": issuer.url,
            "jwks_uri": f"{issuer.url}/keys?policy=sign-in",
        },
        "/keys": {"keys": []},
        "/keys?policy=sign-in": {"keys": issuer.keys},
    }
    assert verify(provider(issuer), token(issuer)) is not None


@pytest.mark.parametrize(
    "broken",
    [
        {"kty": "EC", "crv": "P-256", "x": "AQEB" * 10 + "AQE", "y": "AQEB" * 10 + "AQE"},
        {"kty": []},
        7,
    ],
)
def test_a_broken_key_does_not_hide_the_others(issuer: Issuer, broken: Any) -> None:
    issuer.keys.insert(0, broken)
    assert verify(provider(issuer), token(issuer)) is not None


def test_a_stranger_does_not_make_others_wait_for_the_issuer(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, go_on = Time(), Event()
    found = provider(issuer, clock)

    async def run() -> None:
        assert await found.verify(f"Bearer {token(issuer)}") is not None
        clock.now += AGAIN_S
        monkeypatch.setattr(oidc, "_fetch_keys", lambda config, tls: go_on.wait(60) and {})
        stranger = asyncio.create_task(found.verify(f"Bearer {token(issuer, STRANGER, 'new')}"))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(60):
                assert await found.verify(f"Bearer {token(issuer)}") is not None
            assert not stranger.done()
        finally:
            go_on.set()
        assert await stranger is None

    asyncio.run(run())


def test_keys_of_a_slow_issuer_arrive_although_nobody_waited_so_long(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits ten seconds for its caller. The next one waits for the same keys."""
    found, asked, go_on = provider(issuer), Event(), Event()
    fetch = oidc._fetch_keys

    def slowly(config: OidcConfig, tls: ssl.SSLContext) -> dict[str, Any]:
        asked.set()
        assert go_on.wait(60)
        return fetch(config, tls)

    async def run() -> None:
        monkeypatch.setattr(oidc, "_fetch_keys", slowly)
        impatient = asyncio.create_task(found.verify(f"Bearer {token(issuer)}"))
        await asyncio.to_thread(asked.wait, 60)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        patient = asyncio.create_task(found.verify(f"Bearer {token(issuer)}"))
        await asyncio.sleep(0)
        go_on.set()
        assert await patient is not None

    asyncio.run(run())
    assert issuer.asked == ["/.well-known/openid-configuration", "/keys"], "fetched once"


def test_a_new_key_of_the_issuer_is_found(issuer: Issuer) -> None:
    clock = Time()
    found = provider(issuer, clock)
    assert verify(found, token(issuer)) is not None
    issuer.keys = [public("second", SECOND)]
    fresh = token(issuer, SECOND, "second")
    assert verify(found, fresh) is None, "the issuer is not asked for every unknown key"
    clock.now += AGAIN_S
    assert verify(found, fresh) is not None
    assert verify(found, token(issuer)) is None, "the old key is gone"


def test_an_issuer_that_is_away_costs_nothing_for_an_hour(issuer: Issuer) -> None:
    clock = Time()
    found = provider(issuer, clock)
    assert verify(found, token(issuer)) is not None
    issuer.answers = {"/.well-known/openid-configuration": 500}
    clock.now += USABLE_S - 1
    assert verify(found, token(issuer)) is not None
    clock.now += 1
    with pytest.raises(IssuerUnreachable):
        verify(found, token(issuer))


@pytest.mark.parametrize(
    "answers",
    [
        {"/keys": 302},
        {"/keys": b"[" * 100_000},
        {"/keys": b" " * 300_000 + b"{}"},
        {"/keys": b"\xff"},
        {"/keys": {"keys": None}},
        {"/.well-known/openid-configuration": {"issuer": "https://another", "jwks_uri": "x"}},
        {"/.well-known/openid-configuration": {}},
    ],
)
def test_answers_that_cannot_be_trusted_are_not_used(
    issuer: Issuer, answers: dict[str, Any]
) -> None:
    issuer.answers = answers
    with pytest.raises(IssuerUnreachable):
        verify(provider(issuer), token(issuer))
    assert "/elsewhere" not in issuer.asked, "redirects are not followed"


def test_a_shared_secret_among_the_keys_is_ignored(issuer: Issuer) -> None:
    issuer.keys = [
        {"kty": "oct", "kid": "first", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQ", "alg": "HS256"},
        {"kty": "strange", "kid": "other"},
        public("rsa", RSA, use="enc"),
    ]
    found = provider(issuer)
    assert verify(found, token(issuer)) is None
    assert verify(found, token(issuer, RSA, "rsa", "RS256")) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"issuer": "http://login.example.com"}, "oidc.issuer"),
        ({"jwks": "ftp://x"}, "oidc.jwks"),
        ({"audience": ""}, "oidc.audience"),
        ({"algorithms": ()}, "oidc.algorithms"),
        ({"roles": {"x": OidcRole("owner")}}, "oidc.roles.x"),
        ({"roles": {"x": OidcRole("viewer", ("a-",))}}, "oidc.roles.x"),
    ],
)
def test_a_table_that_cannot_work_is_refused(changes: dict[str, Any], field: str) -> None:
    config = {"issuer": "https://login.example.com", "audience": "papaya", "roles": ROLES}
    with pytest.raises(ConfigError, match=field):
        OidcConfig(**{**config, **changes})
