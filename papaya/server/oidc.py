"""Tokens of an identity provider (OpenID Connect), verified with PyJWT.

    issuer ── /.well-known/openid-configuration ──▶ jwks_uri ── keys ──▶ verify(token)

Refused: another issuer or audience, an expired token or one without expiry, an algorithm that is
not listed (so neither `none` nor a public key used as a shared secret), a key that the issuer does
not publish, a role claim without a known value. Of several values the strongest role counts; the
prefixes of all values that make an owner add up.

Keys are fetched with limits: one at a time, 5 s, 256 KiB, no redirects, JSON only. They are used
for ten minutes, or for an hour while the issuer cannot be reached. If a token has an unknown key
id, they are fetched again, at most every 30 s, so that a rotation is noticed and a stranger cannot
use this server to flood the issuer. Users whose key is known do not wait for this.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final
from urllib.parse import urlsplit

import jwt
import msgspec

from papaya.config.oidc import OidcConfig
from papaya.errors import OperatorError
from papaya.server.admin.access import Caller
from papaya.server.admin.accounts import PROVIDED
from papaya.server.crew import on_thread

logger = logging.getLogger("papaya.auth")

FRESH_S: Final = 600.0
USABLE_S: Final = 3600.0
AGAIN_S: Final = 30.0
_FETCH_S = 5.0
_MAX_BYTES = 256 << 10
_MAX_TOKEN_CHARS = 8192
_LEEWAY_S = 30
_TOKEN = re.compile(r"(?i:bearer) ([A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+)")
_NAME = re.compile(r"[\x21-\x7e]{1,128}")


class IssuerUnreachable(OperatorError):
    """The keys of the issuer are not known and cannot be fetched; the caller is not at fault."""


class OidcProvider:
    """Verifies tokens of one issuer. Use it on one event loop."""

    def __init__(self, config: OidcConfig, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._monotonic = monotonic
        self._tls = _context(config.authority)
        self._keys: dict[str, Any] = {}
        self._fetched_at = -USABLE_S
        self._tried_at = -AGAIN_S
        self._fetching = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None  # fetches the keys

    async def verify(self, authorization: str | None) -> Caller | None:
        found = _TOKEN.fullmatch(authorization or "")
        if found is None or len(found[1]) > _MAX_TOKEN_CHARS:
            return None
        token = found[1]
        try:
            head = jwt.get_unverified_header(token)
            if head.get("alg") not in self._config.algorithms:
                return None
            key = await self._key(str(head.get("kid", "")))
            if key is None:
                return None
            claims = jwt.decode(
                token,
                key.key,
                algorithms=list(self._config.algorithms),
                audience=self._config.audience,
                issuer=self._config.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except (jwt.PyJWTError, TypeError) as error:  # TypeError: `alg` is not that of the key
            logger.info("a token of the identity provider is refused: %s", type(error).__name__)
            return None
        return self._caller(claims)

    def _caller(self, claims: dict[str, Any]) -> Caller | None:
        name, values = claims.get(self._config.name_claim), claims.get(self._config.role_claim)
        values = [values] if isinstance(values, str) else values
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            return None
        if not isinstance(values, list):
            return None
        given = [
            self._config.roles[v] for v in values if isinstance(v, str) and v in self._config.roles
        ]
        roles = {role.role for role in given}
        if "operator" in roles:
            return Caller(PROVIDED + name, "operator")
        if "owner" in roles:
            prefixes = tuple(dict.fromkeys(p for role in given for p in role.prefixes))
            return Caller(PROVIDED + name, "owner", prefixes)
        return Caller(PROVIDED + name, "viewer") if roles else None

    async def _key(self, key_id: str) -> Any:
        """The issuer's key; None if it has no such key."""
        known = self._keys.get(key_id)
        if known is not None and self._age_s < (FRESH_S if self._may_ask else USABLE_S):
            return known
        async with self._fetching:
            is_wanted = self._age_s >= FRESH_S or key_id not in self._keys
            if self._refreshing is None and self._may_ask and is_wanted:
                self._tried_at = self._monotonic()
                self._refreshing = asyncio.create_task(self._refresh())
            if self._refreshing is not None:
                # The request may give up before a slow issuer answers; the keys come all the same.
                await asyncio.shield(self._refreshing)
            if self._age_s >= USABLE_S:
                raise IssuerUnreachable(
                    f"the keys of {self._config.issuer} cannot be fetched",
                    hint="check that this server can reach the issuer",
                )
            return self._keys.get(key_id)

    @property
    def _age_s(self) -> float:
        return self._monotonic() - self._fetched_at

    @property
    def _may_ask(self) -> bool:
        return self._monotonic() - self._tried_at >= AGAIN_S

    async def _refresh(self) -> None:
        try:
            keys = await on_thread(_fetch_keys, self._config, self._tls)
        except (OSError, HTTPException, ValueError, msgspec.MsgspecError, OperatorError) as error:
            logger.warning("cannot fetch the keys of %s: %s", self._config.issuer, error)
        else:
            self._keys, self._fetched_at = keys, self._monotonic()
        finally:
            self._refreshing = None


def _fetch_keys(config: OidcConfig, tls: ssl.SSLContext) -> dict[str, Any]:
    url = config.jwks
    if not url:
        found = _fetch(config.issuer.rstrip("/") + "/.well-known/openid-configuration", tls)
        if found.get("issuer") != config.issuer:
            raise OperatorError("the issuer's configuration names another issuer", hint="")
        url = str(found.get("jwks_uri", ""))
        if urlsplit(url).scheme != urlsplit(config.issuer).scheme:
            raise OperatorError("the issuer's keys have another scheme than the issuer", hint="")
    keys = {}
    entries = _fetch(url, tls).get("keys")
    if not isinstance(entries, list):
        raise OperatorError(f"the answer of {url} has no list of keys", hint="")
    for entry in entries:
        # A shared secret among the keys would let everybody who can read them sign tokens.
        if isinstance(entry, dict) and entry.get("kty") != "oct" and entry.get("use") != "enc":
            try:
                keys[str(entry.get("kid", ""))] = jwt.PyJWK(entry)
            except jwt.PyJWTError:
                continue  # of a kind that this library does not know
    return keys


def _context(authority: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority)
    except (OSError, ssl.SSLError) as error:
        raise OperatorError(
            f"oidc.authority {authority} cannot be used: {error}",
            hint="use a PEM file of the authority that signed the issuer's certificate",
        ) from error


def _fetch(url: str, tls: ssl.SSLContext) -> dict[str, Any]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection = HTTPConnection(host, parts.port, timeout=_FETCH_S)
    if parts.scheme == "https":
        connection = HTTPSConnection(host, parts.port, timeout=_FETCH_S, context=tls)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", target, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise OperatorError(f"{url} answered with status {answer.status}", hint="")
        data = answer.read(_MAX_BYTES + 1)
    finally:
        connection.close()
    if len(data) > _MAX_BYTES:
        raise OperatorError(f"the answer of {url} is longer than {_MAX_BYTES:,} bytes", hint="")
    return msgspec.json.decode(data, type=dict[str, Any])
