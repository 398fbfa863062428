"""One run of the kit: a real server behind a gateway, and one task for each scenario.

The server runs in this process and on this loop, with its own software TSA. A scenario submits its
task, lets the client make its visit, and cancels the task, so that the next scenario has the only
task with client demand.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from msgspec import Struct

from papaya.attestation.policy import DevicePolicy
from papaya.config import (
    AsyncFL,
    Deployment,
    Requirements,
    SecureAggregation,
    ServerConfig,
    TaskConfig,
)
from papaya.conformance.gateway import Gateway
from papaya.conformance.judge import RuleFinding, Transcript, judge
from papaya.conformance.rules import BY_ID, RULES
from papaya.conformance.scenarios import SCENARIOS, Scenario
from papaya.errors import InvariantError, OperatorError
from papaya.learning import parameters
from papaya.server.public_log import own_record
from papaya.server.server import Server
from papaya.tsa.measurement import measure

MODEL_LENGTH = 600
_CHUNK_BYTES = 1024  # three chunks
_GOAL, _THRESHOLD, _CLIP = 4, 2, 1.0
_START_S = 300.0  # for the server or an evaluation to start: a second on an idle machine
_OTHER_BINARY = sha256(b"papaya conformance: another TSA binary").digest()


class ClientSetup(Struct, frozen=True):
    """What the author of a client has to configure.

    `task` is the device's own copy of the task: what its owner agreed to. `policy` names the log
    and its key, which are the root of trust. `state` is a folder that keeps what the client stores
    between two visits of a scenario.
    """

    scenario: str
    explains: str
    server: str
    token: str
    task: dict[str, Any]
    policy: DevicePolicy
    state: Path


MakeVisit = Callable[[ClientSetup], Awaitable[None]]
"""Lets the client make one visit, and returns when it is over."""


class ScenarioResult(Struct, frozen=True):
    """`requests` counts what the client sent; with none, no rule was exercised.

    `rules` are those that the scenario tests; every scenario exercises others as well.
    """

    scenario: str
    explains: str
    requests: int
    findings: tuple[RuleFinding, ...]
    rules: tuple[str, ...] = ()

    @property
    def broken(self) -> list[RuleFinding]:
        return [finding for finding in self.findings if not finding.kept]

    @property
    def is_exercised(self) -> bool:
        """The client got as far as what the scenario tests."""
        found = {finding.rule for finding in self.findings}
        return self.requests > 0 and (not self.rules or not found.isdisjoint(self.rules))


class ConformanceReport(Struct, frozen=True):
    """The results of all scenarios."""

    results: tuple[ScenarioResult, ...]

    @property
    def broken(self) -> list[str]:
        return self._rules(kept=False)

    @property
    def kept(self) -> list[str]:
        return [rule for rule in self._rules(kept=True) if rule not in self.broken]

    @property
    def not_exercised(self) -> list[str]:
        found = {*self.broken, *self.kept}
        return [rule.id for rule in RULES if rule.id not in found]

    @property
    def conforms(self) -> bool:
        """No rule was broken, and the client took part in every scenario."""
        took_part = all(result.requests > 0 for result in self.results)
        return bool(self.kept) and took_part and not self.broken

    def _rules(self, *, kept: bool) -> list[str]:
        named = {f.rule for result in self.results for f in result.findings if f.kept is kept}
        return [rule.id for rule in RULES if rule.id in named]

    def as_json(self) -> dict[str, Any]:
        return {
            "conforms": self.conforms,
            "broken": self.broken,
            "kept": self.kept,
            "not_exercised": self.not_exercised,
            "scenarios": [
                {
                    "scenario": result.scenario,
                    "explains": result.explains,
                    "requests": result.requests,
                    "exercised": result.is_exercised,
                    "rules": [
                        {
                            "rule": finding.rule,
                            "kept": finding.kept,
                            "detail": finding.detail,
                            "specified": BY_ID[finding.rule].where,
                        }
                        for finding in result.findings
                    ],
                }
                for result in self.results
            ],
        }


class Kit:
    """Open it with `opened_kit`; then `play` one scenario after another."""

    def __init__(self, folder: Path, gateway: Gateway, heartbeat_s: float) -> None:
        self._folder = folder
        self._gateway = gateway
        self._heartbeat_s = heartbeat_s
        self._data = folder / "data"
        self._server = self._new_server()
        self._played = 0

    # -- the server -------------------------------------------------------------------------

    def _new_server(self) -> Server:
        config = ServerConfig(
            heartbeat_s=self._heartbeat_s,
            hold_s=2.0,
            min_retry_s=0.2,
            max_retry_s=1.0,
            chunk_bytes=_CHUNK_BYTES,
        )
        return Server(
            Deployment(
                data=str(self._data),
                devices="127.0.0.1:0",
                admin="127.0.0.1:0",
                drain_s=0.01,
                server=config,
            )
        )

    async def start(self) -> None:
        await self._server.start()
        await asyncio.to_thread(record_releases, self._data)  # before any TSA
        self._gateway.server = f"http://{self._server.addresses['devices']}"

    async def stop(self) -> None:
        self._gateway.server = ""
        await self._server.stop()

    async def _restart(self) -> None:
        await self.stop()
        self._server = self._new_server()
        await self.start()

    async def _admin(self, method: str, path: str, body: bytes = b"") -> Any:
        token = (self._data / "admin.token").read_text().strip()
        url = f"http://{self._server.addresses['admin']}/admin/tasks{path}"
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session,
            session.request(method, url, data=body) as response,
        ):
            answer = await response.read()
            if response.status != 200:
                raise InvariantError(f"{method} {path}: {response.status} {answer.decode()}")
            return json.loads(answer)

    # -- scenarios --------------------------------------------------------------------------

    async def play(self, kind: type[Scenario], visit: MakeVisit) -> ScenarioResult:
        scenario = kind(self._heartbeat_s, self._restart)
        config = self._task_of(scenario)
        await self._submit(config)
        evaluation = await self._evaluate(config.task) if scenario.evaluates else None
        self._gateway.seen = []
        self._gateway.perturbs = scenario
        setup = self._setup(scenario, config)
        for _ in range(scenario.visits):
            await visit(setup)
        transcript = Transcript(list(self._gateway.seen), self._heartbeat_s, time.monotonic())
        await self._admin("POST", f"/{config.task}/cancel", b'{"why": "the scenario is over"}')
        if evaluation is not None:
            await self._until_over(evaluation)
        findings: dict[str, RuleFinding] = {}
        for finding in (*scenario.judge(transcript), *judge(transcript)):
            if finding.rule not in findings or findings[finding.rule].kept:
                findings[finding.rule] = finding
        seen = len(transcript.seen)
        return ScenarioResult(
            scenario.name, scenario.explains, seen, tuple(findings.values()), scenario.rules
        )

    def _task_of(self, scenario: Scenario) -> TaskConfig:
        self._played += 1
        secure = SecureAggregation(_THRESHOLD) if scenario.is_secure else None
        return TaskConfig(
            task=f"{scenario.name}-{self._played}",
            concurrency=8,
            model_length=MODEL_LENGTH,
            regime=AsyncFL(aggregation_goal=_GOAL),
            secure_aggregation=secure,
            requirements=Requirements(upload_bits=scenario.upload_bits),
            clip=_CLIP,
            max_examples=100,
            participation_gap_s=scenario.participation_gap_s,
            commit_interval_s=0.05,
            training_timeout_s=600.0,
            upload_timeout_s=600.0,
        )

    async def _submit(self, config: TaskConfig) -> None:
        initial = np.linspace(-1, 1, config.model_length, dtype=np.float32)
        encoded = parameters.encode(initial, {"task": config.task, "version": "0"})
        where = f"/{config.task}/parameters?model_length={config.model_length}"
        stored = await self._admin("PUT", where, encoded)
        new = {"config": config, "parameters": stored["parameters"]}
        await self._admin("POST", "", msgspec.json.encode(new))

    async def _evaluate(self, task: str) -> str:
        """Start an evaluation with one client and pause its task. Wait until only the evaluation
        wants clients.

        A task wants no clients until its holder has reported. So first wait until it wants some:
        otherwise it could want them after this returns.
        """
        async with asyncio.timeout(_START_S):
            await self._until(task, wants=True)
            started = await self._admin("POST", f"/{task}/evaluate", b'{"clients": 1}')
            await self._admin("POST", f"/{task}/pause", b"{}")
            await self._until(task, wants=False)
            await self._until(started["task"], wants=True)
        return str(started["task"])

    async def _until(self, task: str, *, wants: bool) -> None:
        while bool((await self._admin("GET", f"/{task}"))["task"].get("demand")) is not wants:
            await asyncio.sleep(self._heartbeat_s / 10)

    async def _until_over(self, evaluation: str) -> None:
        """Wait for its end: it ends soon after its task, with a result or without."""
        while (await self._admin("GET", f"/{evaluation}"))["task"]["state"] == "running":
            await asyncio.sleep(self._heartbeat_s / 10)

    def _setup(self, scenario: Scenario, config: TaskConfig) -> ClientSetup:
        state = self._folder / "state" / config.task
        state.mkdir(parents=True)
        terms = {
            "task": config.task,
            "secure": scenario.is_secure,
            "length": config.model_length,
            "clip": config.clip,
            "max_examples": config.max_examples,
            "max_staleness": config.max_staleness,
            "threshold": config.threshold,
            "weighting": "examples",
            "upload_bits": scenario.upload_bits,
        }
        policy = DevicePolicy(
            log_key=(self._data / "log.key.pub").read_text().strip(),
            log_url=f"{self._gateway.address}/v1/log",
            platforms=("software",),
            allow_insecure_software=True,
            allow_smt=True,
            minimum_threshold=_THRESHOLD,
        )
        token = (self._data / "device.token").read_text().strip()
        return ClientSetup(
            scenario.name, scenario.explains, self._gateway.address, token, terms, policy, state
        )


def record_releases(data: Path) -> None:
    """Record another binary in the log (for `OtherRecord`), then this installation's TSA binary."""
    if not (data / "log.leaf").exists():
        own_record(data, _OTHER_BINARY)
    own_record(data, measure())


@asynccontextmanager
async def opened_kit(folder: Path, heartbeat_s: float) -> AsyncIterator[tuple[Kit, Gateway]]:
    async with Gateway() as gateway:
        kit = Kit(folder, gateway, heartbeat_s)
        async with asyncio.timeout(_START_S):
            await kit.start()
        try:
            yield kit, gateway
        finally:
            await kit.stop()


def chosen(names: Sequence[str], *, only_clear: bool = False) -> list[type[Scenario]]:
    """The scenarios with these names; without any, all, or all in the clear."""
    known = {scenario.name: scenario for scenario in SCENARIOS}
    if unknown := [name for name in names if name not in known]:
        raise OperatorError(
            f"unknown scenario: {unknown[0]}", hint=f"choose from: {', '.join(known)}"
        )
    if names:
        return [known[name] for name in names]
    return [scenario for scenario in SCENARIOS if not (only_clear and scenario.is_secure)]
