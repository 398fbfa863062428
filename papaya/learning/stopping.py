"""The rules that end a task, as one pure function.

Target and patience use the mean loss per example on held-out data of devices. The aggregator
enforces the number of versions; the other rules are here. Losses are not smoothed: a single good
evaluation reaches a target.
"""

from __future__ import annotations

from collections.abc import Sequence

from papaya.config import StopRule


def verdict(rule: StopRule, submitted: float, now: float, losses: Sequence[float]) -> str | None:
    """Why the task ends now, in words for its owner, or None.

    `losses`: one for each evaluation since the task began or was rolled back, oldest first. Hours
    count from the submission, pauses included.
    """
    if rule.target_loss is not None and losses and losses[-1] <= rule.target_loss:
        return f"loss {losses[-1]:.4g} has reached the target of {rule.target_loss:g}"
    if rule.patience is not None and evaluations_without_gain(losses) >= rule.patience:
        return f"no improvement on loss {min(losses):.4g} in {rule.patience} evaluations"
    if rule.hours is not None and now >= submitted + 3600 * rule.hours:
        return f"reached the limit of {rule.hours:g} hours"
    return None


def evaluations_without_gain(losses: Sequence[float]) -> int:
    """How many evaluations came after the first one with the lowest loss."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0
