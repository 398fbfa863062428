"""`papaya logout`: deletes a stored profile. The token itself stays valid; a revocation ends it."""

from __future__ import annotations

from dataclasses import dataclass

from papaya.cli.output import Commands, bind, note
from papaya.cli.profiles import Profiles, load, save


@dataclass(frozen=True, kw_only=True)
class LogoutOptions:
    profile: str | None = None
    all: bool = False


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "logout",
        description="Delete the address and the token that `papaya login` has stored. The token "
        "stays valid: to end it, an operator revokes it with `papaya account revoke NAME`.",
    )
    parser.add_argument(
        "--profile", metavar="NAME", help="profile to delete (default: the one in use)"
    )
    parser.add_argument("--all", action="store_true", help="delete all profiles")
    bind(parser, LogoutOptions, run)


def run(options: LogoutOptions) -> int:
    profiles = load()
    if options.all:
        left, gone = Profiles(), sorted(profiles.profiles)
    else:
        name = options.profile or profiles.current
        if name:
            profiles.named(name)
        left, gone = profiles.without(name), [name] if name else []
    if not gone:
        note("not logged in")
        return 0
    save(left)
    note(f"deleted {', '.join(gone)}" + (f"; now using {left.current}" if left.current else ""))
    return 0
