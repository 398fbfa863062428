"""What a device uploads of an evaluation or a histogram of norms of a private task.

Trainers know nothing of noise: for an evaluation they return the vector of a task without privacy,
and for a histogram an update that is not clipped. Neither leaves the device. Refused: a histogram
for a task without noise, and evaluations if the task has no terms for them.
"""

from __future__ import annotations

import numpy as np

from papaya.client.work import Trained
from papaya.config import EvaluationTerms
from papaya.device.executor import GivenUp
from papaya.learning.definition import TaskTerms
from papaya.learning.evaluation import evaluation_length
from papaya.learning.parameters import FLOAT32
from papaya.learning.private_evaluation import one_hot, private_evaluation
from papaya.learning.weighting import norm
from papaya.messages.participation import Joined


def trained_length(terms: TaskTerms | None, joined: Joined) -> int:
    """How many numbers the trainer returns."""
    if joined.norms:
        _require(terms)
        return joined.model_length
    if terms is not None and _is_private_evaluation(terms, joined):
        return evaluation_length(len(terms.metric_bounds))
    return joined.update_length


def uploaded(trained: Trained, terms: TaskTerms | None, joined: Joined) -> Trained:
    """What the device uploads of it."""
    if joined.norms:
        return Trained(one_hot(norm(np.frombuffer(trained.update, FLOAT32))), 1)
    if terms is None or not _is_private_evaluation(terms, joined):
        return trained
    bounds, most = len(terms.metric_bounds), terms.max_examples
    return Trained(private_evaluation(trained.update, _require(terms), bounds, most), 1)


def _is_private_evaluation(terms: TaskTerms, joined: Joined) -> bool:
    return joined.evaluates and bool(terms.privacy)


def _require(terms: TaskTerms | None) -> EvaluationTerms:
    found = None if terms is None else terms.private_evaluation
    if found is None:
        raise GivenUp("declined", "this task has no noise for evaluations or histograms of norms")
    return found
