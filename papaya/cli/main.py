"""`papaya`: finds the command, runs it, and turns errors into help and an exit code.

An error that Papaya raises on purpose is printed as `error: …`, a blank line and `hint: …`, and its
class gives the exit code (see `papaya/errors.py`). Anything else is a bug and keeps its traceback.
Ctrl-C exits with 130.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from papaya import __version__
from papaya.cli import (
    audit,
    client,
    compare,
    demo,
    log,
    serve,
    simulate,
    status,
    swarm,
    task,
    token,
    tsa,
)
from papaya.cli.output import silence_stdout
from papaya.errors import OperatorError, PapayaError

_INTERRUPTED = 130
_BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise OperatorError(message, hint=f"{self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = _parser().parse_args(arguments)
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


def _parser() -> Parser:
    parser = Parser(
        prog="papaya",
        description="Federated learning, asynchronous and synchronous: servers and devices.",
    )
    parser.add_argument("--version", action="version", version=f"papaya {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (
        demo,
        serve,
        task,
        status,
        client,
        token,
        compare,
        simulate,
        swarm,
        tsa,
        log,
        audit,
    ):
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
