"""Offers of the trusted party, kept in stock (paper, "Secure Aggregation": initial messages).

A client that reports takes one; a report never waits for the trusted party unless the stock is
empty. Offers are not tied to a group, so none is lost when a buffer closes. They are cheap and
they expire: what is left of a stock after a crash is simply forgotten.
"""

from __future__ import annotations

from collections import deque

from msgspec import structs

from papaya.aggregator.work import GetOffers, Offer, Offered
from papaya.config import TaskConfig
from papaya.machine import Effects
from papaya.messages.participation import SecureOffer

_MOST = 512
_AGAIN_S = 1.0


class Offers:
    """The stock of one task. Invariant: at most one request for more is on its way."""

    def __init__(self, config: TaskConfig, seq: int) -> None:
        self._config = config
        self._seq = seq
        self._wanted = min(_MOST, max(8, config.concurrency // 2))
        self._stock: deque[Offer] = deque()
        self._terms: SecureOffer | None = None
        self._is_asked = False
        self._ask_again_at = 0.0
        self.problem = ""

    def refill(self, now: float) -> Effects:
        if self._is_asked or now < self._ask_again_at or len(self._stock) > self._wanted // 2:
            return []
        self._is_asked = True
        return [GetOffers(self._config, self._seq, self._wanted)]

    def on_offered(self, now: float, offered: Offered) -> None:
        self._is_asked = False
        self.problem = offered.problem
        if offered.terms is None:
            self._ask_again_at = now + _AGAIN_S  # it may be starting
            return
        if self._terms is None or offered.terms.identity != self._terms.identity:
            self._stock.clear()  # the trusted party was started anew and knows none of these
        self._terms = offered.terms
        self._stock.extend(offered.offers)

    def take(self, now: float) -> tuple[Offer, SecureOffer] | None:
        """One that outlives the upload, and what its client is told; None when there is none."""
        while self._stock:
            offer = self._stock.popleft()
            if offer.expires > now + self._config.upload_timeout_s and self._terms is not None:
                return offer, structs.replace(self._terms, offer=offer.message)
        return None

    def on_lost(self, offer: SecureOffer) -> None:
        """The trusted party does not know an offer any more: nor those that it made beside it."""
        if self._terms is not None and offer.identity == self._terms.identity:
            self._stock.clear()

    def next_wake(self) -> float:
        """When an empty stock is to be asked for again."""
        is_low = len(self._stock) <= self._wanted // 2
        return self._ask_again_at if is_low and not self._is_asked else float("inf")
