"""Whether this process can do what a task asks of its server: optimizer, rule, staleness function.

Refused (ConfigError): extensions that this process does not have, or that cannot work with the
task's parameters.
"""

from __future__ import annotations

from typing import Final

from papaya.config import TaskConfig
from papaya.learning.aggregation_rules import aggregation_rule
from papaya.learning.server_optimizer import server_optimizer
from papaya.learning.weighting import staleness_weight

_LONGEST_TRIED: Final = 1_000


def require_methods(config: TaskConfig) -> None:
    server_optimizer(config.optimizer)
    aggregation_rule(config.aggregation)
    if not config.staleness.is_built_in:
        for staleness in range(min(config.max_staleness, _LONGEST_TRIED) + 1):
            staleness_weight(staleness, config.staleness)
