"""The hosts that a server may send a device to, besides the selectors that its owner configured.

Without this list, a server could make a device send requests into its owner's network.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from papaya.errors import ConfigError

_ANY = "*."
# Nothing that one library strips or decodes and another does not.
_URL = re.compile(r"[!-~]+", re.ASCII)
# Without `:` and `%`: an address with a zone, such as fe80::1%25x.example.org, has no ending.
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.ASCII)


class AllowedHosts:
    """Names of hosts. `*.example.org` stands for every name that ends with `.example.org`."""

    def __init__(self, names: Collection[str] = ()) -> None:
        lower = [name.lower() for name in names]
        for name in lower:
            _check(name)
        self._names = frozenset(name for name in lower if not name.startswith(_ANY))
        self._endings = tuple(name.removeprefix("*") for name in lower if name.startswith(_ANY))

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
            host, _ = parts.hostname or "", parts.port
        except ValueError:
            return None
        is_secure = parts.scheme == "https"
        may_be_plain = parts.scheme == "http" and sent_by.startswith("http://")
        if not (is_secure or may_be_plain) or not self._allows(host):
            return None
        return None if parts.username is not None or parts.fragment else parts

    def _allows(self, host: str) -> bool:
        has_ending = host.endswith(self._endings) and _NAME.fullmatch(host) is not None
        return host in self._names or has_ending

    def allows_upload(self, url: str, sent_by: str) -> bool:
        """Is this an `upload_url` that the device may use? Nothing follows its host and port."""
        parts = self.checked(url, sent_by)
        return parts is not None and url == f"{parts.scheme}://{parts.netloc}"


def _check(name: str) -> None:
    try:
        if _NAME.fullmatch(name.removeprefix(_ANY)) is None:
            ip_address(name)
    except ValueError:
        raise ConfigError.of(
            "host",
            name,
            "is not the name of a host",
            "write uploads.example.org or *.example.org, without https:// and port",
        ) from None
