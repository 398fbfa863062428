"""The terms under which a device masks an update: its own task file and its owner's limits.

Nothing here comes from a server: the task file is the device's copy. Refused (ProtocolError): a
task without a clip, because masked values would be unbounded.
"""

from __future__ import annotations

from papaya.attestation.policy import DevicePolicy
from papaya.config.task import EVALUATION_CLIP, EVALUATION_MAX_STALENESS
from papaya.device.executor import TaskTerms
from papaya.errors import ProtocolError
from papaya.learning.evaluation import EVALUATION_LENGTH
from papaya.messages.base import TaskId
from papaya.secagg.participant import ParticipantPolicy


def agreed_policy(
    owner: DevicePolicy, task: TaskId, terms: TaskTerms, *, evaluates: bool
) -> ParticipantPolicy:
    """Requires the larger of the two thresholds, the file's and the owner's."""
    minimum_threshold = max(owner.minimum_threshold, terms.threshold or 1)
    if evaluates:
        return ParticipantPolicy(
            task=task,
            length=EVALUATION_LENGTH,
            clip=EVALUATION_CLIP,
            max_examples=1,
            max_staleness=EVALUATION_MAX_STALENESS,
            minimum_threshold=minimum_threshold,
            weighting="none",
        )
    if terms.clip is None:
        raise ProtocolError(f"task {task} has no clip, which secure aggregation requires")
    return ParticipantPolicy(
        task=task,
        length=terms.model_length,
        clip=terms.clip,
        max_examples=terms.max_examples,
        max_staleness=terms.max_staleness,
        minimum_threshold=minimum_threshold,
        maximum_staleness=owner.maximum_staleness,
    )
