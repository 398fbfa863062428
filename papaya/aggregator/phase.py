"""What a holder does with a task at the moment."""

from __future__ import annotations

from enum import Enum


class TaskPhase(Enum):
    LOADING = "reading what is durable"
    SERVING = "serving clients"
    HALTED = "waiting for its owner"
    STOPPED = "held by another aggregator"
