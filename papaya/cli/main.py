"""`papaya`: finds the command, runs it, and turns errors into help and an exit code.

Each command is a module of this package with a function `add_to(commands)`. Only the module of the
given command is imported, so that `papaya --help` and short commands start fast.

An error that Papaya raises on purpose is printed as `error: …`, a blank line and `hint: …`, and its
class gives the exit code (see `papaya/errors.py`). Anything else is a bug and keeps its traceback.
Ctrl-C exits with 130, and SIGTERM with 143 where work can be resumed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Container, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Final, NoReturn

from papaya import __version__
from papaya.cli.output import Terminated, note, silence_stdout
from papaya.errors import OperatorError, PapayaError

# In the order of `papaya --help`. The module of a command is papaya.cli.<name>; that of a large
# command is papaya.cli.<name>.<name>.
COMMANDS: Final = {
    "demo": ("train a model for about a minute, with a server and devices on this machine"),
    "serve": "run the servers: all roles in one process, or one role",
    "login": "store the address and the token of a server, for all other commands",
    "logout": "delete what `papaya login` has stored",
    "whoami": "show your account: role, tasks and quota",
    "task": "submit, watch and control tasks",
    "owner": "create and show the key with which you sign tasks",
    "status": "show the servers, tasks and problems of a running system",
    "maintenance": "stop all training of a running system, and resume it",
    "keys": "replace a key after a leak",
    "audit-trail": "show, export and check who changed what, when and why",
    "account": "create and revoke accounts with roles and quotas",
    "doctor": "check an installation and say what to do about each problem",
    "client": "run devices that train for a server",
    "load": "load-test running servers with devices that do not train",
    "store": "back up, restore or move the data of a cluster",
    "token": "create or revoke the token of a device, or list the token files",
    "simulate": "run the servers with a simulated fleet, and train your model on it",
    "sweep": "train with many settings on a simulated fleet and compare them",
    "reproduce": "reproduce the paper's figures and tables in the simulator",
    "swarm": "test the protocol in simulated systems with random faults",
    "conformance": "test a client of your own against the protocol, and write test vectors",
    "tsa": "build the TSA binary, or print its hash",
    "log": "write, show and check the public log of TSA binaries",
    "audit": "check a public log and rebuild the TSA binaries in it",
    "completion": "print the completion script of a shell",
}
_LARGE: Final = ("client", "demo", "log", "simulate", "task")
_INTERRUPTED = 130
_TERMINATED = 143
_BROKEN_PIPE = 141

_CHOICE = re.compile(r"invalid choice: '(.+?)' \(choose from (.+)\)")
_QUOTED = re.compile(r"'(.+?)'")


class CommandParser(argparse.ArgumentParser):
    """Raises an error about the arguments, so that `main` prints all errors in one form."""

    def error(self, message: str) -> NoReturn:
        given = _CHOICE.search(message)
        close = get_close_matches(given[1], _QUOTED.findall(given[2]), n=1) if given else []
        meant = f"did you mean {close[0]}? " if close else ""
        raise OperatorError(message, hint=f"{meant}{self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        command = arguments[0] if arguments else ""
        options, unknown = parser_for((command,)).parse_known_args(arguments)
        if unknown:
            of = f"papaya {command}" if command in COMMANDS else "papaya"
            raise OperatorError(f"unrecognized arguments: {' '.join(unknown)}", hint=f"{of} --help")
        run = options.run
        return int(run(options))
    except PapayaError as error:
        note(f"error: {error}")
        if error.hint:
            note(f"\nhint: {error.hint}")
        return error.exit_code
    except Terminated:
        note("terminated")
        return _TERMINATED
    except KeyboardInterrupt:
        note("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:  # as in `papaya … | head`
        silence_stdout()
        return _BROKEN_PIPE


def parser_for(wanted: Container[str]) -> CommandParser:
    """The parser with the options of these commands; others have only a line in the help."""
    parser = CommandParser(
        prog="papaya",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=30),
        description="Asynchronous and synchronous federated learning: servers, devices, simulator.",
    )
    parser.add_argument("--version", action="version", version=f"papaya {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        if name in wanted:
            module = f"{name}.{name}" if name in _LARGE else name
            import_module(f"papaya.cli.{module.replace('-', '_')}").add_to(commands)
        else:
            commands.add_parser(name, help=words)
    return parser
