"""What a person may configure: tasks, servers, devices."""

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
    "DeviceConfig",
    "OptimizerConfig",
    "Requirements",
    "SecureAggregation",
    "ServerConfig",
    "SyncFL",
    "TaskConfig",
]
