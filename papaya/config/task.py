"""A task as its owner configures it.

Paper, "Experimental Setup": "Our system has two configuration parameters. First, for both SyncFL
and AsyncFL tasks, concurrency [...]. Second, for AsyncFL tasks, K is the aggregation goal".
Appendix "Switching between SyncFL and AsyncFL": "can be done via a configuration change".

A value that cannot work raises ConfigError with the field, the value and a remedy. A value that is
valid but unwise is listed by `TaskConfig.warnings()`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from msgspec import Meta, structs

from papaya.config.checks import (
    MAX_COUNT,
    Settings,
    require,
    require_choice,
    require_count,
    require_numbers,
    require_positive_s,
)
from papaya.config.combining import Aggregation, Staleness, Weighting
from papaya.config.evaluation import Evaluated, EvaluationPlan, StopRule
from papaya.config.metrics import PERPLEXITY, MetricBounds, check_metrics
from papaya.config.optimizer import OptimizerConfig
from papaya.config.privacy import EvaluationTerms, Privacy, PrivacyTerms, public_terms
from papaya.config.upload_bits import UploadBits, encoded_bytes
from papaya.config.versions import EngineVersion
from papaya.errors import ConfigError
from papaya.secagg import fixed_point
from papaya.secagg.damping import PAPERS
from papaya.secagg.errors import ParametersError
from papaya.secagg.parameters import (
    EXTRA_WORDS,
    MAX_GOAL,
    MIN_PRIVATE_GOAL,
    PRIVATE_EXTRA_WORDS,
    SCHEME,
    SCHEME_16,
    PublicParameters,
)
from papaya.secagg.unmask import chance_of_random_words
from papaya.secagg.words import RING_16, RING_32

Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_TASK_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
MAX_MODEL_LENGTH = 2**30
_STALENESS_OF_DEVICES = 1000  # the default limit of a device's own policy
_RARE = 2.0**-32
_COARSE = 0.05  # of the clip
_FLOAT32_MAX = 3.4028234663852886e38
_FLOAT32_TINY = 1.1754943508222875e-38

OverClip = Literal["refuse", "clip"]
Durability = Literal["commit", "step"]


class AsyncFL(Settings, frozen=True, tag="async"):
    """A new version after every K updates; clients never wait for each other."""

    aggregation_goal: int | None = None
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        require_numbers(self, "regime.")


class SyncFL(Settings, frozen=True, tag="sync"):
    """Rounds of clients that all start from the current version."""

    over_selection: float = 0.3

    def __post_init__(self) -> None:
        require_numbers(self, "regime.")


class Requirements(Settings, frozen=True):
    """What a device must declare to be compatible with a task.

    A device needs the task file (`module`), or, if the task has an `owner`, it has pinned that
    owner, who has signed a bundle: `bundle`, `program` and `frozen_file` are the keys of its blobs,
    `manifest` is the digest of what was signed, in hex. `engine_version` is the minimum version of
    the engine. `upload_bits`: in how many bits the device has to upload a number.
    """

    engine: str | None = None
    module: str | None = None
    min_memory_mb: int = 0
    labels: tuple[str, ...] = ()
    owner: str | None = None
    bundle: str | None = None
    program: str | None = None
    engine_version: EngineVersion | None = None
    manifest: Digest | None = None
    frozen_file: str | None = None
    upload_bits: UploadBits = 32

    def __post_init__(self) -> None:
        require_numbers(self, "requirements.")

    @property
    def blobs(self) -> tuple[str, ...]:
        """The keys of everything that a device fetches before it takes part."""
        return tuple(key for key in (self.bundle, self.program, self.frozen_file) if key)


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
        self._check_size()
        self._check_regime()
        self._check_times()
        self._check_participation()
        self._check_lifecycle()
        self._check_weighting()
        self._check_aggregation()
        self._check_upload_bits()
        if self.privacy is not None:
            self._check_privacy()
        if self.secure_aggregation is not None:
            self._check_secure_aggregation(self.secure_aggregation)

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
        """Of a number of an update. Results of evaluations are whole numbers and stay exact."""
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
        """With so many examples, an update that is weighted by its examples has the full weight."""
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
        return list(self._unwise())

    def _unwise(self) -> Iterator[str]:
        yield from self._unwise_regime()
        if self.participation_gap_s == 0:
            yield (
                "participation_gap_s = 0: one device may take part again immediately, "
                "so a threshold or a privacy budget no longer counts devices"
            )
        if self.is_secure:
            yield from self._unwise_staleness()
        yield from self._unwise_rounding()
        if self.privacy is not None:
            yield from self._unwise_privacy(self.privacy.terms)
        if not self.aggregation.is_mean:
            yield (
                f"aggregation.kind = {self.aggregation.kind!r}: the servers may store the single "
                f"updates of a version until it is made: {self.aggregation_goal} x "
                f"{self.model_bytes / 1e6:,.1f} MB = {self.members_bytes / 1e6:,.0f} MB, and those "
                "of the next one meanwhile"
            )
        if self.durability == "step":
            yield (
                "durability = 'step': acknowledged updates of an open buffer are lost in a crash, "
                "or when the outcome of its commit is unknown"
            )

    def _unwise_rounding(self) -> Iterator[str]:
        error, most = self.rounding_error, self.heaviest_examples
        if error is None:
            return
        if error > _COARSE:
            yield (
                f"requirements.upload_bits = 16: {self.rounding_error_in_words}; a smaller "
                "aggregation_goal, a smaller model or 32 bits reduce it"
            )
        elif self.weighting.kind != "equal":
            yield (
                f"requirements.upload_bits = 16 with weights by examples: rounding changes the "
                f"mean by more than {100 * _COARSE:.0f} % of the clip if clients have fewer than "
                f"{math.ceil(most * error / _COARSE)} examples on average; equal weights, or a "
                "weighting.cap near the usual number of examples, avoid that"
            )

    def _unwise_regime(self) -> Iterator[str]:
        goal, concurrency = self.aggregation_goal, self.concurrency
        if isinstance(self.regime, AsyncFL):
            if goal < concurrency / 100:
                yield (
                    f"aggregation_goal = {goal} is below 1 % of concurrency = {concurrency}: "
                    f"staleness will be about {concurrency // goal}; the paper advises 10-30 %"
                )
            if goal > concurrency:
                yield (
                    f"aggregation_goal = {goal} is above concurrency = {concurrency}: each version "
                    f"waits for {math.ceil(goal / concurrency)} clients per slot, one after the "
                    "other; the paper advises 10-30 %"
                )
            if self.max_staleness < 4 * concurrency / goal:
                yield (
                    f"max_staleness = {self.max_staleness} is below 4 x concurrency / "
                    f"aggregation_goal = {4 * concurrency / goal:.0f}: slow clients will be "
                    "aborted and the model biased against them"
                )
        if self.regime == SyncFL(over_selection=0.0) and concurrency > 100:
            yield (
                "over_selection = 0: each round waits for its slowest client, or for "
                f"training_timeout_s = {self.training_timeout_s:g}"
            )

    def _unwise_staleness(self) -> Iterator[str]:
        """What devices of a secure task refuse, unless their owners allow it."""
        limit, damping = self.max_staleness, self.staleness.damping
        allowed = PAPERS.factor(_STALENESS_OF_DEVICES)
        if limit > _STALENESS_OF_DEVICES:
            yield (
                f"max_staleness = {limit} with secure aggregation: devices refuse tasks that allow "
                f"more than {_STALENESS_OF_DEVICES}, unless their owners raise maximum_staleness"
            )
        elif damping is not None and (smallest := damping.factor(limit)) < allowed:
            yield (
                f"staleness.kind = {self.staleness.kind!r} damps an update by up to {smallest:.2g} "
                f"at max_staleness = {limit}: with secure aggregation, devices refuse less than "
                f"{allowed:.2g} unless their owners raise maximum_staleness"
            )

    def _unwise_privacy(self, terms: PrivacyTerms) -> Iterator[str]:
        goal = self.aggregation_goal
        noise = terms.noise_multiplier * math.sqrt(self.model_length)
        ratio = noise / (goal * terms.expected_weight)
        if ratio > 1:
            yield (
                f"the noise of a step is about {ratio:.3g} times as large as its largest signal: "
                f"noise_multiplier = {terms.noise_multiplier:g}, {self.model_length} parameters, "
                f"aggregation_goal = {goal}, expected_weight = {terms.expected_weight:g}; a larger "
                "goal, fewer participations or a larger epsilon reduce it"
            )
        if terms.delta * 10 * self.concurrency > 1:
            yield (
                f"privacy.delta = {terms.delta:g} is large for a fleet with {self.concurrency} "
                "clients at a time: with this probability there is no guarantee; use less than one "
                "divided by the number of devices"
            )
        if self.secure_aggregation is None:
            yield (
                "privacy without secure aggregation: the operator of the servers sees every "
                "update and is trusted to add the noise"
            )
        elif (chance := chance_of_random_words(goal, self._parameters())) > _RARE:
            yield (
                f"a model of {self.model_length} parameters is too small to detect an update of "
                f"random words: such a sum passes with a probability of up to {chance:.2g}"
            )
        if terms.evaluation is not None and self.evaluation is not None:
            yield from self._unwise_evaluation(terms.evaluation, self.evaluation)

    def _unwise_evaluation(self, terms: EvaluationTerms, plan: EvaluationPlan) -> Iterator[str]:
        needed = math.ceil(terms.smallest_weight(len(self.metrics)))
        clients = max(plan.clients, self.threshold or 1)
        if clients < needed:
            yield (
                f"the noise hides the results of evaluations by {clients} clients: with "
                f"privacy.evaluation.noise_multiplier = {terms.noise_multiplier:.3g}, {needed} "
                f"clients are needed, more if they have fewer than {terms.max_examples} held-out "
                "examples; raise evaluation.clients or privacy.evaluation.share"
            )

    def _parameters(self) -> PublicParameters:
        parameters = self.public_parameters
        assert parameters is not None
        return parameters

    def _check_size(self) -> None:
        require(
            _TASK_ID.fullmatch(self.task) is not None,
            "task",
            self.task,
            "invalid task id: use 1-64 of a-z, 0-9, '-' and '_', starting with a letter or a digit",
            "rename the task, for example next-word-2",
        )
        for field, value in (
            ("concurrency", self.concurrency),
            ("model_length", self.model_length),
            ("max_examples", self.max_examples),
            ("keep_versions", self.keep_versions),
        ):
            require_count(field, value)
        require(
            self.model_length <= MAX_MODEL_LENGTH,
            "model_length",
            self.model_length,
            f"is above the limit of {MAX_MODEL_LENGTH} parameters (4 GiB)",
            "train a smaller model, or a part of it",
        )
        require_choice("over_clip", self.over_clip, get_args(OverClip))
        require_choice("durability", self.durability, get_args(Durability))
        require(
            self.clip is None or (math.isfinite(self.clip) and self.clip > 0),
            "clip",
            self.clip,
            "must be finite and above zero",
            "leave clip out, or take a high quantile of the update norms",
        )

    def _check_regime(self) -> None:
        is_regime = isinstance(self.regime, AsyncFL | SyncFL)
        remedy = "write regime=AsyncFL() or regime=SyncFL()"
        require(is_regime, "regime", self.regime, "must be an AsyncFL or a SyncFL", remedy)
        require_numbers(self.regime, "regime.")
        match self.regime:
            case SyncFL(over_selection=over_selection):
                require(
                    math.isfinite(over_selection) and over_selection >= 0,
                    "regime.over_selection",
                    over_selection,
                    "must be finite and at least 0",
                    "use 0 for no over-selection, or 0.3 as in the paper",
                )
            case AsyncFL(aggregation_goal=goal, max_staleness=limit):
                require(
                    goal is None or 1 <= goal <= MAX_COUNT,
                    "regime.aggregation_goal",
                    goal,
                    f"must be from 1 to {MAX_COUNT}",
                    f"leave it out for 10 % of concurrency ({max(1, self.concurrency // 10)})",
                )
                require(
                    limit is None or 0 <= limit <= MAX_COUNT,
                    "regime.max_staleness",
                    limit,
                    f"must be from 0 to {MAX_COUNT}",
                    "leave it out, or set at least 4 x concurrency / aggregation_goal",
                )

    def _check_times(self) -> None:
        for field, value in (
            ("training_timeout_s", self.training_timeout_s),
            ("upload_timeout_s", self.upload_timeout_s),
            ("commit_interval_s", self.commit_interval_s),
        ):
            require_positive_s(field, value)

    def _check_participation(self) -> None:
        require(
            math.isfinite(self.participation_gap_s) and self.participation_gap_s >= 0,
            "participation_gap_s",
            self.participation_gap_s,
            "must be finite and not negative",
            "use 3600, or 0 in a demonstration",
        )
        require(
            self.max_participations is None or self.max_participations >= 1,
            "max_participations",
            self.max_participations,
            "must be at least 1",
            "leave it out for no limit, or set at least 1",
        )

    def _check_lifecycle(self) -> None:
        target = self.stop.target_metric
        rules = (self.stop.target_loss, self.stop.patience, target)
        require(
            self.evaluation is not None or all(rule is None for rule in rules),
            "stop",
            self.stop,
            "target_loss, target_metric and patience need the results of evaluations",
            "set evaluation, for example EvaluationPlan(every_versions=10)",
        )
        check_metrics(self.metrics)
        names = [*(metric.name for metric in self.metrics), *[PERPLEXITY] * self.perplexity]
        require(
            target is None or target.name in names,
            "stop.target_metric.name",
            None if target is None else target.name,
            f"is not a metric of the task, which has {', '.join(names) or 'none'}",
            "define it in the task's file: metrics={…}, or perplexity=True",
        )
        require(
            self.evaluates is None or self.evaluation is None,
            "evaluation",
            self.evaluation,
            "an evaluation task cannot be evaluated itself",
            "leave evaluation out",
        )

    def _check_weighting(self) -> None:
        cap = self.weighting.cap
        require(
            cap is None or cap <= self.max_examples,
            "weighting.cap",
            cap,
            f"is above max_examples = {self.max_examples}, which no weight exceeds",
            "choose a smaller cap, or leave weighting out",
        )
        require(
            self.privacy is None or self.weighting == Weighting(),
            "weighting",
            self.weighting,
            "the weights of a private task are a setting of its privacy",
            "set privacy.weighting to equal or capped instead",
        )
        require(
            not self.is_bound or self.staleness.is_built_in,
            "staleness.kind",
            self.staleness.kind,
            "devices and the noise of a private task rely on the function, so it cannot be an "
            "extension of the servers",
            "use polynomial, hinge or constant",
        )

    def _check_aggregation(self) -> None:
        rule = self.aggregation
        if rule.is_mean:
            return
        require(
            not self.is_secure,
            "aggregation.kind",
            rule.kind,
            "needs single updates, and secure aggregation reveals only their sum",
            "use mean; a clip bounds what one device can change",
        )
        require(
            self.privacy is None,
            "aggregation.kind",
            rule.kind,
            "the noise of a private task hides one update in a sum, not in another function",
            "use mean; privacy.clip bounds what one device can change",
        )
        require(
            self.durability == "commit",
            "durability",
            self.durability,
            f"with the rule {rule.kind}, updates are written before they are acknowledged",
            "use commit, or aggregation.kind=mean",
        )
        require(
            self.weighting.kind == "equal" or not rule.ignores_weights,
            "weighting.kind",
            self.weighting.kind,
            f"the rule {rule.kind} counts all updates the same: a client states its examples "
            "itself, so weights would undo the protection",
            "set weighting.kind=equal",
        )
        goal, trim = self.aggregation_goal, rule.trim
        require(
            rule.kind != "trimmed_mean" or math.floor(trim * goal) >= 1,
            "aggregation.trim",
            trim,
            f"trims nothing from {goal} updates",
            f"use at least {1 / goal:.3g}, or a larger aggregation goal",
        )

    def _check_upload_bits(self) -> None:
        bits, field = self.requirements.upload_bits, "requirements.upload_bits"
        require(bits in (8, 16, 32), field, bits, "is not 8, 16 or 32", "use 8, 16 or 32")
        require(
            bits != 8 or not self.is_secure,
            field,
            bits,
            "masked updates have words of 32 or 16 bits: 8 would leave no levels for a sum",
            "use 16, or leave out secure_aggregation",
        )
        require(
            bits == 32 or not self.is_secure or self.privacy is None,
            field,
            bits,
            "masked words of 16 bits have no room for noise: rounding at random makes updates "
            "longer than the clip that the noise is scaled to",
            "leave it out, or leave out privacy",
        )

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

    def _check_privacy(self) -> None:
        require(
            self.aggregation_goal >= MIN_PRIVATE_GOAL,
            "aggregation_goal",
            self.aggregation_goal,
            f"must be at least {MIN_PRIVATE_GOAL} with privacy",
            "the members of a sum share the noise: use a hundred or more",
        )
        require(
            self.evaluation is None or self.privacy is None or self.privacy.evaluation is not None,
            "evaluation",
            self.evaluation,
            "evaluations of a private task need noise too",
            "set privacy.evaluation, for example PrivateEvaluation(share=0.1)",
        )

    def _check_private_parameters(self) -> None:
        try:
            self._parameters()
        except ParametersError as error:
            raise ConfigError(
                str(error),
                hint="lower aggregation_goal, or choose epsilon, clip or the model differently",
            ) from error

    def _check_secure_aggregation(self, secure: SecureAggregation) -> None:
        goal = self.aggregation_goal
        if secure.threshold is not None:
            require(
                1 <= secure.threshold <= goal,
                "secure_aggregation.threshold",
                secure.threshold,
                f"must be at most aggregation_goal = {goal}"
                if secure.threshold > goal
                else "must be at least 1",
                f"leave it out for {goal}, or choose it between 1 and {goal}",
            )
        if self.clip is None:
            raise ConfigError.of(
                "clip",
                None,
                "secure aggregation needs a norm bound",
                "set clip: the fixed-point encoding is scaled to it",
            )
        if self.privacy is not None:
            self._check_private_parameters()
            return
        ring = RING_16 if self.upload_bits == 16 else RING_32
        levels = fixed_point.levels(goal, ring)
        needed = fixed_point.needed_levels(self.model_length, self.heaviest_examples, ring)
        largest = min(fixed_point.largest_goal(needed, ring), MAX_GOAL)
        remedy = f"lower aggregation_goal (or concurrency) below {largest + 1}"
        if ring == RING_16:
            remedy += ", or use requirements.upload_bits=32"
        require(
            levels >= needed,
            "aggregation_goal",
            goal,
            f"leaves {max(0, levels)} fixed-point levels in {ring.bits} bits for a model of "
            f"{self.model_length} parameters, which needs {needed}",
            remedy,
        )
        require(
            goal <= MAX_GOAL,
            "aggregation_goal",
            goal,
            f"the TSA releases sums of at most {MAX_GOAL} clients",
            remedy,
        )
        step = self.clip / levels
        require(
            step >= _FLOAT32_TINY and goal * self.clip <= _FLOAT32_MAX,
            "clip",
            self.clip,
            "leaves no fixed-point precision: the sum or one step of the grid is not a float32",
            "choose a clip near the norm of real updates, usually between 0.01 and 100",
        )
        is_counted = float(self.clip).is_integer() and self.clip <= levels
        require(
            self.evaluates is None or is_counted,
            "clip",
            self.clip,
            f"must be a whole number of at most {levels}",
            "lower evaluation.clients",
        )
