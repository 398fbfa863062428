"""Configuration of tasks, servers and devices."""

from papaya.config.combining import Aggregation, Staleness, Weighting
from papaya.config.deployment import Deployment
from papaya.config.evaluation import Evaluated, EvaluationPlan, StopRule
from papaya.config.metrics import MetricBounds, MetricTarget
from papaya.config.optimizer import OptimizerConfig
from papaya.config.privacy import EvaluationTerms, Privacy, PrivacyTerms, PrivateEvaluation
from papaya.config.server import DeviceConfig, ServerConfig
from papaya.config.task import (
    MAX_MODEL_LENGTH,
    AsyncFL,
    Requirements,
    SecureAggregation,
    SyncFL,
    TaskConfig,
)

__all__ = [
    "MAX_MODEL_LENGTH",
    "Aggregation",
    "AsyncFL",
    "Deployment",
    "DeviceConfig",
    "Evaluated",
    "EvaluationPlan",
    "EvaluationTerms",
    "MetricBounds",
    "MetricTarget",
    "OptimizerConfig",
    "Privacy",
    "PrivacyTerms",
    "PrivateEvaluation",
    "Requirements",
    "SecureAggregation",
    "ServerConfig",
    "Staleness",
    "StopRule",
    "SyncFL",
    "TaskConfig",
    "Weighting",
]
