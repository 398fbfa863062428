"""Reads the TOML file of `papaya serve --config` into a `Deployment`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from papaya.config.deployment import Deployment
from papaya.errors import ConfigError, OperatorError

_PATHS = ("data", "tls_certificate", "tls_key", "tls_authority", "trusted_collateral", "log")


def read_deployment(path: Path) -> Deployment:
    """The TOML file at `path`; relative paths in it start at its folder."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert(document, Deployment)
    except OSError as error:
        raise OperatorError(
            f"{path} cannot be read: {error.strerror}", hint="papaya serve needs no file at all"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", hint="mend the line it names") from error
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: {error}", hint="docs/configuration.md lists every field"
        ) from error
    paths = {
        field: str(path.parent / value)
        for field in _PATHS
        if (value := getattr(found, field)) is not None
    }
    return msgspec.structs.replace(found, **paths)
