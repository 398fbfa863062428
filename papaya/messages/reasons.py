"""Why participations end and check-ins are rejected: codes and their descriptions.

A device sends one of these codes and never text: an error of a task's code may quote an example.
Code that shows a reason takes its description from here. `docs/spec/protocol.md` lists the codes.

    counted              an ending of one participation, as servers count them per task
    discarded_<reason>   `Completed.discarded`
    aborted_<reason>     `Aborted.reason`
    left_<reason>        `Leave.reason`
    candidate_<…>        of clients under the candidate of a rollout, counted once more: whether the
                         update was counted, or the participation failed
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, get_args

from papaya.messages.participation import LeaveReason
from papaya.messages.selection import Lack

_LEAVE_REASONS: Final = frozenset(get_args(LeaveReason))
_ENDINGS: Final = {
    "counted": "counted",
    "left_stopped": "the device was stopped or is no longer eligible",
    "left_timed_out": "the device ran out of time",
    "left_no_parameters": "the device could not download the parameters",
    "left_no_program": "the device has no program for this task",
    "left_mismatch": "the task differs from the device's copy of it",
    "left_no_examples": "the device has no examples for this task",
    "left_diverged": "training diverged: loss is not finite",
    "left_training_failed": "the code of the task failed",
    "left_out_of_memory": "training exceeded the device's memory limit",
    "left_crashed": "the training process crashed",
    "left_unavailable": "the device cannot run training jobs",
    "left_declined": "the device's own rules do not allow it",
    "left_untrusted": "the device does not accept the TSA",
    "left_storage": "the device could not write its files",
    "left_protocol": "the server sent an answer that the device did not expect",
    "left_other": "left for a reason that this server does not know",
    "aborted_stale": "trained from a version that is too old",
    "aborted_round_over": "the round ended before the update was sent",
    "aborted_timed_out": "took longer than the task allows",
    "aborted_silent": "the heartbeats of the device stopped",
    "aborted_left": "the device left",
    "aborted_full": "no free slot was left after the task moved or the leader changed",
    "aborted_task_over": "the task ended",
    "aborted_replaced": "the device joined again",
    "aborted_revoked": "the device was revoked",
    "aborted_revised": "the owner changed the task in the meantime",
    "discarded_round_over": "the round already had its updates",
    "discarded_wrong_size": "the update has the wrong size",
    "discarded_not_finite": "the update contains NaN or infinity",
    "discarded_over_norm": "the update is above the clip",
    "discarded_seed_refused": "the TSA refused the seed of the mask",
    "discarded_trusted_party_lost": "the TSA was restarted",
    "discarded_already_counted": "another update of the device is in the same version",
    "discarded_revised": "the owner changed the task in the meantime",
}
_LACKS: Final = {
    "engine": "needs engine {}",
    "engine_version": "needs engine {}",
    "memory": "needs {} MB of memory",
    "label": "needs the label {}",
    "upload_bits": "needs updates in {} bits, which this device cannot encode",
    "trust_policy": "is secure, and this device has no trust policy",
    "frozen": "the model of this device holds other frozen tensors",
    "no_demand": "needs no more clients now",
}
# The task, its program or its settings may be the cause; in the others, the server or the device's
# user is.
_FAILURES: Final = frozenset(
    {ending for ending in _ENDINGS if ending.startswith("left_")}
    - {"left_stopped", "left_protocol"}
    | {"aborted_timed_out", "aborted_silent"}
    | {"discarded_wrong_size", "discarded_not_finite", "discarded_over_norm"}
)
CANDIDATE_COUNTED: Final = "candidate_counted"
CANDIDATE_FAILED: Final = "candidate_failed"
CANDIDATE_ENDINGS: Final = (CANDIDATE_COUNTED, CANDIDATE_FAILED)
_OF_A_RUN: Final = re.compile(r"-[0-9a-f]{12}\Z")  # the suffix of a run's id after its name


def leave_code(reason: str) -> str:
    """The reason of a `Leave`, if it is on the list. Devices may send anything."""
    return reason if reason in _LEAVE_REASONS else "other"


def in_words(ending: str) -> str:
    """The description of an ending; the code itself if this version does not know it."""
    return _ENDINGS.get(ending, ending)


def is_reported(counter: str) -> bool:
    """Does this counter of a task count one kind of ending? `aborted_left` is split by reason."""
    is_split = counter == "aborted_left"
    return (counter in _ENDINGS and not is_split) or counter in CANDIDATE_ENDINGS


def is_failure(ending: str) -> bool:
    """May the settings of the task be the cause of this ending?"""
    return ending in _FAILURES


def without_update(endings: Mapping[str, int]) -> dict[str, int]:
    """Endings other than counted ones, the most frequent first."""
    found = [(times, ending) for ending, times in endings.items() if ending != "counted" and times]
    return {ending: times for times, ending in sorted(found, key=lambda f: (-f[0], f[1]))}


def lack_in_words(lack: Lack) -> str:
    words = _LACKS.get(lack.code, f"lacks {lack.code} {{}}").format(lack.needs)
    return f"{_OF_A_RUN.sub('', lack.task)}: {words}"


def lacks_in_words(lacks: Iterable[Lack]) -> str:
    return "; ".join(map(lack_in_words, lacks))
