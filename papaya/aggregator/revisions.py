"""Under which signed manifests the clients of a task may take part (docs/adr/0045).

A client continues under the manifest that it joined under, unless a rule forbids it. An update of a
secure or private task can be added only to updates under the same manifest.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.sessions import ticket_life_s
from papaya.aggregator.work import REVISED, Forget
from papaya.config import ServerConfig, TaskConfig
from papaya.machine import Effects
from papaya.messages.participation import AbortReason
from papaya.messages.tickets import SessionTicket

R = TypeVar("R")


class Revisions:
    """The current manifest, the candidate of a rollout, and earlier ones, as the rows name them."""

    def __init__(self, pipeline: Pipeline, server: ServerConfig) -> None:
        self._pipeline = pipeline
        self._ledger = pipeline.ledger
        # Earlier manifests whose clients may continue. Each has the time at which the last of its
        # tickets expires.
        self.served = {
            manifest: replaced + ticket_life_s(self._ledger.terms[manifest], server)
            for manifest, replaced in self._ledger.replaced_at.items()
            if manifest != pipeline.manifest
        }
        # What each revision allows.
        self._max_staleness = {m: terms.max_staleness for m, terms in self._ledger.terms.items()}
        # Earlier manifests that the TSA knows.
        self._to_forget = dict(self.served) if pipeline.is_bound else {}
        for record in self._ledger.records.values() if pipeline.is_bound else ():
            if record.manifest not in self._ledger.terms:  # settings no longer stored
                pipeline.give_up(0.0, pipeline.buffers_of(record.manifest), REVISED)

    def terms(self, manifest: bytes) -> TaskConfig:
        """The settings of a client that joined under this manifest."""
        return self._ledger.terms.get(manifest, self._pipeline.config)

    def is_current(self, manifest: bytes) -> bool:
        """May clients join under this manifest? Also under the candidate of a rollout."""
        return manifest in (self._pipeline.manifest, self._ledger.candidate)

    def may_go_on(self, manifest: bytes) -> bool:
        return self.is_current(manifest) or manifest in self.served

    def why_outdated(self, ticket: SessionTicket) -> AbortReason | None:
        """Why a client that still trains cannot continue; None if it can."""
        if not self.may_go_on(ticket.manifest):
            return "revised"
        own = self._max_staleness[ticket.manifest]
        # A device refuses to mask an update that is staler than it has agreed to.
        is_candidate = ticket.manifest == self._ledger.candidate
        current = own if is_candidate else self._pipeline.max_staleness
        limit = min(own, current) if self._pipeline.config.is_secure else current
        if ticket.version >= self._ledger.oldest_allowed(limit):
            return None
        return "stale" if ticket.version < self._ledger.oldest_allowed(own) else "revised"

    def unless_revised(self, ticket: SessionTicket, reason: R) -> R | Literal["revised"]:
        """The reason, or `revised` for a client that has agreed to an earlier manifest."""
        return reason if self.is_current(ticket.manifest) else "revised"

    def forget(self, now: float) -> Effects:
        """Tell the TSA which public parameters no client can use any longer. Call this right
        after a commit: only the holder of the task may do it.
        """
        effects: Effects = []
        for manifest, ends in list(self._to_forget.items()):
            if now >= ends and not self._pipeline.buffers_of(manifest):
                del self._to_forget[manifest]
                effects.append(Forget(self._ledger.terms[manifest]))
        return effects
