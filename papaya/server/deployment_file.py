"""Reads the TOML file of `papaya serve --config` into a `Deployment`."""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from pathlib import Path

import msgspec

from papaya.config import ServerConfig
from papaya.config.deployment import Deployment
from papaya.errors import ConfigError, OperatorError

_PATHS = (
    *("data", "blobs_credentials", "tls_certificate", "tls_key", "tls_authority"),
    *("servers_certificate", "servers_key", "servers_authority", "tsa_collateral", "log"),
    "webhook_key",
)


def _hint(problem: str) -> str:
    """Suggest a similar name for an unknown field, also of another table."""
    unknown = re.search(r"unknown field `(.+?)`", problem)
    names = {field.name: field.name for field in msgspec.structs.fields(Deployment)}
    names |= {
        field.name: f"{field.name} in the table [server]"
        for field in msgspec.structs.fields(ServerConfig)
    }
    if unknown and unknown[1] in Deployment.__struct_fields__:
        return f"{unknown[1]} belongs above the first [table] of the file"
    close = get_close_matches(unknown[1], names, n=1) if unknown else []
    meant = f"did you mean {names[close[0]]}? " if close else ""
    return f"{meant}docs/configuration.md lists every field"


def read_deployment(path: Path) -> Deployment:
    """Read the TOML file at `path`; relative paths in it start at its folder."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert(document, Deployment)
    except OSError as error:
        raise OperatorError(
            f"cannot read {path}: {error.strerror}",
            hint="check the path, or run papaya serve without a file",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", hint="correct that line") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", hint=_hint(str(error))) from error
    paths = {
        field: str(path.parent / value)
        for field in _PATHS
        if (value := getattr(found, field)) is not None
    }
    if found.oidc is not None and found.oidc.authority is not None:
        authority = str(path.parent / found.oidc.authority)
        oidc = msgspec.structs.replace(found.oidc, authority=authority)
        found = msgspec.structs.replace(found, oidc=oidc)
    return msgspec.structs.replace(found, **paths)
