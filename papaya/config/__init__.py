"""Configuration of tasks, servers and devices."""

from papaya.config.combining import Aggregation, Staleness, Weighting
from papaya.config.deployment import Deployment
from papaya.config.evaluation import Evaluated, EvaluationPlan, StopRule
from papaya.config.metrics import MetricBounds, MetricTarget
from papaya.config.optimizer import OptimizerConfig
from papaya.config.privacy import EvaluationTerms, Privacy, PrivacyTerms, PrivateEvaluation
from papaya.config.regime import AsyncFL, SyncFL
from papaya.config.requirements import Requirements
from papaya.config.server import DeviceConfig, ServerConfig
from papaya.config.task import SecureAggregation, TaskConfig
from papaya.config.task_checks import MAX_MODEL_LENGTH

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
