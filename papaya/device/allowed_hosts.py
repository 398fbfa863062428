"""The hosts that a server may send a device to, besides the selectors that its owner configured.

Without this list, a server could make a device send requests into its owner's network.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from papaya.errors import ConfigError

_ANY = "*."
_MAX_PORT = 65535
_ANY_PORT, _OWN_PORT = -1, -2
_WITH_PORT = re.compile(
    r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^:\[\]]+)):(?P<port>[0-9]{1,5}|\*)", re.ASCII
)
# Nothing that one library strips or decodes and another does not.
_URL = re.compile(r"[!-~]+", re.ASCII)
# Without `:` and `%`: an address with a zone, such as fe80::1%25x.example.org, has no ending.
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.ASCII)
# The last part of an IPv4 address, also in hexadecimal. No name of a host ends like this.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)


class AllowedHosts:
    """Names of hosts, each with a port.

    `*.example.org` stands for every name that ends with `.example.org`. A name may be followed by
    `:8750`, or by `:*` for every port. Without that, it allows the scheme's own port only: other
    services of the host must not get requests of devices.
    """

    def __init__(self, names: Collection[str] = (), *, any_port: bool = False) -> None:
        """`any_port`: a name without a port allows every port."""
        otherwise = _ANY_PORT if any_port else _OWN_PORT
        allowed = [_parsed(name.lower(), otherwise) for name in names]
        self._names = frozenset(each for each in allowed if not each.host.startswith(_ANY))
        self._endings = tuple(
            _Allowed(each.host.removeprefix("*"), each.port)
            for each in allowed
            if each.host.startswith(_ANY)
        )

    def __bool__(self) -> bool:
        return bool(self._names or self._endings)

    def checked(self, url: str, sent_by: str) -> SplitResult | None:
        """The parts of the URL, or None if the device must not use it.

        `sent_by`: the selector that the URL is from. If devices reach it over https, they use no
        other scheme elsewhere.
        """
        if _URL.fullmatch(url) is None:
            return None
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            return None
        is_secure = parts.scheme == "https"
        may_be_plain = parts.scheme == "http" and sent_by.startswith("http://")
        if not (is_secure or may_be_plain):
            return None
        own_port = 443 if is_secure else 80
        if not self._allows(host, own_port if port is None else port, own_port):
            return None
        return None if parts.username is not None or parts.fragment else parts

    def _allows(self, host: str, port: int, own_port: int) -> bool:
        ports = (port, _ANY_PORT, *((_OWN_PORT,) if port == own_port else ()))
        if any(_Allowed(host, each) in self._names for each in ports):
            return True
        return _NAME.fullmatch(host) is not None and any(
            host.endswith(ending) and allowed in ports for ending, allowed in self._endings
        )

    def allows_upload(self, url: str, sent_by: str) -> bool:
        """Is this an `upload_url` that the device may use? Nothing follows its host and port."""
        parts = self.checked(url, sent_by)
        return parts is not None and url == f"{parts.scheme}://{parts.netloc}"


class _Allowed(NamedTuple):
    """`host`: a name, or what a name must end with. `port`: a number, `_ANY_PORT`, `_OWN_PORT`."""

    host: str
    port: int


def _parsed(name: str, otherwise: int) -> _Allowed:
    """`otherwise`: the port if the name has none."""
    found = _WITH_PORT.fullmatch(name)
    host, port = name, otherwise
    if found is not None:
        host = found["address"] or found["name"]
        port = _ANY_PORT if found["port"] == "*" else int(found["port"])
    try:
        if _NAME.fullmatch(host.removeprefix(_ANY)) is None:
            ip_address(host)
        if host.startswith(_ANY) and _NUMBER.fullmatch(host.rpartition(".")[2]):
            raise ValueError  # it would allow addresses
        if port > _MAX_PORT or (found is not None and port == 0):
            raise ValueError
    except ValueError:
        raise ConfigError.of(
            "host",
            name,
            "is not the name of a host",
            "write uploads.example.org or *.example.org, with another port uploads.example.org:8750"
            " (an IPv6 address: [::1]:8750), without https://",
        ) from None
    return _Allowed(host, port)
