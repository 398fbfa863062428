"""What an owner is told about the privacy of a task (docs/privacy.md)."""

from __future__ import annotations

from collections.abc import Sequence

from papaya.cli.admin_client import AdminClient, task_path
from papaya.cli.output import plural
from papaya.config import PrivacyTerms, TaskConfig
from papaya.config.privacy import rho_of_revisions
from papaya.learning.private_evaluation import BINS, private_evaluation_length
from papaya.privacy.accountant import delta_of_sampler, epsilon_of, mu_of, replacement
from papaya.server.admin.views import RevisionView, TaskView

NOT_ALL = "this ε is for this task only; only the device knows what it has spent in total"


def privacy_in_words(config: TaskConfig, earlier: Sequence[PrivacyTerms] = ()) -> list[str]:
    """Nothing for a task without privacy. `earlier`: the terms of its other revisions and runs."""
    if config.privacy is None:
        return []
    terms = config.privacy.terms
    times = plural(terms.max_participations, "participation")
    noise = f"noise_multiplier = {terms.noise_multiplier:g}"
    if terms.evaluation is not None:
        times += f" and {plural(terms.evaluation.max_participations, 'evaluation')}"
        noise += f" and {terms.evaluation.noise_multiplier:g}"
    lines = [f"privacy: {_guarantee(config, terms.mu)}; {times} per device, {noise}"]
    if others := [each for each in earlier if each != terms]:
        mu = mu_of(rho_of_revisions([terms, *others]))
        lines.append(
            f"privacy: {_guarantee(config, mu)}, for a device that took part under earlier "
            "revisions or runs too, of which the server has the settings"
        )
    return [*lines, NOT_ALL]


def _guarantee(config: TaskConfig, mu: float) -> str:
    assert config.privacy is not None
    terms = config.privacy.terms
    left_out, replaced = (epsilon_of(each, terms.delta) for each in (mu, replacement(mu)))
    words = float(terms.max_participations * config.model_length)
    if terms.evaluation is not None:
        longest = max(BINS, private_evaluation_length(len(config.metrics)))
        words += terms.evaluation.max_participations * longest
    sampler = delta_of_sampler(replaced, words)
    return (
        f"ε = {left_out:.4g} at δ = {terms.delta:g} if the numbers of a device are left out, "
        f"ε = {replaced:.4g} if they are replaced by others (the sampler adds at most "
        f"{sampler:.1g} to δ)"
    )


def earlier_terms(client: AdminClient, name: str, owner: str) -> list[PrivacyTerms]:
    """Of all revisions of all runs of an owner's task that the server still has."""
    views = client.get("/admin/tasks", tuple[TaskView, ...])
    runs = [view.task for view in views if (view.name, view.owner) == (name, owner)]
    found = []
    for run in runs:
        path = task_path(run, "revisions")
        revisions = client.get(path, tuple[RevisionView, ...])
        found += [each.config.privacy.terms for each in revisions if each.config.privacy]
    return found
