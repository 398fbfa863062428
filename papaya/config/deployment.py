"""How one installation runs: addresses, the data folder, tokens, TLS and limits.

Every field has a default that works on one machine, so `papaya serve` needs no configuration. A
TOML file can set any field; unknown fields are refused, so that a misspelt name is noticed.
Settings of the protocol are in `ServerConfig`, under `[server]`.
"""

from __future__ import annotations

import re
from ipaddress import ip_network
from typing import Literal

from msgspec import Struct

from papaya.config.checks import require, require_count, require_positive_s
from papaya.config.server import ServerConfig
from papaya.errors import ConfigError

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")

Role = Literal["coordinator", "selector", "aggregator"]
ROLES: tuple[Role, ...] = ("coordinator", "selector", "aggregator")


class Deployment(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Addresses are `host:port`; port 0 means any free port. Paths are relative to the file."""

    data: str = "papaya-data"
    state: str | None = None
    devices: str = "127.0.0.1:8750"
    admin: str = "127.0.0.1:8751"
    servers: str = "127.0.0.1:8752"
    coordinators: tuple[str, ...] = ()
    device_tokens: str = "shared"
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_authority: str | None = None
    tsa: str = ""
    tsa_platform: Literal["software", "sgx", "tdx"] = "software"
    tsa_collateral: str | None = None
    tsa_leaf: int = 0
    log: str | None = None
    fold_threads: int = 2
    upload_memory_mb: int = 1024
    max_connections: int = 5_000
    max_connections_per_address: int = 1_000
    proxies: tuple[str, ...] = ()
    drain_s: float = 10.0
    server: ServerConfig = ServerConfig()

    def __post_init__(self) -> None:
        for field in ("devices", "admin", "servers"):
            address(field, getattr(self, field))
        for coordinator in self.coordinators:
            address("coordinators", coordinator)
        if self.state is not None:
            check_state_url(self.state)
        require(
            self.device_tokens in ("shared", "signed", "none")
            or re.fullmatch(r"[\w.]+:\w+", self.device_tokens) is not None,
            "device_tokens",
            self.device_tokens,
            "is not a known way to verify devices",
            "use shared, signed, none, or package.module:name of a verifier",
        )
        require(
            (self.tls_certificate is None) == (self.tls_key is None),
            "tls_key",
            self.tls_key,
            "TLS needs a certificate and its key",
            "set tls_certificate and tls_key, or neither",
        )
        require(
            self.tsa_platform == "software" or bool(self.tsa),
            "tsa",
            self.tsa,
            f"a TSA on {self.tsa_platform} cannot run as a child of this process",
            'set its address, for example tsa = "unix:/run/papaya/tsa.sock"',
        )
        require(
            self.tsa_platform == "software" or self.tsa_collateral is not None,
            "tsa_collateral",
            self.tsa_collateral,
            f"quotes of {self.tsa_platform} need the vendor's collateral",
            "set the path of the JSON file that your collateral service keeps up to date",
        )
        for proxy in self.proxies:
            require(
                _is_network(proxy),
                "proxies",
                proxy,
                "is not an IP address or network",
                'write addresses or networks, for example proxies = ["10.0.0.0/8"]',
            )
        for field in (
            "fold_threads",
            "upload_memory_mb",
            "max_connections",
            "max_connections_per_address",
        ):
            require_count(field, getattr(self, field))
        require_positive_s("drain_s", self.drain_s)


def check_state_url(url: str) -> None:
    """The URL is never quoted: it may contain a password, which is refused."""
    if re.match(r"postgres(ql)?://", url) is None:
        raise ConfigError(
            "state is not a URL of PostgreSQL",
            hint='write state = "postgresql://user@host/database", or leave it out to use SQLite',
        )
    if re.match(r"[^:]+://[^/?#]*:[^/?#]*@", url) or re.search(r"[?&](ssl)?password=", url):
        raise ConfigError(
            "state has a password in it",
            hint="put host:port:database:user:password into a file that only you can read, and its "
            "path into the URL: ?passfile=/path (or set PGPASSFILE or PGPASSWORD)",
        )


def _is_network(text: str) -> bool:
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def address(field: str, text: str) -> tuple[str, int]:
    """Split `host:port` into host and port."""
    found = _ADDRESS.fullmatch(text)
    port = int(found["port"]) if found is not None else 65536
    require(
        found is not None and port < 65536,
        field,
        text,
        "is not an address",
        f'write host:port, for example {field} = "127.0.0.1:8750"',
    )
    assert found is not None
    return found["host"].strip("[]"), port
