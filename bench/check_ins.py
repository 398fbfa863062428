"""Claim: a check-in costs a selector at most 12 x the CPU of a bare answer.

Devices keep their connections and show a token. Cases: no task wants clients, so each check-in is
rejected at once; a task wants a hundred thousand, so each is held, reported, assigned by the
Coordinator and accepted with a sealed ticket. CPU is user and system of the selector process; the
coordinator's share is given beside it. The peer is an event loop that answers every request with
the same bytes (`_bare_answers.py`), in the same run. The target is 5,000 check-ins per CPU-second,
an earlier target, at the speed of bare answers published before (60,000 per second). Every answer
is read and asserted, and one of the tickets is taken to a join. Run as
`python bench/check_ins.py`; one JSON line per case.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from _devices import CHECK_IN, Device
from _servers import Servers, cpu_s, report, require, running

from papaya.config import AsyncFL, ServerConfig, TaskConfig
from papaya.messages.base import Message
from papaya.messages.participation import Join, Joined
from papaya.messages.selection import Accepted, Rejected

CONNECTIONS, ROUNDS, WARM_UP = 128, 200, 20
BARE_ANSWERS = 12
# All that are accepted here are wanted, though none of them joins.
TASK = TaskConfig(task="bench", concurrency=100_000, model_length=4, regime=AsyncFL(100))


def main() -> None:
    bare_s = bare_answer_s()
    with running(ServerConfig(heartbeat_s=2.0), apart=True) as servers:
        used_s, answers = check_in_s(servers)
        require(all(isinstance(a, Rejected) for a in answers), "a check-in was not rejected")
        say("rejected at once", used_s, bare_s)

        servers.submit(TASK, np.zeros(4, np.float32))
        with closing(Device(servers.devices, servers.token())) as device:
            first = device.check_in()  # the selector knows of the task from here on
        used_s, answers = check_in_s(servers)
        accepted = [answer for answer in answers if isinstance(answer, Accepted)]
        require(len(accepted) == len(answers), "a check-in was not accepted")
        sessions = {answer.session for answer in (first, *accepted)}
        require(len(sessions) == len(accepted) + 1, "a session was given twice")
        with closing(Device(servers.devices, servers.token())) as device:
            joined = device.ask(Join(accepted[-1].ticket))
        require(isinstance(joined, Joined), f"a join was answered {joined}")
        say("held, assigned and accepted", used_s, bare_s)


def say(case: str, used_s: dict[str, float], bare_s: float) -> None:
    ratio = used_s["selector"] / bare_s
    us = {f"{name}_us": round(s * 1e6, 1) for name, s in used_s.items()}
    us["bare_answer_us"] = round(bare_s * 1e6, 1)
    us["per_cpu_s"] = round(1 / used_s["selector"])
    case = f"CPU of a selector per check-in ÷ bare answer, {case}"
    report("check_ins", case, ratio, BARE_ANSWERS, ratio <= BARE_ANSWERS, **us)


def check_in_s(servers: Servers) -> tuple[dict[str, float], list[Message]]:
    """CPU seconds of each process per check-in, and the answers."""
    return measured(servers.devices, servers.token(), servers.cpu_s)


def bare_answer_s() -> float:
    program = str(Path(__file__).with_name("_bare_answers.py"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, program], text=True, **pipes) as process:  # type: ignore[call-overload]
        address = ("127.0.0.1", int(process.stdout.readline()))
        used_s, _ = measured(address, "none", lambda: {"bare": cpu_s(process.pid)})
        process.stdin.close()
    return used_s["bare"]


def measured(
    address: tuple[str, int], token: str, cpu: Callable[[], dict[str, float]]
) -> tuple[dict[str, float], list[Message]]:
    """All connections ask, then all are answered, again and again."""
    answers: list[Message] = []
    before: dict[str, float] = {}
    with ExitStack() as stack:
        devices = [stack.enter_context(closing(Device(address, token))) for _ in range(CONNECTIONS)]
        for rounds in (WARM_UP, ROUNDS):
            before, answers = cpu(), []
            for _ in range(rounds):
                for device in devices:
                    device.send(CHECK_IN)
                answers += [device.answer() for device in devices]
        after = cpu()
    count = len(answers)
    return {name: (after[name] - before[name]) / count for name in after}, answers


if __name__ == "__main__":
    main()
