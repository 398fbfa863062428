"""The options that name a server's configuration: the file, the data folder and the addresses.

`papaya serve` and `papaya doctor` share them, so that a check sees the server as it was started.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import msgspec

from papaya.cli.output import FormatOptions
from papaya.config import Deployment
from papaya.server.deployment_file import read_deployment


@dataclass(frozen=True, kw_only=True)
class DeploymentOptions(FormatOptions):
    """None: the value of the configuration file, or of `Deployment`, is used."""

    config: Path | None = None
    data: str | None = None
    devices: str | None = None
    admin: str | None = None
    servers: str | None = None
    announce: str | None = None
    upload_url: str | None = None

    def deployment(self) -> Deployment:
        found = Deployment() if self.config is None else read_deployment(self.config)
        given = {
            "data": self.data,
            "devices": self.devices,
            "admin": self.admin,
            "servers": self.servers,
            "announce": self.announce,
            "upload_url": self.upload_url,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        return msgspec.structs.replace(found, **changes)


def add_deployment(group: argparse._ActionsContainer) -> None:
    found = Deployment()
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with settings (default: none)"
    )
    group.add_argument(
        "--data",
        metavar="DIR",
        help=f"folder for state, blobs and tokens (default: {found.data})",
    )
    for option, default, words in (
        ("--devices", found.devices, "address (host:port) to listen on for devices"),
        ("--admin", found.admin, "address (host:port) of the admin API"),
        ("--servers", found.servers, "address (host:port) to listen on for other servers"),
        (
            "--announce",
            "the --servers address",
            "address (host:port) at which other servers reach this one",
        ),
    ):
        group.add_argument(option, metavar="ADDRESS", help=f"{words} (default: {default})")
    group.add_argument(
        "--upload-url",
        metavar="URL",
        help="URL at which devices may upload to this aggregator without a selector in between; it "
        "then listens on --devices as well (default: none)",
    )
