"""What an owner signs about a task, and what a device holds every server to.

    Task      (owner, name)
    Run       one training from one initial model; its number is the owner's time in milliseconds
    Revision  one signed manifest of a run

Everything that decides what a device computes, and what leaves it, is in the manifest, explicitly
and without defaults. What only the server needs is not: concurrency, the server optimizer, stop
rules, retention. The digest of a manifest names it in every message.

A lease says how long devices may start to train a manifest. It is signed beside the manifest and
renewed without changing the digest.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from papaya.bundle.errors import BundleError
from papaya.bundle.owner import OwnerKeys, SignedStatement, Statement
from papaya.config import PrivacyTerms, Staleness, Weighting
from papaya.config.checks import require
from papaya.config.metrics import MetricBounds, check_metrics
from papaya.config.versions import EngineVersion
from papaya.learning.definition import ClientSGD, Examples

DAY_S: Final = 86_400.0
LEASE_S: Final = 30 * DAY_S
MAX_AHEAD_S: Final = DAY_S
MAX_REVISIONS_AHEAD: Final = 1_000
_MAX_CLOCK_ERROR_S: Final = 3_600.0

Hex = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
OwnerId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
TaskName = Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9_-]{0,63}\Z")]
Size = Annotated[int, Meta(ge=1, le=2**40)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
_RUN_ID = re.compile(r"(.+)-[0-9a-f]{12}")


class BlobRef(Struct, frozen=True, forbid_unknown_fields=True):
    """A blob by its hash and its size; nothing parses it before both are checked."""

    sha256: Hex
    size: Size

    def check(self, data: bytes, what: str) -> None:
        if len(data) != self.size or hashlib.sha256(data).hexdigest() != self.sha256:
            raise self.wrong_bytes(what)

    def wrong_bytes(self, what: str) -> BundleError:
        return BundleError("wrong_bytes", f"{what}: not the bytes that the owner signed")


class SecureTerms(Struct, frozen=True, forbid_unknown_fields=True):
    """The sums that the TSA may reveal: of how many updates, and of no fewer than `threshold`."""

    aggregation_goal: Size
    threshold: Size


class Participation(Struct, frozen=True, forbid_unknown_fields=True):
    """How often one device takes part. `scope`: whether the count starts again with each run."""

    gap_s: float
    max_count: Size | None
    scope: Literal["task", "run"]


class TaskManifest(Statement, frozen=True, kw_only=True):
    """One revision of one run. Whoever holds one holds values within bounds."""

    label = b"papaya manifest\n"
    max_bytes = 1 << 16

    format: Literal["papaya-manifest-1"] = "papaya-manifest-1"
    # Whose it is, and which one.
    owner: OwnerId
    task: TaskName
    run: Number
    revision: Number
    # What runs on the device. `frozen`: the digest of all tensors that the model holds and does not
    # train (docs/adr/0040). `frozen_file`: those of them that travel in a file beside the program;
    # left out of the encoding if there is none.
    engine: Literal["torch", "executorch"]
    engine_version: EngineVersion
    program: BlobRef
    frozen: Hex | None
    frozen_file: BlobRef | UnsetType = UNSET
    layout: tuple[tuple[str, tuple[Number, ...]], ...]
    # How it is trained, and on what.
    client: ClientSGD
    examples: Examples
    training_timeout_s: float
    # What leaves the device.
    secure: SecureTerms | None
    weighting: Literal["examples", "equal", "capped"]
    clip: float | None
    max_staleness: Number
    upload_timeout_s: float
    participation: Participation
    # Minimum number of devices in the sum of an evaluation; 0: no evaluations.
    evaluation_clients: Number
    # The noise of differential privacy, and how often one device takes part over all runs.
    privacy: PrivacyTerms | None
    # In how many bits a number of an update is uploaded. Unset if it is 32.
    upload_bits: Literal[8, 16] | UnsetType = UNSET
    # What an evaluation uploads beside the loss. Unset if it is nothing, so that manifests that
    # were signed before there were metrics keep their encoding.
    metrics: tuple[MetricBounds, ...] | UnsetType = UNSET
    # The limit of capped weights, and how stale updates are damped. Unset without one, and for the
    # paper's function, as `metrics` is.
    weight_cap: Size | UnsetType = UNSET
    staleness: Staleness | UnsetType = UNSET

    def __post_init__(self) -> None:
        self._check_privacy()
        require(
            self.engine == "torch" or not self.client.precision,
            "client.precision",
            self.client.precision,
            "programs train in float32",
            "leave it out, or use --engine torch",
        )
        for field in ("training_timeout_s", "upload_timeout_s"):
            value = getattr(self, field)
            require(math.isfinite(value) and value > 0, field, value, "must be above zero", "")
        gap_s = self.participation.gap_s
        require(math.isfinite(gap_s) and gap_s >= 0, "gap_s", gap_s, "must be at least zero", "")
        require(
            self.clip is None or (math.isfinite(self.clip) and self.clip > 0),
            "clip",
            self.clip,
            "must be above zero",
            "",
        )
        require(
            self.secure is None or self.clip is not None,
            "clip",
            self.clip,
            "a secure task needs one",
            "",
        )
        names = [name for name, _ in self.layout]
        require(
            bool(names) and len(dict.fromkeys(names)) == len(names),
            "layout",
            names,
            "must name each tensor once",
            "",
        )

        require(self.metrics != (), "metrics", self.metrics, "must be unset if there are none", "")
        check_metrics(self.metric_bounds)

    @property
    def metric_bounds(self) -> tuple[MetricBounds, ...]:
        return self.metrics or ()

    def _check_privacy(self) -> None:
        privacy = self.privacy
        is_capped = self.weighting == "capped" and privacy is None
        require(
            is_capped == bool(self.weight_cap),
            "weight_cap",
            self.weight_cap,
            "must be set with capped weights and without privacy only",
            "",
        )
        require(
            self.staleness != Staleness(),
            "staleness",
            self.staleness,
            "must be unset if it is the paper's",
            "",
        )
        if privacy is not None:
            require(
                self.weighting == privacy.weighting,
                "weighting",
                self.weighting,
                f"must be {privacy.weighting}",
                "",
            )
            limits = Participation(self.participation.gap_s, privacy.max_participations, "task")
            require(
                self.participation == limits and self.clip is not None,
                "privacy",
                privacy,
                "needs a clip, and its number of participations over all runs of the task",
                "",
            )

    @property
    def weights(self) -> Weighting | UnsetType:
        """Unset if they are by examples, or a setting of the privacy."""
        if self.privacy is not None or self.weighting == "examples":
            return UNSET
        return Weighting(self.weighting, self.weight_cap or None)

    @property
    def model_length(self) -> int:
        return sum(math.prod(shape) for _, shape in self.layout)

    @property
    def frozen_blob(self) -> BlobRef | None:
        return self.frozen_file or None

    @property
    def download_bytes(self) -> int:
        """What a device that has nothing of this task has to download before it can take part."""
        return self.program.size + (self.frozen_blob.size if self.frozen_blob else 0)

    @property
    def digest(self) -> str:
        """The name of this revision, in hex."""
        return hashlib.sha256(self.label + self.encode()).hexdigest()


class Lease(Statement, frozen=True):
    """Devices may start to train the manifest with this digest, from `issued` until `expires`."""

    label = b"papaya lease\n"

    manifest: Hex
    issued: float
    expires: float

    def check(self, manifest: TaskManifest, now: float) -> None:
        """BundleError unless it is a lease on this manifest that is valid now."""
        if self.manifest != manifest.digest:
            raise BundleError("expired", f"{manifest.task}: the lease is for another manifest")
        if not self.issued - _MAX_CLOCK_ERROR_S <= now < self.expires:
            is_over, days = now >= self.expires, abs(now - self.expires) / DAY_S
            when = f"ended {days:.1f} days ago" if is_over else "begins in the future"
            raise BundleError(
                "expired",
                f"{manifest.task}: the lease {when}",
                hint="the owner has to renew it: papaya task renew NAME"
                if is_over
                else "check the clock of this device",
            )


class RevisionMark(Struct, frozen=True):
    """The newest revision of a task that a device has accepted. It never goes back."""

    run: int
    revision: int

    def check(self, manifest: TaskManifest) -> None:
        if (manifest.run, manifest.revision) < (self.run, self.revision):
            raise BundleError(
                "rolled_back",
                f"{manifest.task}: run {manifest.run} revision {manifest.revision} is older than "
                f"run {self.run} revision {self.revision}, which this device has seen",
            )
        ahead = manifest.revision - (self.revision if manifest.run == self.run else 0)
        if ahead > MAX_REVISIONS_AHEAD:
            raise BundleError(
                "too_far_ahead",
                f"{manifest.task}: revision {manifest.revision} is {ahead} revisions ahead",
            )


def verified(
    keys: OwnerKeys,
    signed_manifest: SignedStatement,
    signed_lease: SignedStatement,
    mark: RevisionMark | None,
    now: float,
) -> TaskManifest:
    """The manifest, if the owner signed it, leases it now, and has not replaced it.

    The caller stores its run and revision as the new mark before it acts on it.
    """
    current = keys.current
    if signed_manifest.key != current or signed_lease.key != current:
        raise BundleError("signature", f"not signed by the key of owner {keys.owner}", hint="")
    manifest = TaskManifest.verify(signed_manifest)
    if manifest.owner != keys.owner:
        raise BundleError("unknown_owner", f"{manifest.task}: the manifest names another owner")
    if manifest.run / 1000 > now + MAX_AHEAD_S:
        raise BundleError(
            "too_far_ahead",
            f"{manifest.task}: run {manifest.run} is in the future",
            hint="check the clock of this device and that of the owner",
        )
    (mark or RevisionMark(0, 0)).check(manifest)
    Lease.verify(signed_lease).check(manifest, now)
    return manifest


def run_id(owner: str, task: str, run: int) -> str:
    """The id under which servers keep a run: nothing of one run fits another."""
    tail = hashlib.sha256(f"{owner}\n{task}\n{run}".encode()).hexdigest()[:12]
    return f"{task[:40]}-{tail}"


def name_in(run: str) -> str:
    """The beginning of the task's name in the id of a run; any other text as it is."""
    found = _RUN_ID.fullmatch(run)
    return run if found is None else found[1]
