"""Why sessions of a task ended without an update, as the server's own counters say.

Read from /metrics of the server that answers, which counts for the tasks that its aggregator holds,
since it holds them. A server whose aggregators run apart counts none, so nothing is shown. A device
that refuses a task leaves: why, it tells its owner and nobody else.
"""

from __future__ import annotations

import re

from papaya.cli.admin_client import AdminClient
from papaya.cli.output import plural
from papaya.errors import OperatorError

HINT = (
    "hint: these devices left by themselves; each line `failed` of theirs says why. Do they have "
    "the very file that was submitted?"
)
_METRICS_BYTES = 16 << 20
_COUNTER = r"papaya_task_(?:sessions_aborted|updates_discarded)_total"


def without_update(client: AdminClient, task: str) -> dict[str, int]:
    """How many by reason, the most frequent first; empty when the server does not count them."""
    try:
        text = client.download("/metrics", _METRICS_BYTES)[0].decode(errors="replace")
    except OperatorError:
        return {}
    return counted(text, task)


def counted(metrics: str, task: str) -> dict[str, int]:
    # The order of labels is not specified, and a value may be written as 7, 7.0 or 7e+06.
    name, reason = rf'task="{re.escape(task)}"', r'reason="(\w+)"'
    series = rf"^{_COUNTER}\{{(?:{name},{reason}|{reason},{name})\}} (\S+)$"
    found: dict[str, int] = {}
    for first, second, times in re.findall(series, metrics, re.MULTILINE):
        found[first or second] = found.get(first or second, 0) + int(float(times))
    return {r: found[r] for r in sorted(found, key=lambda r: (-found[r], r)) if found[r]}


def in_words(reasons: dict[str, int]) -> str:
    if not reasons:
        return ""
    listed = ", ".join(f"{times:,} {reason}" for reason, times in reasons.items())
    return f"{plural(sum(reasons.values()), 'session')} so far: {listed}"
