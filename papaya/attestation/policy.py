"""What the owner of a device requires of a TSA before updates are masked for it.

The policy is the device's own: no server can change it, and the defaults are strict. A policy that
contradicts itself is refused. `minimum_threshold` and `maximum_staleness` become part of
`ParticipantPolicy` (`papaya/secagg/participant.py`), which also has the parameters of a task.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias, get_args

import msgspec

from papaya.errors import ConfigError, ProtocolError
from papaya.verifiable_log.checkpoint import MAX_COSIGNATURE_AGE_S, LogPolicy
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.note import VerifierKey

AttestationReason: TypeAlias = Literal[
    "platform", "quote", "debug", "log", "measurement", "report_data"
]


class AttestationError(ProtocolError):
    """The first check that failed, in `reason`; nothing was masked.

    platform       this device does not accept evidence of that kind
    quote          malformed, not under the vendor's root, expired, revoked, or a bad TCB status
    debug          the host can read the enclave
    log            the log cannot be read, was rolled back, forked, or lacks witnesses
    measurement    the binary is not the one in the log's record
    report_data    the identity key or the parameters are not those that the server sent
    """

    default_hint: ClassVar[str] = (
        "the device does not take part; the operator of the server must provide valid evidence"
    )

    def __init__(self, reason: AttestationReason, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


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
    """Which TSAs this device trusts.

    log_key                    the log's public key, as `papaya log` prints it: name+id+base64
    log_url                    where the log is read, by this device and by every auditor
    log_checkpoint             the checkpoint that came with the device's package, if any
    witnesses                  public keys of witnesses; `witness_quorum` of them must have cosigned
    max_cosignature_age_s      older cosignatures do not count; inf: any age counts
    oldest_record              older releases are not trusted any more
    platforms                  kinds of evidence that are accepted
    allow_insecure_software    accept evidence that proves nothing; for demonstrations and tests
    tcb_statuses               accepted states of a processor's trusted computing base
    rejected_advisories        Intel advisories that are not accepted, such as INTEL-SA-00615
    minimum_tcb_evaluation     collateral from an older evaluation by Intel is refused
    allow_dynamic_platform     processors may have been added to the machine (any with two or more)
    allow_cached_keys          the machine may keep its platform keys at Intel
    allow_smt                  hyper-threading may be on, which makes side channels easier
    minimum_threshold          sums of fewer clients are refused, whatever is attested
    maximum_staleness          tasks that allow more are refused: a server that lies about versions
                               gives one update up to sqrt(1 + max_staleness) times its weight
    """

    log_key: str
    log_url: str = ""
    log_checkpoint: str = ""
    witnesses: tuple[str, ...] = ()
    witness_quorum: int = 0
    max_cosignature_age_s: float = MAX_COSIGNATURE_AGE_S
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
            raise ConfigError.of("platforms", (), "no TSA could ever be trusted", 'name "sgx"')
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
                f"the log of this device's policy cannot be used: {error}",
                hint="check witness_quorum and max_cosignature_age_s; the operator of the log has "
                "log_key and witnesses (name+id+base64)",
            ) from error

    def accepts(self, platform: PlatformName) -> bool:
        is_allowed = platform != "software" or self.allow_insecure_software
        return platform in self.platforms and is_allowed
