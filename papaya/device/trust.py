"""The device's checks of a TSA before it masks an update, and the seal.

The checks, in this order: the quote; the measurement in the public log; the parameters, by the
device's own policy; the signature of the offer. The first failure aborts, and nothing is masked
before all have passed. The log is read from the same place as auditors read it. A checkpoint is
written to disk before it is used, and each checkpoint must extend the earlier ones and the one in
the policy. Without a policy of its owner a device trusts no TSA.

The client asks for one seal per update (`papaya/client/client.py`). Here every call is another
update.

`seal` blocks on the network, on a host that may be hostile: it has half a minute for all files of
the log, and holds no lock meanwhile. `seal_aside` runs it on a daemon thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import TypeAlias

import msgspec
import numpy as np

from papaya.attestation.policy import DevicePolicy
from papaya.attestation.verify import Evidence, Verified, verify_evidence
from papaya.client.work import Seal, Sealed
from papaya.config import Staleness, Weighting
from papaya.config.evaluation import EVALUATION_CLIP, EVALUATION_MAX_STALENESS
from papaya.config.privacy import NORMS_CLIP, PrivacyTerms, evaluation_clip, public_terms
from papaya.credentials.tls import client_context
from papaya.errors import ConfigError, OperatorError, ProtocolError
from papaya.learning.definition import TaskTerms
from papaya.learning.evaluation import evaluation_length
from papaya.learning.parameters import FLOAT32
from papaya.learning.private_evaluation import BINS, private_evaluation_length
from papaya.messages.base import TaskId
from papaya.secagg.errors import SecureAggregationError
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PRIVATE_SCHEME, SCHEME, SCHEME_16, PublicParameters
from papaya.secagg.participant import ParticipantPolicy, Terms, UnsealedUpdate
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.over_http import over_http
from papaya.verifiable_log.reader import CheckpointFile, LogReader, RememberingReader

# How long a verified identity is trusted without reading the log again.
_BELIEVED_S = 600.0
_MOST_BELIEVED = 64
# For all files of the log together; an upload has 120 s unless its server says otherwise.
_LOG_S = 30.0
_DIFFERS = (
    "nothing was masked; compare the task (papaya task show) with this device's task file and with "
    "the policy of --trust"
)


TagOf: TypeAlias = Callable[[bytes], bytes]
"""The device's tag for public parameters with this hash; kept durably (`ledger.py`)."""


def no_tag(parameters_hash: bytes) -> bytes:
    """Of a device without a ledger: it takes part in no private task."""
    raise ProtocolError("this device has no ledger for a private task")


def agreed_policy(
    owner: DevicePolicy,
    task: TaskId,
    terms: TaskTerms,
    *,
    evaluates: bool,
    norms: bool = False,
) -> ParticipantPolicy:
    """The terms under which a device masks: its own copy of the task file or the manifest that it
    has verified, and its owner's limits.

    Requires the larger of the two thresholds. Nothing here comes from a server. A task without a
    clip is refused (ProtocolError), because masked values would be unbounded.
    """
    minimum_threshold = max(owner.minimum_threshold, terms.threshold or 1)
    if terms.privacy and evaluates:
        return _agreed_evaluation(task, terms, terms.privacy, minimum_threshold, norms=norms)
    if evaluates:
        return ParticipantPolicy(
            task=task,
            length=evaluation_length(len(terms.metric_bounds)),
            clip=EVALUATION_CLIP,
            max_examples=1,
            max_staleness=EVALUATION_MAX_STALENESS,
            minimum_threshold=minimum_threshold,
            weighting="none",
            manifest=terms.manifest,
            kind="evaluate" if terms.manifest else "",
        )
    if terms.clip is None:
        raise ProtocolError(f"task {task} has no clip, which secure aggregation requires")
    private = public_terms(terms.privacy) if terms.privacy else {}
    weighting, function = terms.weighting or Weighting(), terms.staleness or Staleness()
    damping = function.damping
    if damping is None:
        raise ProtocolError(f"task {task}: {function.kind} is not a function that a device knows")
    by = {"weighting": "equal"} if weighting.kind == "equal" else {}
    return ParticipantPolicy(
        task=task,
        length=terms.model_length,
        clip=terms.clip,
        max_examples=weighting.cap or terms.max_examples,
        max_staleness=terms.max_staleness,
        damping=damping,
        minimum_threshold=minimum_threshold,
        maximum_staleness=owner.maximum_staleness,
        manifest=terms.manifest,
        aggregation_goal=terms.aggregation_goal,
        threshold=terms.threshold if terms.manifest else None,
        kind="train" if terms.manifest else "",
        **({"scheme": SCHEME_16 if terms.upload_bits else SCHEME} | by | private),
    )


def _agreed_evaluation(
    task: TaskId, terms: TaskTerms, privacy: PrivacyTerms, threshold: int, *, norms: bool
) -> ParticipantPolicy:
    """Of an evaluation or a histogram of norms with noise."""
    found, metrics = privacy.evaluation, len(terms.metric_bounds)
    if found is None:
        raise ProtocolError(f"task {task} has no noise for evaluations")
    return ParticipantPolicy(
        task=task,
        length=BINS if norms else private_evaluation_length(metrics),
        clip=NORMS_CLIP if norms else evaluation_clip(metrics),
        max_examples=1,
        max_staleness=EVALUATION_MAX_STALENESS,
        minimum_threshold=threshold,
        manifest=terms.manifest,
        kind="evaluate" if terms.manifest else "",
        scheme=PRIVATE_SCHEME,
        weighting="equal",
        noise_multiplier=found.noise_multiplier,
        delta=privacy.delta,
        max_participations=found.max_participations,
        expected_weight=1.0,
    )


class Trust:
    """Verifies TSAs by the owner's policy, for one process. Thread-safe."""

    def __init__(
        self,
        policy: DevicePolicy,
        checkpoint: Path,
        now: Callable[[], float],
        *,
        log_s: float = _LOG_S,
        certificates: Path | None = None,
    ) -> None:
        """`certificates`: the authority of the log's host, if not one of the system's."""
        self.policy = policy
        self._tls = client_context(None if certificates is None else str(certificates))
        self._memory = CheckpointFile(checkpoint, policy.log_policy())
        self._now = now
        self._log_s = log_s
        self._lock = Lock()
        self._believed: dict[tuple[bytes, bytes], float] = {}
        try:
            self._reader()
        except (LogError, OSError) as error:
            raise OperatorError(
                f"cannot use the log of this device's policy: {error}",
                hint=f"check log_url and log_checkpoint. If {checkpoint} is damaged, restore "
                "it from a backup; without it this device would accept an older log",
            ) from error

    async def seal_aside(
        self,
        work: Seal,
        terms: TaskTerms,
        *,
        evaluates: bool,
        norms: bool = False,
        tag: TagOf = no_tag,
    ) -> Sealed:
        """Seal on a daemon thread: a slow log delays neither the loop nor the process's end."""
        loop = asyncio.get_running_loop()
        sealed: asyncio.Future[Sealed] = loop.create_future()

        def finish(result: Sealed | Exception) -> None:
            if sealed.done():  # the visit has ended
                return
            if isinstance(result, Exception):
                sealed.set_exception(result)
            else:
                sealed.set_result(result)

        def run() -> None:
            result: Sealed | Exception
            try:
                result = self.seal(work, terms, evaluates=evaluates, norms=norms, tag=tag)
            except Exception as error:
                result = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, result)

        Thread(target=run, name="papaya-seal", daemon=True).start()
        return await sealed

    def seal(
        self,
        work: Seal,
        terms: TaskTerms,
        *,
        evaluates: bool,
        norms: bool = False,
        tag: TagOf = no_tag,
    ) -> Sealed:
        """Make all checks, then seal. Raises ProtocolError at the first check that fails."""
        offered = work.offer
        try:
            parameters = PublicParameters.decode(offered.parameters)
            self._believe(work, parameters)
            policy = agreed_policy(self.policy, work.task, terms, evaluates=evaluates, norms=norms)
            agreed = Terms(offered.identity, parameters, policy)
            update = UnsealedUpdate(
                np.frombuffer(work.update, FLOAT32), work.examples, work.version
            )
            offer = Offer.decode(offered.offer)
            own_tag = tag(parameters.digest()) if parameters.is_private else b""
            done = update.seal(agreed, offer, work.current, self._now(), os.urandom, own_tag)
        except SecureAggregationError as error:
            raise ProtocolError(f"{error.reason}: {error}", hint=_DIFFERS) from error
        except OSError as error:
            raise OperatorError(
                f"cannot store the checkpoint of the log: {error}",
                hint="nothing was masked; check the free space and the permissions of the file",
            ) from error
        return Sealed(done.masked.tobytes(), done.sealed)

    def _believe(self, work: Seal, parameters: PublicParameters) -> None:
        offered, digest = work.offer, parameters.digest()
        known = (offered.identity, digest)
        with self._lock:
            if self._now() < self._believed.get(known, 0.0):
                return
        self._verify(work, digest)
        with self._lock:
            if len(self._believed) >= _MOST_BELIEVED:
                self._believed.clear()
            self._believed[known] = self._now() + _BELIEVED_S

    def _verify(self, work: Seal, digest: bytes) -> Verified:
        offered = work.offer
        # The policy refuses an unknown platform.
        evidence = Evidence(offered.platform, offered.evidence, offered.collateral)  # type: ignore[arg-type]
        try:
            reader = self._reader()
        except LogError as error:
            raise ProtocolError(f"log: {error}") from error
        return verify_evidence(
            evidence,
            identity_key=offered.identity,
            parameters_hash=digest,
            leaf_index=offered.leaf,
            policy=self.policy,
            reader=reader,
            now=self._now(),
        )

    def _reader(self) -> LogReader:
        """A reader that starts from the newest checkpoint seen. For one thread and one reading."""
        fetch = over_http(self.policy.log_url, all_s=self._log_s, tls=self._tls)
        pinned = self.policy.log_checkpoint.encode() or None
        return RememberingReader(fetch, self.policy.log_policy(), self._memory, pinned)


def read_policy(path: Path) -> DevicePolicy:
    """Read the owner's policy, a TOML file."""
    try:
        found: DevicePolicy = msgspec.toml.decode(path.read_bytes(), type=DevicePolicy)
    except OSError as error:
        raise OperatorError(
            f"cannot read {path}: {error.strerror}", hint="check the path of the policy file"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: {error}", hint="docs/secure-aggregation.md lists its fields"
        ) from error
    return found
