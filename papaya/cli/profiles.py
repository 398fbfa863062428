"""Where `papaya login` keeps the address, the certificate authority and the token of a server.

One JSON file in the user's configuration folder, readable by the user only, with any number of
profiles. A token is used only for the address that it was stored with, so that another address on
the command line never receives it.
"""

from __future__ import annotations

import os
import tempfile
from difflib import get_close_matches
from pathlib import Path

import msgspec

from papaya.credentials.token_files import read_private
from papaya.errors import OperatorError

PROFILE_VARIABLE = "PAPAYA_PROFILE"
DEFAULT_PROFILE = "default"
_MAX_FILE_BYTES = 1 << 20


class Profile(msgspec.Struct, frozen=True):
    """One server. `authority`: the PEM certificates to trust; empty means the system's."""

    admin: str
    token: str
    authority: str = ""


class Profiles(msgspec.Struct, frozen=True):
    """All profiles. `current`: the one that commands use; empty if there is none."""

    current: str = ""
    profiles: dict[str, Profile] = {}

    def named(self, name: str) -> Profile:
        if name in self.profiles:
            return self.profiles[name]
        close = get_close_matches(name, self.profiles, n=1)
        known = ", ".join(sorted(self.profiles)) or "none"
        hint = (
            f"did you mean {close[0]}?" if close else f"known profiles: {known}; papaya login URL"
        )
        raise OperatorError(f"there is no profile {name}", hint=hint)

    def chosen(self, name: str | None, admin: str | None) -> Profile | None:
        """The profile by its name, else the one of this address, else the current one."""
        name = name or os.environ.get(PROFILE_VARIABLE) or None
        if name is not None:
            found = self.named(name)
            if admin not in (None, found.admin):
                raise OperatorError(
                    f"profile {name} is for {found.admin}, not for {admin}",
                    hint="leave out --admin or --profile",
                )
            return found
        current = self.profiles.get(self.current)
        if admin is None or (current is not None and current.admin == admin):
            return current
        of_address = [profile for profile in self.profiles.values() if profile.admin == admin]
        return of_address[0] if of_address else None

    def with_profile(self, name: str, profile: Profile) -> Profiles:
        return Profiles(name, {**self.profiles, name: profile})

    def without(self, name: str) -> Profiles:
        left = {known: profile for known, profile in self.profiles.items() if known != name}
        current = self.current if self.current in left else next(iter(left), "")
        return Profiles(current, left)


def profiles_file() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "papaya" / "profiles.json"


def load() -> Profiles:
    path = profiles_file()
    if not path.exists():
        return Profiles()
    try:
        return msgspec.json.decode(read_private(path, _MAX_FILE_BYTES), type=Profiles)
    except msgspec.MsgspecError as error:
        raise OperatorError(
            f"cannot read {path}: {error}", hint=f"delete it and log in again: rm {path}"
        ) from error


def save(profiles: Profiles) -> Path:
    """Replace the file as a whole; nobody else can read it at any time."""
    path = profiles_file()
    data = msgspec.json.format(msgspec.json.encode(profiles), indent=2) + b"\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".profiles-")  # mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        raise OperatorError(
            f"cannot write {path}: {error.strerror}",
            hint="check its folder; XDG_CONFIG_HOME sets another one",
        ) from error
    return path
