"""A task as its owner configures it.

Paper, "Experimental Setup": "Our system has two configuration parameters. First, for both SyncFL
and AsyncFL tasks, concurrency [...]. Second, for AsyncFL tasks, K is the aggregation goal".

A value that cannot work raises ConfigError (`task_checks.py`). A value that is valid but unwise is
listed by `TaskConfig.warnings()` (`task_warnings.py`).
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import structs

from papaya.config.checks import Settings, require, require_numbers
from papaya.config.combining import Aggregation, Staleness, Weighting
from papaya.config.evaluation import Evaluated, EvaluationPlan, StopRule
from papaya.config.metrics import MetricBounds
from papaya.config.optimizer import OptimizerConfig
from papaya.config.privacy import Privacy, public_terms
from papaya.config.regime import AsyncFL, SyncFL
from papaya.config.requirements import Requirements
from papaya.config.task_checks import Durability, OverClip, check_task
from papaya.config.task_warnings import unwise
from papaya.config.upload_bits import UploadBits, encoded_bytes
from papaya.secagg import fixed_point
from papaya.secagg.parameters import (
    EXTRA_WORDS,
    PRIVATE_EXTRA_WORDS,
    SCHEME,
    SCHEME_16,
    PublicParameters,
)


class SecureAggregation(Settings, frozen=True):
    """The smallest number of clients whose sum may be revealed; None means the aggregation goal."""

    threshold: int | None = None

    def __post_init__(self) -> None:
        require_numbers(self, "secure_aggregation.")


class TaskConfig(Settings, frozen=True, kw_only=True):
    """One FL task. Every field means the same in both regimes."""

    task: str
    concurrency: int
    model_length: int
    regime: AsyncFL | SyncFL = AsyncFL()
    optimizer: OptimizerConfig = OptimizerConfig()
    requirements: Requirements = Requirements()
    secure_aggregation: SecureAggregation | None = None
    training_timeout_s: float = 240.0
    upload_timeout_s: float = 120.0
    max_examples: int = 1500
    clip: float | None = None
    over_clip: OverClip = "refuse"
    participation_gap_s: float = 3600.0
    max_participations: int | None = None
    keep_versions: int = 5
    commit_interval_s: float = 0.25
    durability: Durability = "commit"
    stop: StopRule = StopRule()
    evaluation: EvaluationPlan | None = None
    evaluates: Evaluated | None = None
    metrics: tuple[MetricBounds, ...] = ()
    perplexity: bool = False
    privacy: Privacy | None = None
    staleness: Staleness = Staleness()
    weighting: Weighting = Weighting()
    aggregation: Aggregation = Aggregation()

    def __post_init__(self) -> None:
        require_numbers(self)
        if self.privacy is not None:
            self._take_from(self.privacy)
        check_task(self)

    @property
    def aggregation_goal(self) -> int:
        """The paper's K: updates per server update."""
        match self.regime:
            case AsyncFL(aggregation_goal=None):
                return max(1, round(self.concurrency / 10))
            case AsyncFL(aggregation_goal=int(goal)):
                return goal
            case SyncFL(over_selection=over_selection):
                return max(1, round(self.concurrency / (1 + over_selection)))
        raise AssertionError(self.regime)

    @property
    def max_staleness(self) -> int:
        """Staleness beyond which a client is aborted; zero in SyncFL."""
        match self.regime:
            case AsyncFL(max_staleness=None):
                return max(50, math.ceil(16 * self.concurrency / self.aggregation_goal))
            case AsyncFL(max_staleness=int(limit)):
                return limit
            case _:
                return 0

    @property
    def is_secure(self) -> bool:
        """Are updates masked?"""
        return self.secure_aggregation is not None

    @property
    def is_bound(self) -> bool:
        """Must all members of a buffer have agreed to the same manifest?"""
        return self.is_secure or self.privacy is not None

    @property
    def model_bytes(self) -> int:
        return 4 * self.model_length

    @property
    def members_bytes(self) -> int:
        """The size of the single updates of one version, which some aggregation rules need."""
        return self.aggregation_goal * self.model_bytes

    @property
    def upload_bits(self) -> UploadBits:
        """Bits of each number of an update. Results of evaluations are whole and stay exact."""
        return 32 if self.evaluates is not None else self.requirements.upload_bits

    @property
    def update_bytes(self) -> int:
        """The size of an upload. A masked vector also carries a constant and, unless there is
        noise, its weight.
        """
        if not self.is_secure:
            return encoded_bytes(self.model_length, self.upload_bits)
        extra = EXTRA_WORDS if self.privacy is None else PRIVATE_EXTRA_WORDS
        return (self.model_length + extra) * (self.upload_bits // 8)

    @property
    def rounding_error(self) -> float | None:
        """The error of the mean of K updates of full weight in masked words of 16 bits, as a share
        of the clip: an upper bound of its root mean square. None with other words.
        """
        if not self.is_secure or self.upload_bits != 16:
            return None
        return fixed_point.relative_error(self.model_length, self.aggregation_goal)

    @property
    def rounding_error_in_words(self) -> str:
        """The rounding error as a sentence for the owner; empty with other words."""
        if (error := self.rounding_error) is None:
            return ""
        words = (
            f"rounding to masked words of 16 bits changes the mean of {self.aggregation_goal} "
            f"updates by at most {100 * error:.2g} % of the clip (root mean square)"
        )
        if self.weighting.kind == "equal":
            return words
        most = self.heaviest_examples
        return f"{words} if all have {most} examples; with n on average, {most}/n times as much"

    @property
    def heaviest_examples(self) -> int:
        """With this many examples, an update weighted by its examples has the full weight."""
        return self.weighting.cap or self.max_examples

    @property
    def public_parameters(self) -> PublicParameters | None:
        """What devices, the TSA and auditors agree on; None without secure aggregation."""
        if self.secure_aggregation is None:
            return None
        assert self.clip is not None
        pinned, manifest = self.evaluates, self.requirements.manifest or ""
        kind: Literal["train", "evaluate"] = "train" if pinned is None else "evaluate"
        private = {} if self.privacy is None else public_terms(self.privacy.terms)
        by = "equal" if self.weighting.kind == "equal" else "examples"
        scheme = SCHEME_16 if self.upload_bits == 16 else SCHEME
        rules = {"scheme": scheme, "weighting": by if pinned is None else "none"}
        damping = self.staleness.damping
        assert damping is not None
        return PublicParameters(
            task=self.task,
            length=self.model_length,
            aggregation_goal=self.aggregation_goal,
            threshold=self.secure_aggregation.threshold or self.aggregation_goal,
            clip=float(self.clip),
            max_examples=self.weighting.cap or self.max_examples,
            max_staleness=self.max_staleness,
            damping=damping,
            manifest=manifest,
            kind=kind if manifest else "",
            number=pinned.version if pinned is not None and manifest else 0,
            **(rules | private),
        )

    @property
    def evaluation_clients(self) -> int:
        """The fewest clients of an evaluation that the owner signs; 0: there are none."""
        if self.evaluation is not None:
            return self.evaluation.clients
        is_measured = self.privacy is not None and self.privacy.evaluation is not None
        return self.aggregation_goal if is_measured else 0

    @property
    def manifest(self) -> bytes:
        """The digest of what the task's owner has signed; empty if nobody has signed it."""
        return bytes.fromhex(self.requirements.manifest or "")

    @property
    def workload(self) -> float:
        """The Coordinator "estimates this workload using the task concurrency and model size"."""
        return float(self.concurrency) * self.model_bytes

    @property
    def threshold(self) -> int | None:
        """The smallest sum that secure aggregation may reveal; None without it."""
        if self.secure_aggregation is None:
            return None
        return self.secure_aggregation.threshold or self.aggregation_goal

    def warnings(self) -> list[str]:
        """What is valid but unwise, in words for the task's owner."""
        return list(unwise(self))

    def _take_from(self, privacy: Privacy) -> None:
        """Clip and participations are settings of the privacy; a second value must be the same."""
        for field, wanted in (
            ("clip", privacy.clip),
            ("max_participations", privacy.max_participations),
        ):
            mine = getattr(self, field)
            require(
                mine is None or mine == wanted,
                field,
                mine,
                f"differs from privacy.{field} = {wanted}",
                f"leave {field} out",
            )
            structs.force_setattr(self, field, wanted)
