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
from papaya.config.oidc import OidcConfig
from papaya.config.server import ServerConfig
from papaya.config.upload_routes import UploadRoutes
from papaya.errors import ConfigError

_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._-]+)*/?")
_WEB = re.compile(r"https?://[A-Za-z0-9._\[\]:-]+(/[A-Za-z0-9._~-]+)*")
# Hosts that devices accept (`papaya/device/allowed_hosts.py`), in no more than 512 characters.
_UPLOAD_URL = re.compile(
    r"(?=.{1,512}\Z)(?P<scheme>https?)://"
    r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)(:(?P<port>[0-9]{1,5}))?",
    re.ASCII,
)
_HOOK = re.compile(
    r"(https://[A-Za-z0-9.-]+|http://127\.0\.0\.1)(:(?P<port>[0-9]{1,5}))?(/[!-~]*)?", re.ASCII
)
_EXTENSION = re.compile(
    r"(server_optimizers|aggregation_rules|staleness_functions):[a-z][a-z0-9_]{0,63}"
)
_MAX_PORT = 65_535
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")

TLS_SCHEME = "tls:"  # of a TSA on another machine

Role = Literal["coordinator", "selector", "aggregator"]
ROLES: tuple[Role, ...] = ("coordinator", "selector", "aggregator")


class Deployment(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Addresses are `host:port`; port 0 means any free port. Paths are relative to the file."""

    data: str = "papaya-data"
    state: str | None = None
    blobs: str = ""
    blobs_endpoint: str = ""
    blobs_region: str = ""
    blobs_credentials: str | None = None
    blobs_urls: str = "none"
    keep_deleted_s: float = 7 * 86400.0
    devices: str = "127.0.0.1:8750"
    admin: str = "127.0.0.1:8751"
    servers: str = "127.0.0.1:8752"
    announce: str | None = None
    upload_url: str = ""
    coordinators: tuple[str, ...] = ()
    device_tokens: str = "shared"
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_authority: str | None = None
    servers_certificate: str | None = None
    servers_key: str | None = None
    servers_authority: str | None = None
    servers_tls: bool = True
    tsa: str | tuple[str, ...] = ""
    tsa_platform: Literal["software", "sgx", "tdx"] = "software"
    tsa_collateral: str | None = None
    tsa_leaf: int = 0
    log: str | None = None
    fold_threads: int | None = None
    upload_memory_mb: int = 1024
    max_connections: int = 5_000
    max_connections_per_address: int | None = None
    proxies: tuple[str, ...] = ()
    upload_routes: dict[str, str] = {}
    drain_s: float = 10.0
    webhooks: tuple[str, ...] = ()
    webhook_key: str | None = None
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    oidc: OidcConfig | None = None
    extensions: tuple[str, ...] = ()
    server: ServerConfig = ServerConfig()

    def __post_init__(self) -> None:
        self._check_addresses()
        if self.state is not None:
            check_state_url(self.state)
        self._check_blobs()
        require(
            self.device_tokens in ("shared", "signed", "none")
            or re.fullmatch(r"[\w.]+:\w+", self.device_tokens) is not None,
            "device_tokens",
            self.device_tokens,
            "is not a known way to verify devices",
            "use shared, signed, none, or package.module:name of a verifier",
        )
        self._check_certificates()
        self._check_upload_url()
        self._check_upload_routes()
        self._check_tsas()
        self._check_webhooks()
        for extension in self.extensions:
            require(
                _EXTENSION.fullmatch(extension) is not None,
                "extensions",
                extension,
                "is not group:name of an extension",
                "groups are server_optimizers, aggregation_rules and staleness_functions, for "
                'example extensions = ["server_optimizers:lamb"]',
            )
        for field in ("upload_memory_mb", "max_connections"):
            require_count(field, getattr(self, field))
        for field in ("fold_threads", "max_connections_per_address"):
            if (count := getattr(self, field)) is not None:
                require_count(field, count)
        require_positive_s("drain_s", self.drain_s)

    def _check_addresses(self) -> None:
        for field in ("devices", "admin", "servers"):
            address(field, getattr(self, field))
        for coordinator in self.coordinators:
            address("coordinators", coordinator)
        if self.announce is not None:
            address("announce", self.announce)
        for proxy in self.proxies:
            require(
                _is_network(proxy),
                "proxies",
                proxy,
                "is not an IP address or network",
                'write addresses or networks, for example proxies = ["10.0.0.0/8"]',
            )

    def _check_certificates(self) -> None:
        require(
            (self.tls_certificate is None) == (self.tls_key is None),
            "tls_key",
            self.tls_key,
            "TLS needs a certificate and its key",
            "set tls_certificate and tls_key, or neither",
        )
        mutual = (self.servers_certificate, self.servers_key, self.servers_authority)
        require(
            None not in mutual or set(mutual) == {None},
            "servers_certificate",
            self.servers_certificate,
            "TLS between roles needs a certificate, its key and an authority",
            "set servers_certificate, servers_key and servers_authority, or none of them",
        )
        require(
            self.servers_tls or self.servers_certificate is None,
            "servers_tls",
            self.servers_tls,
            "certificates between roles need TLS between roles",
            "remove servers_tls = false, or servers_certificate, servers_key and servers_authority",
        )

    def _check_tsas(self) -> None:
        for tsa in self.tsa_addresses:
            self._check_tsa(tsa)
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

    @property
    def has_mutual_tls(self) -> bool:
        """Whether both sides of connections between roles show certificates."""
        return self.servers_certificate is not None

    @property
    def tsa_addresses(self) -> tuple[str, ...]:
        """Of the TSAs that run on their own; empty if this process starts one."""
        found = (self.tsa,) if isinstance(self.tsa, str) else self.tsa
        return tuple(address for address in found if address)

    def _check_upload_url(self) -> None:
        found = _UPLOAD_URL.fullmatch(self.upload_url)
        require(
            not self.upload_url or (found is not None and int(found["port"] or 0) <= _MAX_PORT),
            "upload_url",
            self.upload_url,
            "is not the URL of a server without a path",
            'write for example upload_url = "https://aggregator-1.example:8750"',
        )
        require(
            found is None or found["scheme"] == "https" or self.tls_certificate is None,
            "upload_url",
            self.upload_url,
            "devices would send their updates without TLS to a listener that has it",
            "write https://",
        )

    def _check_upload_routes(self) -> None:
        UploadRoutes(self.upload_routes)
        require(
            not self.upload_routes or self.tls_certificate is not None,
            "upload_routes",
            self.upload_routes,
            "needs TLS: the selector reads the aggregator's name from the device's TLS handshake",
            "set tls_certificate and tls_key, or remove upload_routes",
        )
        require(
            self.devices not in self.upload_routes.values(),
            "upload_routes",
            self.upload_routes,
            f"leads to this server itself, which listens on devices = {self.devices}",
            "write the addresses of aggregators",
        )

    def _check_webhooks(self) -> None:
        """The value is not quoted: a URL may contain a secret."""
        found = [_HOOK.fullmatch(url) for url in self.webhooks]
        if any(hook is None or int(hook["port"] or 0) > _MAX_PORT for hook in found):
            raise ConfigError(
                "webhooks: one of them is not an https URL",
                hint='write webhooks = ["https://host/path"]; http is accepted for 127.0.0.1 only',
            )
        require(
            not self.webhooks or self.webhook_key is not None,
            "webhook_key",
            self.webhook_key,
            "webhooks are signed, and need a key",
            "make a file that only you can read: head -c 32 /dev/urandom | od -An -vtx1 | "
            "tr -d ' \\n' > webhook.key",
        )

    def _check_tsa(self, tsa: str) -> None:
        if tsa.startswith(TLS_SCHEME):
            address("tsa", tsa.removeprefix(TLS_SCHEME))
            require(
                self.has_mutual_tls,
                "tsa",
                tsa,
                "a TSA on another machine is called with certificates only",
                "set servers_certificate, servers_key and servers_authority",
            )
        elif not tsa.startswith("unix:"):
            host = address("tsa", tsa.removeprefix("tcp:"))[0] if tsa.startswith("tcp:") else ""
            require(
                _is_network(host) and ip_network(host).is_loopback,
                "tsa",
                tsa,
                "is not the address of a TSA",
                "use unix:/path, tcp:127.0.0.1:port, or tls:host:port for another machine",
            )

    def _check_blobs(self) -> None:
        require(
            not self.blobs or _BUCKET.fullmatch(self.blobs) is not None,
            "blobs",
            _without_secrets(self.blobs),
            "is not a bucket with an optional prefix",
            'write blobs = "s3://bucket/prefix"; leave it out for a folder under data',
        )
        require(
            not self.blobs_endpoint or _WEB.fullmatch(self.blobs_endpoint) is not None,
            "blobs_endpoint",
            _without_secrets(self.blobs_endpoint),
            "is not the address of a store",
            'write for example blobs_endpoint = "https://minio.example.com:9000"',
        )
        require(
            self.blobs_urls in ("none", "signed") or _WEB.fullmatch(self.blobs_urls) is not None,
            "blobs_urls",
            self.blobs_urls,
            "is not a way to give devices URLs",
            "use none, signed, or the URL under which a CDN serves the folder public",
        )
        require(
            self.blobs_urls == "none" or bool(self.blobs),
            "blobs_urls",
            self.blobs_urls,
            "a folder of blobs has no URLs",
            'set blobs = "s3://bucket/prefix", or leave blobs_urls out',
        )
        require_positive_s("keep_deleted_s", self.keep_deleted_s)


def _without_secrets(url: str) -> str:
    """A URL for a message: someone may have written a key into it."""
    return re.sub(r"//.*@", "//…@", url)


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
