"""What the owner of a device demands of a TSA, before its updates are masked for it.

Everything here is the device's own: no server can change it, and defaults are the strict side of
every choice. Refused when it is made: a policy that contradicts itself. It does not know a
task's parameters; those that the device agrees to are `Policy` in `papaya/secagg/participant.py`,
for which `minimum_threshold` and `maximum_staleness` are meant.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

from papaya.errors import ConfigError
from papaya.verifiable_log.checkpoint import LogPolicy
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.note import VerifierKey

PlatformName: TypeAlias = Literal["sgx", "tdx", "software"]
# "Revoked" is not among them: no policy accepts it.
TcbStatus: TypeAlias = Literal[
    "UpToDate",
    "SWHardeningNeeded",
    "ConfigurationNeeded",
    "ConfigurationAndSWHardeningNeeded",
    "OutOfDate",
    "OutOfDateConfigurationNeeded",
]

PLATFORMS: tuple[PlatformName, ...] = get_args(PlatformName)


class DevicePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which TSAs this device believes.

    log_key                    the log's public key, as `papaya log` prints it: name+id+base64
    log_url                    where the log is read, by this device and by every auditor
    log_checkpoint             the checkpoint that came with the device's package, if any
    witnesses                  public keys of witnesses; `witness_quorum` of them must have cosigned
    max_cosignature_age_s      an older cosignature does not count; none: any age does
    oldest_record              releases before this one are not believed any more
    platforms                  what may vouch for the TSA binary
    allow_insecure_software    take evidence that proves nothing; for demonstrations and tests
    tcb_statuses               states of a processor's trusted computing base that are good enough
    rejected_advisories        Intel advisories, such as INTEL-SA-00615, that are not
    minimum_tcb_evaluation     collateral from an older evaluation by Intel is refused
    allow_dynamic_platform     processors may have been added to the machine (any with two or more)
    allow_cached_keys          the machine may keep its platform keys at Intel
    allow_smt                  hyper-threading may be on: side channels get easier
    minimum_threshold          sums of fewer clients are refused, whatever is attested
    maximum_staleness          tasks that allow more are refused: a server that lies about versions
                               makes one update up to sqrt(1 + max_staleness) times louder
    """

    log_key: str
    log_url: str = ""
    log_checkpoint: str = ""
    witnesses: tuple[str, ...] = ()
    witness_quorum: int = 0
    max_cosignature_age_s: float | None = None
    oldest_record: int = 0
    platforms: tuple[PlatformName, ...] = ("sgx", "tdx")
    allow_insecure_software: bool = False
    tcb_statuses: tuple[TcbStatus, ...] = ("UpToDate",)
    rejected_advisories: tuple[str, ...] = ()
    minimum_tcb_evaluation: int | None = None
    allow_dynamic_platform: bool = False
    allow_cached_keys: bool = False
    allow_smt: bool = False
    minimum_threshold: int = 10
    maximum_staleness: int = 1000

    def __post_init__(self) -> None:
        self.log_policy()
        if "software" in self.platforms and not self.allow_insecure_software:
            raise ConfigError.of(
                "platforms",
                self.platforms,
                "software evidence proves nothing",
                "leave it out, or set allow_insecure_software = true for a demonstration",
            )
        if not self.platforms:
            raise ConfigError.of("platforms", (), "must name at least one platform", 'add "sgx"')
        if self.minimum_threshold < 1:
            raise ConfigError.of(
                "minimum_threshold",
                self.minimum_threshold,
                "must be at least 1",
                "leave it at 10, or lower it to 1 for a demonstration",
            )
        if self.maximum_staleness < 0:
            raise ConfigError.of(
                "maximum_staleness",
                self.maximum_staleness,
                "must be at least 0",
                "leave it at 1000, or use 0 to take part in synchronous rounds only",
            )
        if self.oldest_record < 0:
            raise ConfigError.of("oldest_record", self.oldest_record, "must be at least 0", "use 0")

    def log_policy(self) -> LogPolicy:
        try:
            return LogPolicy(
                VerifierKey.parse(self.log_key),
                tuple(VerifierKey.parse(key) for key in self.witnesses),
                self.witness_quorum,
                self.max_cosignature_age_s,
            )
        except LogError as error:
            raise ConfigError(
                f"cannot use the log of this device's policy: {error}",
                hint="copy log_key and witnesses from the operator of the log: name+id+base64",
            ) from error

    def accepts(self, platform: PlatformName) -> bool:
        is_worth_something = platform != "software" or self.allow_insecure_software
        return platform in self.platforms and is_worth_something
