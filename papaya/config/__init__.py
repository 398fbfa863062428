"""What a person may configure: tasks, servers, devices."""

from papaya.config.deployment import Deployment
from papaya.config.lifecycle import Evaluated, EvaluationPlan, StopRule
from papaya.config.server import DeviceConfig, ServerConfig
from papaya.config.task import (
    MAX_MODEL_LENGTH,
    AsyncFL,
    OptimizerConfig,
    Requirements,
    SecureAggregation,
    SyncFL,
    TaskConfig,
)

__all__ = [
    "MAX_MODEL_LENGTH",
    "AsyncFL",
    "Deployment",
    "DeviceConfig",
    "Evaluated",
    "EvaluationPlan",
    "OptimizerConfig",
    "Requirements",
    "SecureAggregation",
    "ServerConfig",
    "StopRule",
    "SyncFL",
    "TaskConfig",
]
