"""`papaya login`: checks a token and stores it with the address of its server.

The token is read from a file, from PAPAYA_ADMIN_TOKEN, from stdin, or asked for without showing it.
It is never an argument: other users can see the arguments of a command.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from getpass import getpass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from papaya.cli.admin_client import (
    DEFAULT_TOKEN_FILE,
    DEFAULT_URL,
    TOKEN_VARIABLE,
    AdminClient,
    authority_file,
    checked_token,
    given_token,
)
from papaya.cli.output import (
    Commands,
    FormatOptions,
    add_format,
    bind,
    note,
    print_data,
    print_json,
)
from papaya.cli.profiles import DEFAULT_PROFILE, Profile, load, profiles_file, save
from papaya.cli.whoami import described
from papaya.server.admin.views import AccountView

_STDIN = Path("-")


@dataclass(frozen=True, kw_only=True)
class LoginOptions(FormatOptions):
    url: str = DEFAULT_URL
    token_file: Path | None = None
    ca: str | None = None
    profile: str = DEFAULT_PROFILE


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "login",
        description="Check a token and store it with the address of its server, so that other "
        f"commands need no options. The file is {profiles_file()}; only you can read it.",
    )
    parser.add_argument(
        "url",
        nargs="?",
        default=DEFAULT_URL,
        metavar="URL",
        help="address of the admin API, as `papaya serve` prints it",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token; - asks for it, or reads it from stdin (default: "
        f"${TOKEN_VARIABLE} if it is set, else {DEFAULT_TOKEN_FILE} for {DEFAULT_URL}, else -)",
    )
    parser.add_argument(
        "--ca",
        metavar="FILE",
        help="PEM file of the certificate authority to trust for https; its content is stored "
        "(default: the system's authorities)",
    )
    parser.add_argument(
        "--profile", metavar="NAME", help="profile to store it in, if you use several servers"
    )
    add_format(parser)
    bind(parser, LoginOptions, run)


def run(options: LoginOptions) -> int:
    token, authority = _token(options), authority_file(options.ca)
    account = AdminClient(options.url, token, authority).get("/admin/whoami", AccountView)
    if _crosses_a_network(options.url):
        note(f"warning: {options.url} is not https: others on the network can read the token")
    profile = Profile(options.url, token, authority)
    path = save(load().with_profile(options.profile, profile))
    if options.is_json:
        print_json(account)
    else:
        print_data(described(account))
    note(f"logged in to {options.url}; stored as profile {options.profile} in {path}")
    return 0


def _token(options: LoginOptions) -> str:
    is_asked = options.token_file == _STDIN
    is_local = options.url == DEFAULT_URL and DEFAULT_TOKEN_FILE.exists()
    is_given = options.token_file is not None or bool(os.environ.get(TOKEN_VARIABLE))
    if not is_asked and (is_given or is_local):
        if not is_given:
            note(
                f"using the token in {DEFAULT_TOKEN_FILE}; for another one: --token-file FILE or -"
            )
        return given_token(options.token_file)
    typed = "typed text" if sys.stdin.isatty() else "stdin"
    given = getpass("Token: ") if sys.stdin.isatty() else sys.stdin.readline()
    return checked_token(given.strip(), typed)


def _crosses_a_network(url: str) -> bool:
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        is_here = ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return parts.scheme == "http" and not is_here
