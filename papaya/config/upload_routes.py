"""Maps the host that a device asks for in TLS to an aggregator: `upload_routes` of selectors.

    "aggregator-1.uploads.example" = "10.0.0.21:8750"
    "*.uploads.example" = "*.aggregators.internal:8750"

`*` matches one label, which is the same on both sides. An exact name takes precedence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address

from papaya.config.checks import require

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*", re.ASCII | re.IGNORECASE)
_FREE_LABEL = re.compile(_LABEL, re.ASCII)
_TARGET = re.compile(
    r"(\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<host>[^\[\]:]+)):(?P<port>[0-9]{1,5})", re.ASCII
)
_STAR = "*."
_WITH_STAR = '"*.uploads.example" = "*.aggregators.internal:8750"'

_Target = tuple[str, int]


class UploadRoutes:
    """The parsed routes. Raises ConfigError if a name or an address is invalid."""

    def __init__(self, routes: Mapping[str, str]) -> None:
        self._exact: dict[str, _Target] = {}
        self._endings: dict[str, _Target] = {}  # what follows `*.` on both sides
        for name, target in routes.items():
            _check_name(name)
            host, port = _parsed(name, target)
            if name.startswith(_STAR):
                self._endings[name.removeprefix(_STAR)] = (host.removeprefix(_STAR), port)
            else:
                self._exact[name] = (host, port)

    def find(self, name: str) -> _Target | None:
        """Host and port of the aggregator with this name, which is in lower case."""
        if (exact := self._exact.get(name)) is not None:
            return exact
        label, _, ending = name.partition(".")
        found = self._endings.get(ending)
        if found is None or _FREE_LABEL.fullmatch(label) is None:
            return None
        return f"{label}.{found[0]}", found[1]


def _is_host(text: str) -> bool:
    """A host name, and neither an IP address nor a number that is read as one."""
    return _HOST.fullmatch(text) is not None and not text.rpartition(".")[2].isdigit()


def _check_name(name: str) -> None:
    require(
        _is_host(name.removeprefix(_STAR)) and name == name.lower(),
        "upload_routes",
        name,
        "is not a host name in lower case, without scheme and port; only its first part may be *",
        f"write the host of the aggregator's upload_url, for example {_WITH_STAR}",
    )


def _parsed(name: str, target: str) -> _Target:
    setting = f"upload_routes[{name!r}]"
    found = _TARGET.fullmatch(target)
    host, port = ("", 0) if found is None else (found["host"] or found["ipv6"], int(found["port"]))
    if found is not None and found["ipv6"] is not None:
        is_address = _is_ip(host, 6)
    else:  # a dot at the end of a name keeps resolvers from trying their search domains
        is_address = _is_host(host.removeprefix(_STAR).removesuffix(".")) or _is_ip(host, 4)
    require(
        is_address and 0 < port <= 65_535,
        setting,
        target,
        "is not host:port with a port from 1 to 65535",
        "write the address of the aggregator's listener `devices`, for example "
        '"10.0.0.21:8750", "[2001:db8::21]:8750" or "*.aggregators.internal:8750"',
    )
    require(
        name.startswith(_STAR) == host.startswith(_STAR),
        setting,
        target,
        "use * in both the name and the address, or in neither",
        f"each name must lead to one aggregator, for example {_WITH_STAR}",
    )
    return host, port


def _is_ip(text: str, version: int) -> bool:
    try:
        return ip_address(text).version == version
    except ValueError:
        return False
