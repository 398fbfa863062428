"""What updates of simulated devices sum up to: slow arithmetic for the auditor to compare with."""

from __future__ import annotations

import numpy as np

from papaya.config import TaskConfig
from papaya.learning.compression import decode_update, encode_update, session_seed
from papaya.learning.parameters import Vector
from papaya.messages.base import SessionId
from papaya.messages.storage import RecordRow
from papaya.sim.protocol_updates import protocol_evaluation, protocol_vector


def is_within_clip(config: TaskConfig, session: SessionId) -> bool:
    """Is the unmasked update of the session's device within this clip?"""
    if config.clip is None or config.evaluates is not None:
        return True
    return float(np.linalg.norm(uploaded(config, session, config.model_length))) <= config.clip


def counted_examples(config: TaskConfig, reported: int) -> int:
    match config.weighting.kind:
        case "equal":
            return 1
        case "capped":
            return min(reported, config.weighting.cap or 0)
    return min(reported, config.max_examples)


def uploaded(terms: TaskConfig, session: SessionId, length: int) -> Vector:
    """The numbers that the server reads of a session's upload."""
    numbers = protocol_vector if terms.evaluates is None else protocol_evaluation
    vector = np.array(numbers(session, length), np.float32)
    if terms.upload_bits == 32:
        return vector
    encoded = encode_update(vector, terms.upload_bits, session_seed(session))
    return decode_update([encoded], length, terms.upload_bits)


def damping(config: TaskConfig, staleness: int) -> float:
    function = config.staleness
    match function.kind:
        case "constant":
            return 1.0
        case "hinge" if staleness <= function.grace:
            return 1.0
        case "hinge":
            return 1.0 / (1.0 + function.slope * (staleness - function.grace))
    return float((1.0 + staleness) ** -function.exponent)


def combined(config: TaskConfig, record: RecordRow, updates: list[Vector]) -> Vector:
    """By the rule of the task, the slow way."""
    if config.aggregation.kind == "median":
        return np.median(updates, axis=0).astype(np.float32)
    norms = [float(np.linalg.norm(update)) for update in updates]
    bound = config.aggregation.factor * float(np.median(norms))
    scales = [1.0 if norm <= bound else bound / norm for norm in norms]
    weights = [member.examples for member in record.members]
    factors = [n * scale / sum(weights) for n, scale in zip(weights, scales, strict=True)]
    total = sum(factor * update for factor, update in zip(factors, updates, strict=True))
    return np.asarray(total, np.float32)
