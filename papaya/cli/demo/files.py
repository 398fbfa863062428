"""The files that `papaya demo` writes for its processes: the task, and what its devices believe.

Server and devices get the same task file, because a device holds a server to what its own file says
about privacy. The policy of the devices is the one that no owner of a real device should write: it
believes software evidence, which is INSECURE.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from papaya.config import AsyncFL, SyncFL
from papaya.errors import PapayaError

_LOGGED_S = 60.0  # until the server has started its TSA and logged it
_POLL_S = 0.05


def write_task(
    path: Path, original: Path, regime: AsyncFL | SyncFL, concurrency: int, *, is_clear: bool
) -> None:
    """The original, and the settings of this run in its last lines."""
    changes = [f"regime={regime!r}", f"concurrency={concurrency}"]
    if is_clear:
        changes.append("secure_aggregation=None")
    last = [
        "",
        "from msgspec import structs",
        "from papaya.config import AsyncFL, SyncFL",
        "",
        f"task = structs.replace(task, {', '.join(changes)})",
    ]
    text = original.read_text(encoding="utf-8") + "\n".join(last) + "\n"
    path.write_text(text, encoding="utf-8")


def write_trust(path: Path, data: Path, devices: str, goal: int) -> None:
    """Believe this server's own log and software evidence, and sums of K or more clients."""
    policy = {
        "log_key": _log_key(data / "log.key.pub"),
        "log_url": f"http://{devices}/v1/log",
        "platforms": ["software"],
        "allow_insecure_software": True,
        "allow_smt": True,
        "minimum_threshold": goal,
    }
    lines = [f"{field} = {json.dumps(value)}\n" for field, value in policy.items()]
    path.write_text("".join(lines), encoding="utf-8")


def _log_key(path: Path) -> str:
    """It is there when the server has started its TSA: soon after the first task."""
    ends_at = time.monotonic() + _LOGGED_S
    while not path.exists():
        if time.monotonic() > ends_at:
            raise PapayaError(
                f"the server has started no TSA within {_LOGGED_S:g} s",
                hint="look at server.log among the logs, or train with --clear",
            )
        time.sleep(_POLL_S)
    return path.read_text(encoding="ascii").strip()
