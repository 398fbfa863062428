"""The device's rules for owners: whose tasks it trains, on what, and within which limits.

A TOML file of the person who runs the device, never of a server:

    [owners.acme]
    key = "5f1c…"                # 64 hex digits, as `papaya owner show` prints them
    recovery = "9a02…"           # optional: the owner's offline key
    collections = ["digits"]     # examples that its tasks may use; none by default
    engines = ["torch"]          # "torch" runs this owner's code on the device, confined
    max_examples = 1500          # per training
    max_training_s = 600
    max_memory_mb = 512          # of one training job; the device's own limit without it
    max_download_mb = 64         # program and frozen tensors of one task
    max_participations = 100     # in one task, over all of its runs
    min_gap_s = 3600             # between two of them
    budget_share = 0.5           # of the privacy budget of each collection

Refused: a manifest that asks for more than its owner is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

import msgspec
from msgspec import Struct

from papaya.bundle.errors import BundleError
from papaya.bundle.manifest import TaskManifest
from papaya.bundle.owner import OwnerPin
from papaya.config.checks import require, require_count, require_positive_s
from papaya.device.executor import EngineName
from papaya.errors import ConfigError

MAX_OWNERS = 32
"""A check-in names the pinned owners, and no more than these."""

_KEY = re.compile(r"[0-9a-f]{64}")


class OwnerPolicy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one owner's tasks may do on this device."""

    key: str
    recovery: str | None = None
    collections: tuple[str, ...] = ()
    engines: tuple[EngineName, ...] = ("executorch",)
    max_examples: int = 1500
    max_training_s: float = 600.0
    max_memory_mb: int | None = None
    max_download_mb: int = 64
    max_participations: int = 1000
    min_gap_s: float = 0.0
    budget_share: float = 1.0

    def __post_init__(self) -> None:
        for field in ("key", "recovery"):
            value = getattr(self, field)
            is_valid = value is None or _KEY.fullmatch(value) is not None
            remedy = "copy it from: papaya owner show"
            require(is_valid, field, value, "must be 64 hex digits", remedy)
        for field in ("max_examples", "max_participations", "max_download_mb"):
            require_count(field, getattr(self, field))
        if self.max_memory_mb is not None:
            require_count("max_memory_mb", self.max_memory_mb)
        require_positive_s("max_training_s", self.max_training_s)
        require(
            0 < self.budget_share <= 1,
            "budget_share",
            self.budget_share,
            "must be above 0 and at most 1",
            "it is a share of the privacy budget of each collection",
        )

    @property
    def pin(self) -> OwnerPin:
        recovery = None if self.recovery is None else bytes.fromhex(self.recovery)
        return OwnerPin(bytes.fromhex(self.key), recovery)

    def limits(self, manifest: TaskManifest) -> tuple[float, int]:
        """Gap and number of participations: the stricter ones of the manifest and this policy."""
        asked = manifest.participation
        count = self.max_participations if asked.max_count is None else asked.max_count
        return max(asked.gap_s, self.min_gap_s), min(count, self.max_participations)

    def may_use(self, collection: str) -> bool:
        return any(fnmatchcase(collection, pattern) for pattern in self.collections)

    def check(self, manifest: TaskManifest) -> None:
        """BundleError with everything that the manifest asks for and this policy does not allow."""
        collection, seconds = manifest.examples.collection, manifest.training_timeout_s
        examples = manifest.client.max_examples
        allowed = {
            f"engine {manifest.engine}": manifest.engine in self.engines,
            f"collection {collection!r}": self.may_use(collection),
            f"{examples} examples": examples <= self.max_examples,
            f"{seconds:g} s of training": seconds <= self.max_training_s,
            f"a download of {manifest.download_bytes} bytes": (
                manifest.download_bytes <= self.max_download_mb << 20
            ),
        }
        problems = [what for what, is_allowed in allowed.items() if not is_allowed]
        if problems:
            raise BundleError(
                "not_allowed",
                f"{manifest.task}: not allowed for its owner on this device: {', '.join(problems)}",
                hint="to allow it, edit the file that --owners names",
            )


OwnerPolicies = Mapping[str, OwnerPolicy]
"""By the owner's id."""


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    owners: dict[str, OwnerPolicy] = {}


def parse_owners(toml: bytes, where: str) -> dict[str, OwnerPolicy]:
    """The owners that a TOML file declares; `where` names the file in errors."""
    try:
        named = msgspec.toml.decode(toml, type=_File).owners
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", hint=error.hint) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(
            f"invalid list of owners in {where}: {error}",
            hint='[owners.acme] with key = "64 hex digits" and collections = ["digits"]',
        ) from error
    require(
        len(named) <= MAX_OWNERS, "owners", len(named), f"are more than {MAX_OWNERS}", "pin fewer"
    )
    policies = {policy.pin.owner: policy for policy in named.values()}
    require(
        len(policies) == len(named),
        "owners",
        list(named),
        "contain a key twice",
        "name each key once",
    )
    return policies
