"""The parts of a task that its owner writes: model, loss, metrics, batches, client SGD, query.

Paper, "Client Runtime": the executor trains on local data by the task's configuration. Everything
here is the owner's or the device's own; `Task.config` is the part that a server gets to see, and
it holds no code.

Refused: a value that cannot work, with its field and a remedy, at the owner's own line.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from papaya.config import (
    Aggregation,
    AsyncFL,
    EvaluationPlan,
    EvaluationTerms,
    MetricBounds,
    OptimizerConfig,
    Privacy,
    PrivacyTerms,
    Requirements,
    SecureAggregation,
    Staleness,
    StopRule,
    SyncFL,
    TaskConfig,
    Weighting,
)
from papaya.config.checks import Settings, require, require_choice, require_count, require_numbers
from papaya.config.upload_bits import UploadBits
from papaya.errors import ConfigError, InvariantError
from papaya.learning.example_fields import ExampleField
from papaya.learning.schedules import ConstantRate, Schedule

ClientOptimizerName = Literal["sgd", "adam", "adamw"]
ClientPrecision = Literal["float32", "bfloat16"]

ADAM_DEFAULTS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
"""Those of torch.optim.Adam."""

_MAX_RATE = 3.4e38  # the largest float32, nearly


def module_hash(content: bytes, frozen: bytes = b"") -> str:
    """The name under which devices and servers know a task file or a program file.

    128 bits of the file's hash, and 128 bits of the digest of the frozen tensors, if there are any.
    """
    name = "sha256:" + hashlib.sha256(content).hexdigest()[:32]
    if not frozen:
        return name
    return f"{name}.{base64.b64encode(frozen[:16]).decode().rstrip('=')}"


class Examples(Settings, frozen=True, forbid_unknown_fields=True):
    """Which of the device's examples to train on: a collection of its example store."""

    collection: str
    limit: int | None = None
    newest_first: bool = True

    def __post_init__(self) -> None:
        require_numbers(self, "examples.")
        require(
            0 < len(self.collection) <= 64,
            "examples.collection",
            self.collection,
            "must have 1 to 64 characters",
            "use the name of the collection that contains the examples on devices",
        )
        if self.limit is not None:
            require_count("examples.limit", self.limit)


class ClientSGD(Settings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a client trains. It trains on at most `max_examples`, which also caps its weight.

    The steps are those of `torch.optim`: SGD, with `momentum` and `nesterov`; Adam and AdamW, with
    `beta1`, `beta2` and `epsilon`. `proximal` is the μ of FedProx: the loss that is minimised has a
    term μ/2 · ‖w − w₀‖², where w₀ is the downloaded model. `max_gradient_norm` bounds the L2 norm
    of the gradient of each step, before the optimizer uses it. `precision`: with "bfloat16" torch
    computes losses and gradients in bfloat16 where its autocast does; parameters, steps and updates
    are float32. Only for the torch engine.

    Fields from `optimizer` on are unset if they have no effect: a manifest has one encoding, and
    those that were signed before there were such fields keep theirs.
    """

    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    epochs: int = 1
    batch_size: int = 32
    max_examples: int = 1500
    optimizer: ClientOptimizerName | UnsetType = UNSET
    beta1: float | UnsetType = UNSET
    beta2: float | UnsetType = UNSET
    epsilon: float | UnsetType = UNSET
    nesterov: bool | UnsetType = UNSET
    proximal: float | UnsetType = UNSET
    max_gradient_norm: float | UnsetType = UNSET
    schedule: Schedule | UnsetType = UNSET
    precision: ClientPrecision | UnsetType = UNSET

    def __post_init__(self) -> None:
        require_numbers(self, "client.")
        require(
            0 < self.rate <= _MAX_RATE,
            "client.rate",
            self.rate,
            f"must be above zero and at most {_MAX_RATE:g}",
            "try 0.1, then factors of three around it",
        )
        require(
            0 <= self.momentum < 1,
            "client.momentum",
            self.momentum,
            "must be at least 0 and below 1",
            "leave it out for plain SGD",
        )
        require(
            0 <= self.weight_decay < 1 / self.rate,
            "client.weight_decay",
            self.weight_decay,
            f"must be at least 0 and below 1 / rate = {1 / self.rate:g}",
            "leave it out, or try 0.0001",
        )
        for field in ("epochs", "batch_size", "max_examples"):
            require_count(f"client.{field}", getattr(self, field))
        self._check_optimizer()
        for field, remedy in (
            ("proximal", "leave it out, or try 0.01"),
            ("max_gradient_norm", "leave it out, or try 1.0"),
        ):
            value = getattr(self, field) or 0.0
            require(
                0 <= value <= _MAX_RATE,
                f"client.{field}",
                value,
                f"must be at least 0 and at most {_MAX_RATE:g}",
                remedy,
            )
        for field in ("nesterov", "proximal", "max_gradient_norm"):
            if not getattr(self, field):
                structs.force_setattr(self, field, UNSET)
        if self.schedule == ConstantRate():
            structs.force_setattr(self, "schedule", UNSET)
        precision = self.precision or "float32"
        require_choice("client.precision", precision, get_args(ClientPrecision))
        if precision == "float32":
            structs.force_setattr(self, "precision", UNSET)

    def _check_optimizer(self) -> None:
        """Makes the settings of Adam explicit, and refuses those of another optimizer."""
        name = self.optimizer or "sgd"
        require_choice("client.optimizer", name, get_args(ClientOptimizerName))
        if name == "sgd":
            structs.force_setattr(self, "optimizer", UNSET)
        for field, default in ADAM_DEFAULTS.items():
            if name == "sgd":
                value = getattr(self, field)
                remedy = 'leave it out, or set optimizer="adam"'
                require(value is UNSET, f"client.{field}", value, "is for Adam and AdamW", remedy)
                continue
            if getattr(self, field) is UNSET:
                structs.force_setattr(self, field, default)
            value, is_beta = getattr(self, field), field != "epsilon"
            require(
                0 <= value < 1 if is_beta else 0 < value <= _MAX_RATE,
                f"client.{field}",
                value,
                "must be at least 0 and below 1" if is_beta else "must be above zero",
                f"leave it out for {default:g}",
            )
        sgd_only = name == "sgd" or (not self.momentum and not self.nesterov)
        remedy = 'leave momentum and nesterov out, or set optimizer="sgd"'
        require(sgd_only, "client.optimizer", name, "has no momentum of SGD", remedy)
        has_momentum = bool(self.momentum) or not self.nesterov
        require(has_momentum, "client.nesterov", True, "needs momentum", "set momentum, e.g. 0.9")

    def steps(self, examples: int) -> int:
        """How many steps a client with so many examples makes."""
        return self.epochs * math.ceil(min(examples, self.max_examples) / self.batch_size)

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of one of `steps` steps; the first step is 0."""
        return self.rate * self.schedule.factor(step, steps) if self.schedule else self.rate

    @property
    def adam(self) -> tuple[float, float, float]:
        """`beta1`, `beta2` and `epsilon`, of Adam and AdamW."""
        if self.beta1 is UNSET or self.beta2 is UNSET or self.epsilon is UNSET:
            raise InvariantError(f"{self} is not Adam")
        return self.beta1, self.beta2, self.epsilon

    @property
    def beyond_plain(self) -> dict[str, object]:
        """What plain SGD with a constant rate does not have: the fields and their values."""
        plain = ClientSGD(
            rate=self.rate,
            epochs=self.epochs,
            batch_size=self.batch_size,
            max_examples=self.max_examples,
        )
        both = ((field, getattr(self, field)) for field in self.__struct_fields__)
        return {field: value for field, value in both if value != getattr(plain, field)}


class Metric(Settings, frozen=True, eq=False):
    """What an evaluation measures beside the loss. `compute(module, *batch)` returns a number for
    each example, or their mean; `low` and `high` are its bounds.
    """

    compute: Callable[..., Any]
    low: float = 0.0
    high: float = 1.0


class TaskTerms(Struct, frozen=True):
    """The privacy settings of a task file, which the device compares with the server's."""

    secure: bool
    model_length: int
    max_examples: int
    max_staleness: int
    clip: float | None
    threshold: int | None
    manifest: str = ""
    """The digest of the signed manifest that has these settings; empty for a task file."""
    aggregation_goal: int | None = None
    """The aggregation goal that the manifest states for a secure task."""
    metrics: tuple[MetricBounds, ...] | UnsetType = UNSET
    """What an evaluation uploads beside the loss. Unset if it is nothing: program files have one
    encoding, and those without metrics have no such field."""
    privacy: PrivacyTerms | UnsetType = UNSET
    collection: str | UnsetType = UNSET
    """The examples that the task uses. Unset in a program file, which names them elsewhere."""
    weighting: Weighting | UnsetType = UNSET
    staleness: Staleness | UnsetType = UNSET
    """Both unset if they are the defaults, as `metrics` is."""
    task: str | UnsetType = UNSET
    """The name in the device's own file. Participations in a private task count under it, whatever
    name a server uses. Unset in program files and manifests, which have it elsewhere."""
    upload_bits: Literal[16] | UnsetType = UNSET
    """Of a masked word. Unset if it is 32, and for a task in the clear."""
    keeps_tensors: bool | UnsetType = UNSET
    """Whether devices may keep tensors of the model. Unset if that is unknown: manifests do not say
    it, so a device finds out when it tries the program."""

    @classmethod
    def of(cls, config: TaskConfig) -> TaskTerms:
        return cls(
            secure=config.is_secure,
            model_length=config.model_length,
            max_examples=config.max_examples,
            max_staleness=config.max_staleness,
            clip=config.clip,
            threshold=config.threshold,
            metrics=config.metrics or UNSET,
            privacy=UNSET if config.privacy is None else config.privacy.terms,
            weighting=UNSET if config.weighting == Weighting() else config.weighting,
            staleness=UNSET if config.staleness == Staleness() else config.staleness,
            upload_bits=16 if config.is_secure and config.upload_bits == 16 else UNSET,
        )

    @property
    def metric_bounds(self) -> tuple[MetricBounds, ...]:
        return self.metrics or ()

    @property
    def private_evaluation(self) -> EvaluationTerms | None:
        """The noise of evaluations and histograms of norms, if there is any."""
        return self.privacy.evaluation if self.privacy else None


_KINDS = {
    "name": str,
    "examples": Examples,
    "client": ClientSGD,
    "optimizer": OptimizerConfig,
    "requirements": Requirements,
    "stop": StopRule,
    "staleness": Staleness,
    "weighting": Weighting,
    "aggregation": Aggregation,
}
"""What some fields of a Task must be."""


class Task(Settings, frozen=True, kw_only=True, eq=False):
    """What devices train, on what, and how the server combines it.

    `batch`: a function, or the fields of an example (`papaya/learning/example_fields.py`).

    `loss`: returns the mean over the batch, or one loss for each example. The executorch engine
    needs fields and one loss for each example.

    `metrics`: by name, what an evaluation measures beside the loss; a plain function has the bounds
    0 and 1. The executorch engine needs one number for each example. `perplexity`: show exp(loss).

    `frozen`: a safetensors file with tensors that the model holds and does not train, such as a
    base model, under their names in the model. They replace those that `model` makes, and travel to
    devices in a file of their own. The path is relative to the task file.

    `train`: a training loop of your own, which changes the module in place
    (`papaya/learning/torch/local_training.py`). Only for the torch engine.

    `personal`: patterns of names of parameters that stay on the device, such as "head.*". Each
    device trains its own and keeps them between participations. `batch_norm`: what happens to the
    running statistics of BatchNorm: "averaged", as parameters are, or "local", kept on the device.

    `upload_bits`: 16 or 8 for updates of half or a quarter of the size, rounded at random.

    `sample`: a few stored examples, if given, are tried whenever the file is loaded, so that a
    mistake in `batch` or `loss` is found before a device meets it.
    """

    name: str
    model: Callable[[], Any]
    loss: Callable[..., Any]
    batch: Callable[[list[bytes]], tuple[Any, ...]] | Sequence[ExampleField]
    examples: Examples
    client: ClientSGD
    concurrency: int
    regime: AsyncFL | SyncFL = AsyncFL()
    optimizer: OptimizerConfig = OptimizerConfig()
    requirements: Requirements = Requirements()
    secure_aggregation: SecureAggregation | None = None
    training_timeout_s: float = 240.0
    upload_timeout_s: float = 120.0
    clip: float | None = None
    over_clip: Literal["refuse", "clip"] = "refuse"
    participation_gap_s: float = 3600.0
    max_participations: int | None = None
    keep_versions: int = 5
    commit_interval_s: float = 0.25
    durability: Literal["commit", "step"] = "commit"
    stop: StopRule = StopRule()
    evaluation: EvaluationPlan | None = None
    metrics: Mapping[str, Metric | Callable[..., Any]] = {}
    perplexity: bool = False
    frozen: str | None = None
    train: Callable[[Any], object] | None = None
    personal: Sequence[str] = ()
    batch_norm: Literal["local", "averaged"] | None = None
    privacy: Privacy | None = None
    staleness: Staleness = Staleness()
    weighting: Weighting = Weighting()
    aggregation: Aggregation = Aggregation()
    upload_bits: UploadBits = 32
    sample: Sequence[bytes] = ()

    def __post_init__(self) -> None:
        if self.privacy is not None and self.clip is None:
            structs.force_setattr(self, "clip", self.privacy.clip)
        for field in ("model", "loss", "train"):
            value = getattr(self, field)
            is_given = callable(value) or (field == "train" and value is None)
            require(is_given, field, value, "must be callable", f"give a function: {field}=")
        require(
            callable(self.batch) or self.fields is not None,
            "batch",
            self.batch,
            "must be callable, or fields",
            "give a function: batch=, or fields: batch=(Numbers(3),)",
        )
        for field, kind in _KINDS.items():
            value = getattr(self, field)
            remedy = f"write {field}={kind.__name__}(...)"
            require(isinstance(value, kind), field, value, f"must be a {kind.__name__}", remedy)
        for name, metric in self.metrics.items():
            require(
                isinstance(metric, Metric) or callable(metric),
                f"metrics[{name!r}]",
                metric,
                "must be callable, or a Metric",
                "give a function of the module and the batch, or Metric(function, low=0, high=1)",
            )
        require(
            not isinstance(self.personal, str)
            and all(pattern and str(pattern) == pattern for pattern in self.personal),
            "personal",
            self.personal,
            "must be patterns of names of parameters",
            'give a list: personal=["head.*"]',
        )
        if self.batch_norm is not None:
            require_choice("batch_norm", self.batch_norm, ("averaged", "local"))
        if self.requirements != Requirements(
            min_memory_mb=self.requirements.min_memory_mb, labels=self.requirements.labels
        ):
            raise ConfigError.of(
                "requirements",
                self.requirements,
                "all others follow from this file",
                "give only min_memory_mb and labels; upload_bits is a field of Task",
            )
        self._check_types()

    def _check_types(self) -> None:
        for value in (self.examples, self.client, self.config(model_length=1, module=None)):
            try:
                msgspec.convert(msgspec.to_builtins(value), type(value))
            except msgspec.ValidationError as error:
                raise ConfigError(
                    f"{type(value).__name__}: {error}", hint="give a value of that type"
                ) from error

    @property
    def keeps_tensors(self) -> bool:
        """Whether devices may keep tensors of the model between participations."""
        return bool(self.personal) or self.batch_norm == "local"

    @property
    def fields(self) -> tuple[ExampleField, ...] | None:
        """The fields of an example; None if `batch` is a function."""
        fields = () if callable(self.batch) else tuple(self.batch)
        return fields if fields and all(isinstance(f, ExampleField) for f in fields) else None

    @property
    def metric_functions(self) -> list[Callable[..., Any]]:
        """In the order of `metric_bounds`."""
        return [m.compute if isinstance(m, Metric) else m for m in self.metrics.values()]

    @property
    def metric_bounds(self) -> tuple[MetricBounds, ...]:
        metrics = {n: m if isinstance(m, Metric) else Metric(m) for n, m in self.metrics.items()}
        return tuple(MetricBounds(n, float(m.low), float(m.high)) for n, m in metrics.items())

    def config(
        self, model_length: int, module: str | None, engine: str = "torch", averaged: int = 0
    ) -> TaskConfig:
        """The configuration that a server gets: no code, only numbers and names.

        `averaged`: how many values at the end of the model are statistics.
        """
        return TaskConfig(
            task=self.name,
            concurrency=self.concurrency,
            model_length=model_length,
            regime=self.regime,
            optimizer=structs.replace(self.optimizer, averaged=averaged),
            requirements=structs.replace(
                self.requirements, engine=engine, module=module, upload_bits=self.upload_bits
            ),
            secure_aggregation=self.secure_aggregation,
            training_timeout_s=self.training_timeout_s,
            upload_timeout_s=self.upload_timeout_s,
            max_examples=self.client.max_examples,
            clip=self.clip,
            over_clip=self.over_clip,
            participation_gap_s=self.participation_gap_s,
            max_participations=self.max_participations,
            keep_versions=self.keep_versions,
            commit_interval_s=self.commit_interval_s,
            durability=self.durability,
            stop=self.stop,
            evaluation=self.evaluation,
            metrics=self.metric_bounds,
            perplexity=self.perplexity,
            privacy=self.privacy,
            staleness=self.staleness,
            weighting=self.weighting,
            aggregation=self.aggregation,
        )
