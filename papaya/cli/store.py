"""`papaya store`: the data of a cluster."""

from __future__ import annotations

from papaya.cli import store_backup
from papaya.cli.output import Commands


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("store", description="Back up and restore the data of a cluster.")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    store_backup.add_to(actions)
