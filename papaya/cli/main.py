"""`papaya`: finds the command, runs it, and turns errors into help and an exit code.

Each command is a module of this package with a function `add_to(commands)`. Only the one that was
asked for is imported, so that `papaya --help` and short commands are there at once.

An error that Papaya raises on purpose is printed as `error: …`, a blank line and `hint: …`, and its
class gives the exit code (see `papaya/errors.py`). Anything else is a bug and keeps its traceback.
Ctrl-C exits with 130.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, NoReturn

from papaya import __version__
from papaya.cli.output import silence_stdout
from papaya.errors import OperatorError, PapayaError

# In the order of `papaya --help`. `name` is the module papaya.cli.<name>, or of a large command
# papaya.cli.<name>.<name>.
COMMANDS: Final = {
    "demo": "a server and devices that train a model, here, in a minute",
    "serve": "run the servers: all roles in one process, or one alone",
    "task": "submit, watch and steer tasks",
    "status": "the servers and tasks of a running system",
    "client": "run devices that train for a server",
    "token": "make a token for a device, or see where tokens are kept",
    "compare": "compare AsyncFL with SyncFL on a simulated fleet",
    "simulate": "run a simulated fleet, learn on it, and report",
    "sweep": "learn under many settings and compare them",
    "reproduce": "the paper's figures and tables, its numbers beside ours",
    "swarm": "check the protocol under random faults, seed by seed",
    "tsa": "build the TSA binary, or measure it",
    "log": "the verifiable log of TSA binaries",
    "audit": "check a log of TSA binaries, and rebuild what it names",
}
_LARGE: Final = ("client", "demo", "log", "simulate", "task")
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class CommandParser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise OperatorError(message, hint=f"{self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        command = arguments[0] if arguments else ""
        options, unknown = _parser(command).parse_known_args(arguments)
        if unknown:
            of = f"papaya {command}" if command in COMMANDS else "papaya"
            raise OperatorError(f"unknown: {' '.join(unknown)}", hint=f"{of} --help")
        run = options.run
        return int(run(options))
    except PapayaError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # `papaya … | head`: whoever read has enough
        silence_stdout()
        return _BROKEN_PIPE


def _parser(command: str) -> CommandParser:
    """With the options of this command; of the others, only what `papaya --help` shows."""
    parser = CommandParser(
        prog="papaya",
        description="Federated learning, asynchronous and synchronous: servers and devices.",
    )
    parser.add_argument("--version", action="version", version=f"papaya {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        if name == command:
            module = f"{name}.{name}" if name in _LARGE else name
            import_module(f"papaya.cli.{module}").add_to(commands)
        else:
            commands.add_parser(name, help=words)
    return parser
