"""Devices on the real network: the Client machine over HTTP, one device or many in a process."""

from papaya.net.device.device import Device
from papaya.net.device.limits import Limits, Pacing
from papaya.net.device.process import DeviceProcess
from papaya.net.device.runtime import DeviceRuntime
from papaya.net.device.training import (
    Assignment,
    ExecutorTrainer,
    ProtocolTrainer,
    Trainer,
    sandboxed,
)

__all__ = [
    "Assignment",
    "Device",
    "DeviceProcess",
    "DeviceRuntime",
    "ExecutorTrainer",
    "Limits",
    "Pacing",
    "ProtocolTrainer",
    "Trainer",
    "sandboxed",
]
