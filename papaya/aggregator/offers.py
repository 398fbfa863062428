"""Offers of the TSA, kept in stock (paper, "Secure Aggregation": initial messages).

A client that reports takes one; a report never waits for the TSA unless the stock is
empty. Offers are not tied to a group, so none is lost when a buffer closes. They are cheap and
they expire: what is left of a stock after a crash is simply forgotten.

New offers also tell whether the TSA is still the one that took the seeds of the open
buffers; if not, these are lost, and marked so that no more clients work for them. Two signs, which
never lie: its identity has changed since seeds were there; or it numbers its offers from below a
seed that was there before they were made, while one TSA only counts up.
"""

from __future__ import annotations

from collections import deque

from msgspec import structs

from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.work import GetOffers, Offered, StockedOffer
from papaya.config import TaskConfig
from papaya.machine import Effects
from papaya.messages.participation import DiscardReason, SecureOffer

_MOST = 512
_AGAIN_S = 1.0


class Offers:
    """The stock of one task. Invariant: at most one request for more is on its way."""

    def __init__(self, config: TaskConfig, seq: int) -> None:
        self._config = config
        self._seq = seq
        self._wanted = min(_MOST, max(8, config.concurrency // 2))
        self._stock: deque[StockedOffer] = deque()
        self._terms: SecureOffer | None = None
        self._is_asked = False
        self._is_doubted = False
        self._ask_again_at = 0.0
        self._asked_with: dict[int, int] = {}  # buffers, and the newest seed of each
        self._had_seeds: tuple[int, ...] = ()  # when the present TSA was asked
        self._lost: tuple[int, ...] = ()
        self._is_late = False  # the last offers were over when they came
        self.problem = ""

    @property
    def _is_low(self) -> bool:
        return len(self._stock) <= self._wanted // 2

    def refill(self, now: float, pipeline: Pipeline) -> Effects:
        is_due = self._is_low or self._is_doubted
        if self._is_asked or now < self._ask_again_at or not is_due:
            return []
        self._is_asked, self._is_doubted = True, False
        self._asked_with = pipeline.newest_seeds()
        wanted = self._wanted if self._is_low and not self._is_late else 1
        return [GetOffers(self._config, self._seq, wanted)]

    def on_offered(self, now: float, offered: Offered, pipeline: Pipeline) -> None:
        self._is_asked = False
        self.problem = offered.problem
        if offered.terms is None:
            self._ask_again_at = now + _AGAIN_S  # it may be starting
            return
        is_another = self._terms is None or offered.terms.identity != self._terms.identity
        if is_another:
            self._stock.clear()  # the TSA was started anew and knows none of these
        first = offered.offers[0].index
        behind = (target for target, newest in self._asked_with.items() if newest >= first)
        self._lost += (*behind, *(self._had_seeds if is_another else ()))
        self.mark_lost(now, pipeline)
        self._had_seeds = tuple(self._asked_with)
        self._terms = offered.terms
        left_s = offered.offers[-1].expires - now
        self._is_late = left_s <= self._config.upload_timeout_s
        if self._is_late:
            self._ask_again_at = now + _AGAIN_S
            self.problem = (
                f"new offers of the TSA end in {left_s:.0f} s, an upload may take "
                f"{self._config.upload_timeout_s:.0f} s: look at its clock"
            )
            return
        self._stock.extend(offered.offers)

    def mark_lost(self, now: float, pipeline: Pipeline) -> None:
        """Also after the task was loaded again."""
        self._lost = tuple(target for target in self._lost if target > pipeline.ledger.version)
        pipeline.lose(now, self._lost)

    def take(self, now: float) -> tuple[StockedOffer, SecureOffer] | None:
        """One that outlives the upload, and what its client is told; None when there is none."""
        while self._stock:
            offer = self._stock.popleft()
            if offer.expires > now + self._config.upload_timeout_s and self._terms is not None:
                return offer, structs.replace(self._terms, offer=offer.message)
        return None

    def on_refused(self, reason: DiscardReason | None, offer: SecureOffer | None) -> None:
        """A seed was not taken. It may be the client's fault; or the TSA is another one now."""
        if reason not in ("trusted_party_lost", "seed_refused"):
            return
        self._is_doubted = True
        ours = b"" if self._terms is None else self._terms.identity
        if reason == "trusted_party_lost" and offer is not None and offer.identity == ours:
            self._stock.clear()  # it does not know this one, nor those that it made beside it

    def next_wake(self) -> float:
        """When a low stock is to be asked for again, or whether the TSA is the same."""
        is_due = self._is_low or self._is_doubted
        return self._ask_again_at if is_due and not self._is_asked else float("inf")
