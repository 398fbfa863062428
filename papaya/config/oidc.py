"""Whom an identity provider may let into the admin API: the table [oidc] of the server's file."""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from papaya.config.checks import require

Algorithm = Literal["RS256", "RS384", "RS512", "ES256", "ES384", "PS256", "EdDSA"]
_URL = re.compile(r"https://[A-Za-z0-9._:-]+(/[A-Za-z0-9._~/-]*)?")
_LOCAL = re.compile(r"http://(127\.0\.0\.1|localhost)(:[0-9]+)?(/[A-Za-z0-9._~/-]*)?")
_PREFIX = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class OidcRole(Struct, frozen=True, forbid_unknown_fields=True):
    """What a value of the role claim allows. Only owners have `prefixes`."""

    role: Literal["viewer", "owner", "operator"]
    prefixes: tuple[str, ...] = ()


class OidcConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bearer tokens of one issuer. Only algorithms with a public key can be listed."""

    issuer: str
    audience: str
    roles: dict[str, OidcRole]
    jwks: str = ""
    name_claim: str = "sub"
    role_claim: str = "groups"
    algorithms: tuple[Algorithm, ...] = ("RS256", "ES256")
    authority: str | None = None

    def __post_init__(self) -> None:
        for field, url in (("issuer", self.issuer), ("jwks", self.jwks or self.issuer)):
            require(
                _URL.fullmatch(url) is not None or _LOCAL.fullmatch(url) is not None,
                f"oidc.{field}",
                url,
                "is not an https address",
                'write for example issuer = "https://login.example.com"',
            )
        for field in ("audience", "name_claim", "role_claim"):
            value = getattr(self, field)
            require(bool(value), f"oidc.{field}", value, "must not be empty", f"set {field}")
        require(
            bool(self.algorithms),
            "oidc.algorithms",
            self.algorithms,
            "must not be empty",
            "leave it out for RS256 and ES256",
        )
        for value, given in self.roles.items():
            is_right = (given.role == "owner") == bool(given.prefixes) and all(
                _PREFIX.fullmatch(prefix) for prefix in given.prefixes
            )
            require(
                is_right,
                f"oidc.roles.{value}",
                given.prefixes,
                f"{given.role} with these prefixes",
                'an owner needs prefixes = ["vision-"], other roles have none',
            )
