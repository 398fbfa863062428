"""What an owner is told about the privacy of a task (docs/privacy.md)."""

from __future__ import annotations

from papaya.cli.output import plural
from papaya.config import TaskConfig

NOT_ALL = "this ε is for this task only; only the device knows what it has spent in total"


def privacy_in_words(config: TaskConfig) -> list[str]:
    """Nothing for a task without privacy."""
    if config.privacy is None:
        return []
    terms = config.privacy.terms
    times = plural(terms.max_participations, "participation")
    spent = (
        f"privacy: ε = {terms.epsilon:.4g} at δ = {terms.delta:g} if the numbers of a "
        f"device are left out, ε = {terms.epsilon_of_replacement:.4g} if they are replaced "
        f"by others; {times} per device, noise_multiplier = {terms.noise_multiplier:g}"
    )
    return [spent, NOT_ALL]
