"""The hosts that a server may send a device to, besides the selectors that its owner configured.

Without this list, a server could make a device send requests into its owner's network.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

_ANY = "*."


class AllowedHosts:
    """Names of hosts. `*.example.org` stands for every name that ends with `.example.org`."""

    def __init__(self, names: Collection[str] = ()) -> None:
        lower = [name.lower() for name in names]
        self._names = frozenset(name for name in lower if not name.startswith(_ANY))
        self._endings = tuple(name.removeprefix("*") for name in lower if name.startswith(_ANY))

    def __bool__(self) -> bool:
        return bool(self._names or self._endings)

    def checked(self, url: str, sent_by: str) -> SplitResult | None:
        """The parts of the URL, or None if the device must not use it.

        `sent_by`: the selector that the URL is from. If devices reach it over https, they use no
        other scheme elsewhere.
        """
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname or "", parts.port
        except ValueError:
            return None
        is_secure = parts.scheme == "https"
        may_be_plain = parts.scheme == "http" and sent_by.startswith("http://")
        is_allowed = host in self._names or host.endswith(self._endings)
        if not (is_secure or may_be_plain) or not is_allowed:
            return None
        return None if parts.username is not None or parts.fragment else parts

    def allows_upload(self, url: str, sent_by: str) -> bool:
        """Is this an `upload_url` that the device may use? It has no path and no query."""
        parts = self.checked(url, sent_by)
        return parts is not None and not (parts.path or parts.query)
