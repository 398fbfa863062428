"""Whom a device masks its updates for: the checks before a seal, and the seal.

DESIGN 7, order of checks: the quote, the measurement in the public log, the parameters by the
device's own policy, the signature of the offer; it aborts on the first that fails, and nothing is
masked before. The log is read where auditors read it; its last checkpoint is kept on disk and the
next one must continue it. Without a policy of its owner a device believes nobody. Calls block on
the network: they belong on a thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import msgspec
import numpy as np

from papaya.attestation.policy import DevicePolicy
from papaya.attestation.verify import Evidence, Verified, verify_evidence
from papaya.client.executor import TaskTerms
from papaya.client.work import Seal, Sealed
from papaya.config.lifecycle import EVALUATION_CLIP, EVALUATION_MAX_STALENESS
from papaya.errors import ConfigError, OperatorError, ProtocolError
from papaya.learning.evaluation import EVALUATION_LENGTH
from papaya.learning.parameters import FLOAT32
from papaya.messages.base import TaskId
from papaya.secagg.errors import SecureAggregationError
from papaya.secagg.offer import Offer
from papaya.secagg.parameters import PublicParameters
from papaya.secagg.participant import Policy, Terms, UnsealedUpdate
from papaya.verifiable_log.errors import LogError
from papaya.verifiable_log.reader import LogReader, over_http

# Believed for so long without asking the log again: an identity key lives as long as its process.
_BELIEVED_S = 600.0
_MOST_BELIEVED = 64


class Trust:
    """One process's view of trusted parties, by its owner's policy. Threads may share it."""

    def __init__(self, policy: DevicePolicy, checkpoint: Path, now: Callable[[], float]) -> None:
        self.policy = policy
        self._checkpoint = checkpoint
        self._now = now
        self._lock = Lock()
        remembered = checkpoint.read_bytes() if checkpoint.exists() else None
        if remembered is None and policy.log_checkpoint:
            remembered = policy.log_checkpoint.encode()
        try:
            self._reader = LogReader(over_http(policy.log_url), policy.log_policy(), remembered)
        except LogError as error:
            raise OperatorError(
                f"the log of this device's policy cannot be used: {error}",
                hint=f"look at log_url, and at {checkpoint} if the log was replaced",
            ) from error
        self._believed: dict[tuple[bytes, bytes], float] = {}

    def seal(self, work: Seal, terms: TaskTerms, *, evaluates: bool) -> Sealed:
        """Raises ProtocolError at the first check that fails."""
        offered = work.offer
        try:
            parameters = PublicParameters.decode(offered.parameters)
            self._believe(work, parameters)
            policy = self._policy(work.task, terms, evaluates=evaluates)
            agreed = Terms(offered.identity, parameters, policy)
            update = UnsealedUpdate(
                np.frombuffer(work.update, FLOAT32), work.examples, work.version
            )
            offer = Offer.decode(offered.offer)
            done = update.seal(agreed, offer, work.current, self._now(), os.urandom)
        except SecureAggregationError as error:
            raise ProtocolError(f"{error.reason}: {error}") from error
        return Sealed(done.masked.tobytes(), done.sealed)

    def _believe(self, work: Seal, parameters: PublicParameters) -> None:
        offered, digest = work.offer, parameters.digest()
        known = (offered.identity, digest)
        with self._lock:
            if self._now() < self._believed.get(known, 0.0):
                return
            self._verify(work, digest)
            if len(self._believed) >= _MOST_BELIEVED:
                self._believed.clear()
            self._believed[known] = self._now() + _BELIEVED_S

    def _verify(self, work: Seal, digest: bytes) -> Verified:
        offered = work.offer
        # The platform's name is checked by the policy: whatever is no platform is refused there.
        evidence = Evidence(offered.platform, offered.evidence, offered.collateral)  # type: ignore[arg-type]
        found = verify_evidence(
            evidence,
            identity_key=offered.identity,
            parameters_hash=digest,
            leaf_index=offered.leaf,
            policy=self.policy,
            reader=self._reader,
            now=self._now(),
        )
        self._remember()
        return found

    def _remember(self) -> None:
        """Before anything is masked: a log that was seen must not be unseen."""
        note = self._reader.remembered
        if note is not None:
            temporary = self._checkpoint.with_suffix(".new")
            temporary.write_bytes(note)
            os.replace(temporary, self._checkpoint)

    def _policy(self, task: TaskId, terms: TaskTerms, *, evaluates: bool) -> Policy:
        if evaluates:
            return Policy(
                task=task,
                length=EVALUATION_LENGTH,
                clip=EVALUATION_CLIP,
                max_examples=1,
                max_staleness=EVALUATION_MAX_STALENESS,
                minimum_threshold=self.policy.minimum_threshold,
                weighting="none",
            )
        if terms.clip is None:
            raise ProtocolError(f"task {task} has no clip: nothing bounds what would be masked")
        return Policy(
            task=task,
            length=terms.model_length,
            clip=terms.clip,
            max_examples=terms.max_examples,
            max_staleness=terms.max_staleness,
            minimum_threshold=self.policy.minimum_threshold,
        )


def read_policy(path: Path) -> DevicePolicy:
    """The owner's policy, a TOML file."""
    try:
        found: DevicePolicy = msgspec.toml.decode(path.read_bytes(), type=DevicePolicy)
    except OSError as error:
        raise OperatorError(
            f"{path} cannot be read: {error.strerror}", hint="name the file of your policy"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: {error}", hint="docs/run-a-device.md lists its fields"
        ) from error
    return found
