"""`papaya conformance`: does a client keep the rules of the protocol's page?

Starts a server on this machine and runs one scenario after another. With a command, it
starts the command for each scenario; without one, it prints what to configure and waits for a
visit. Exits with 0 if no rule was broken, and with 1 otherwise. `--vectors` writes test vectors
instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from papaya.attestation.policy import DevicePolicy
from papaya.cli.output import (
    Commands,
    FormatOptions,
    add_format,
    bind,
    make_folder,
    note,
    plural,
    positive,
    print_data,
    print_json,
    writing,
)
from papaya.conformance.gateway import Gateway
from papaya.conformance.kit import (
    ClientSetup,
    ConformanceReport,
    MakeVisit,
    ScenarioResult,
    chosen,
    opened_kit,
)
from papaya.conformance.rules import BY_ID
from papaya.conformance.scenarios import SCENARIOS
from papaya.conformance.vectors.vectors import all_vectors
from papaya.errors import OperatorError
from papaya.messages.participation import Aborted, Completed, Leave, Refused

_QUIET_HEARTBEATS = 3
_ENDS = (Completed, Aborted, Refused)
_TERMINATED_S = 5.0
_STDERR = 2


@dataclass(frozen=True, kw_only=True)
class ConformanceOptions(FormatOptions):
    command: tuple[str, ...] = ()
    scenario: tuple[str, ...] = ()
    clear: bool = False
    heartbeat: float = 1.0
    patience: float = 120.0
    vectors: Path | None = None


def add_to(commands: Commands) -> None:
    listed = "\n".join(f"  {kind.name:<20}{kind.explains}" for kind in SCENARIOS)
    parser = commands.add_parser(
        "conformance",
        description="Test a client against the protocol: run it through scenarios with and "
        "without faults,\nand report which rules of docs/spec/protocol.md it kept and broke.",
        epilog=f"scenarios:\n{listed}\n\nCOMMAND gets its configuration in environment "
        "variables;\nsee docs/write-a-client.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command",
        nargs="*",
        metavar="COMMAND",
        help="command that makes one visit, started for each scenario; write it after --",
    )
    scenarios = parser.add_mutually_exclusive_group()
    scenarios.add_argument(
        "--scenario",
        action="append",
        metavar="NAME",
        help="run only this scenario; may be repeated",
    )
    scenarios.add_argument(
        "--clear",
        action="store_true",
        help="leave out the scenarios with secure aggregation, for clients without it",
    )
    parser.add_argument(
        "--heartbeat", type=positive, metavar="S", help="seconds between two heartbeats"
    )
    parser.add_argument(
        "--patience", type=positive, metavar="S", help="seconds to wait for one visit"
    )
    parser.add_argument(
        "--vectors", type=Path, metavar="DIR", help="write test vectors to this folder, and exit"
    )
    add_format(parser)
    bind(parser, ConformanceOptions, run)


def run(options: ConformanceOptions) -> int:
    if options.vectors is not None:
        return _write_vectors(options.vectors)
    report = asyncio.run(_play(options))
    if options.is_json:
        print_json(report.as_json())
    else:
        print_data(_summary(report))
    return 0 if report.conforms else 1


def _write_vectors(folder: Path) -> int:
    make_folder(folder)
    for name, cases in all_vectors().items():
        path = folder / f"{name}.json"
        with writing(path):
            path.write_bytes(msgspec.json.format(msgspec.json.encode(cases), indent=1) + b"\n")
        invalid = sum(case["verdict"] == "invalid" for case in cases)
        note(f"{path}: {plural(len(cases), 'case')}, {invalid} of them invalid")
    return 0


async def _play(options: ConformanceOptions) -> ConformanceReport:
    scenarios = chosen(options.scenario, only_clear=options.clear)
    results: list[ScenarioResult] = []
    with tempfile.TemporaryDirectory(prefix="papaya-conformance-") as folder:
        async with opened_kit(Path(folder), options.heartbeat) as (kit, gateway):
            visit = _commanded(options) if options.command else _awaited(options, gateway)
            for number, scenario in enumerate(scenarios, 1):
                note(f"[{number}/{len(scenarios)}] {scenario.name}: {scenario.explains}")
                results.append(await kit.play(scenario, visit))
                for finding in results[-1].broken:
                    note(f"    broken: {finding.rule}: {finding.detail}")
    return ConformanceReport(tuple(results))


def _commanded(options: ConformanceOptions) -> MakeVisit:
    async def visit(setup: ClientSetup) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *options.command,
                env={**os.environ, **_environment(setup)},
                stdout=_STDERR,  # stdout is for the report
                start_new_session=True,
            )
        except OSError as error:
            raise OperatorError(
                f"cannot start {shlex.join(options.command)}: {error.strerror}",
                hint="write the command of your client after --",
            ) from error
        try:
            async with asyncio.timeout(options.patience):
                await process.wait()
        except TimeoutError:
            note(f"    the client was stopped: it ran for more than {options.patience:g} s")
        finally:
            await _end(process)

    return visit


async def _end(process: asyncio.subprocess.Process) -> None:
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _TERMINATED_S)


def _environment(setup: ClientSetup) -> dict[str, str]:
    """What a client has to know. Files are in the folder of the scenario's state."""
    token, task, policy = (setup.state / name for name in ("token", "task.json", "policy.toml"))
    token.write_text(f"{setup.token}\n")
    task.write_bytes(msgspec.json.encode(setup.task))
    policy.write_text(_toml(setup.policy))
    return {
        "PAPAYA_SERVER": setup.server,
        "PAPAYA_TOKEN": setup.token,
        "PAPAYA_TOKEN_FILE": str(token),
        "PAPAYA_TASK_FILE": str(task),
        "PAPAYA_POLICY_FILE": str(policy),
        "PAPAYA_STATE": str(setup.state),
        "PAPAYA_SCENARIO": setup.scenario,
    }


def _toml(policy: DevicePolicy) -> str:
    """The settings that differ from their defaults. Their JSON is also TOML."""
    given = msgspec.to_builtins(policy)
    defaults = msgspec.to_builtins(DevicePolicy(log_key=policy.log_key))
    changed = {name: value for name, value in given.items() if value != defaults[name]}
    settings = {"log_key": policy.log_key, **changed}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def _awaited(options: ConformanceOptions, gateway: Gateway) -> MakeVisit:
    """Wait for a client that its author starts: until its visit is over and it is quiet."""

    async def visit(setup: ClientSetup) -> None:
        note("    waiting for a client with this configuration:")
        for name, value in _environment(setup).items():
            note(f"      {name}={value}")
        before = len(gateway.seen)
        quiet_s = _QUIET_HEARTBEATS * options.heartbeat
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.patience):
                await _until(gateway, lambda: _is_over(gateway, before))
                while await _changes(gateway, quiet_s):
                    pass

    return visit


def _is_over(gateway: Gateway, before: int) -> bool:
    return any(
        isinstance(seen.answer, _ENDS) or isinstance(seen.message, Leave)
        for seen in gateway.seen[before:]
    )


async def _until(gateway: Gateway, holds: Callable[[], bool]) -> None:
    while not holds():
        gateway.changed.clear()
        await gateway.changed.wait()


async def _changes(gateway: Gateway, within_s: float) -> bool:
    gateway.changed.clear()
    try:
        await asyncio.wait_for(gateway.changed.wait(), within_s)
    except TimeoutError:
        return False
    return True


def _summary(report: ConformanceReport) -> str:
    lines = []
    for result in report.results:
        if result.broken:
            state = "broken"
        elif not result.requests:
            state = "no request arrived"
        else:
            state = "kept" if result.is_exercised else "not exercised"
        lines.append(f"{result.scenario:<20}{state}")
        lines += [f"  {f.rule}: {f.detail}" for f in result.broken]
    lines.append("")
    for rule in report.broken:
        lines.append(f"broken: {rule}: {BY_ID[rule].text} ({BY_ID[rule].where})")
    lines.append(f"kept: {', '.join(report.kept) or 'none'}")
    lines.append(f"not exercised: {', '.join(report.not_exercised) or 'none'}")
    return "\n".join(lines)
