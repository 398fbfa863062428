"""A stock of offers of the TSA (paper, "Secure Aggregation": initial messages).

Each client that reports gets one. A report waits for the TSA only if the stock is empty. Offers do
not belong to a group, so none is lost when a buffer closes. They are cheap and expire, so a stock
is not saved: after a crash it is requested again.

New offers also show whether the TSA still has the seeds of the open buffers of the same manifest
(another manifest may have another TSA). If it does not, these buffers are marked as lost, so that
no more clients work for them. There are two reliable signs: the
TSA's identity has changed since it accepted the seeds; or the index of a new offer is not above
that of a seed accepted before, although one TSA only counts up.

A TSA that does not answer is away, not lost. It is asked for an offer every second until it does.
"""

from __future__ import annotations

from collections import deque

from msgspec import structs

from papaya.aggregator.pipeline import Pipeline
from papaya.aggregator.work import WAITS_FOR_TSA, GetOffers, Offered, StockedOffer
from papaya.config import TaskConfig
from papaya.machine import Effects
from papaya.messages.participation import MAX_EXTRA_S, DiscardReason, SecureOffer

_MAX_STOCK = 512
_RETRY_S = 1.0


class Offers:
    """The stock of one task under one manifest.

    Invariant: at most one request for offers is unanswered.
    """

    def __init__(self, config: TaskConfig, seq: int) -> None:
        self._config = config
        self._seq = seq
        # How many offers to request at a time.
        self._wanted = min(_MAX_STOCK, max(8, config.concurrency // 2))
        self._stock: deque[StockedOffer] = deque()
        # What goes with every offer in stock: the TSA's identity, evidence and parameters.
        self._terms: SecureOffer | None = None
        # A request is unanswered; the earliest time of the next one.
        self._is_asked = False
        self._ask_again_at = 0.0
        # A seed was refused: request an offer to see whether the TSA was restarted.
        self._is_doubted = False
        # The TSA did not answer the last call. What it holds is not lost.
        self.is_away = False
        # How long an offer must still be valid when a client gets it: the upload may take this
        # long, and longer if the TSA is away meanwhile.
        self._needed_s = config.upload_timeout_s
        # Buffers with seeds when offers were last requested, with the newest index of each; and the
        # buffers with seeds when the offers in stock were requested.
        self._asked_with: dict[int, int] = {}
        self._had_seeds: tuple[int, ...] = ()
        # Buffers whose seeds are lost.
        self._lost: tuple[int, ...] = ()
        # The last offers arrived too close to their expiry.
        self._is_late = False
        # Why there are no offers, for the owner; empty if there are.
        self.problem = ""

    @property
    def _is_low(self) -> bool:
        return len(self._stock) <= self._wanted // 2

    @property
    def are_refused(self) -> bool:
        """There are none in stock, and no new ones."""
        return bool(self.problem) and not self._stock

    def refill(self, now: float, pipeline: Pipeline) -> Effects:
        is_due = self._is_low or self._is_doubted
        if self._is_asked or now < self._ask_again_at or not is_due:
            return []
        self._is_asked, self._is_doubted = True, False
        self._asked_with = pipeline.newest_seeds(self._config.manifest)
        wanted = self._wanted if self._is_low and not self._is_late else 1
        return [GetOffers(self._config, self._seq, wanted)]

    def on_offered(self, now: float, offered: Offered, pipeline: Pipeline) -> None:
        self._is_asked = False
        self.problem = offered.problem
        self.is_away = offered.is_unanswered
        if offered.terms is None:
            self._ask_again_at = now + _RETRY_S  # the TSA may be starting
            self._is_doubted |= self.is_away
            return
        is_another = self._terms is None or offered.terms.identity != self._terms.identity
        if is_another:
            self._stock.clear()  # the TSA was restarted and does not know these offers
        first = offered.offers[0].index
        behind = (target for target, newest in self._asked_with.items() if newest >= first)
        self._lost += (*behind, *(self._had_seeds if is_another else ()))
        self.mark_lost(now, pipeline)
        self._had_seeds = tuple(self._asked_with)
        self._terms = offered.terms
        left_s = offered.offers[-1].expires - now
        upload_s = self._config.upload_timeout_s
        self._needed_s = min(upload_s + MAX_EXTRA_S, (upload_s + left_s) / 2)
        self._is_late = left_s <= upload_s
        if self._is_late:
            self._ask_again_at = now + _RETRY_S
            self.problem = (
                f"new offers of the TSA expire in {left_s:.0f} s, but an upload may take "
                f"{upload_s:.0f} s: check the TSA's clock"
            )
            return
        self._stock.extend(offered.offers)

    def on_loaded(self, pipeline: Pipeline) -> None:
        """The task was loaded again. A buffer without a record is empty: it has lost nothing."""
        found = pipeline.ledger.records.items()
        records = {t for t, record in found if record.manifest == self._config.manifest}
        self._lost = tuple(target for target in self._lost if target in records)
        self._had_seeds = tuple(target for target in self._had_seeds if target in records)
        self._asked_with = {t: newest for t, newest in self._asked_with.items() if t in records}
        self.mark_lost(0.0, pipeline)

    def mark_lost(self, now: float, pipeline: Pipeline) -> None:
        """Mark the lost buffers in the pipeline."""
        self._lost = tuple(target for target in self._lost if target > pipeline.ledger.version)
        pipeline.lose(now, self._lost)

    def take(self, now: float) -> tuple[StockedOffer, SecureOffer] | None:
        """An offer that stays valid during the upload, with the message for the client; or None."""
        while self._stock:
            offer = self._stock.popleft()
            if offer.expires > now + self._needed_s and self._terms is not None:
                return offer, structs.replace(self._terms, offer=offer.message)
        return None

    def on_refused(self, reason: DiscardReason | None, offer: SecureOffer | None) -> None:
        """The TSA refused a seed: the client's fault, or the TSA was restarted."""
        if reason not in ("trusted_party_lost", "seed_refused"):
            return
        self._is_doubted = True
        ours = b"" if self._terms is None else self._terms.identity
        if reason == "trusted_party_lost" and offer is not None and offer.identity == ours:
            self._stock.clear()  # the TSA does not know this offer, nor the rest of the stock

    def on_unanswered(self) -> None:
        """The TSA did not answer: it is away until it gives an offer."""
        self.is_away = self._is_doubted = True
        self.problem = self.problem or WAITS_FOR_TSA

    def next_wake(self) -> float:
        """When the next request for offers is due."""
        is_due = self._is_low or self._is_doubted
        return self._ask_again_at if is_due and not self._is_asked else float("inf")


class Stocks:
    """All stocks of a secure task: of the current manifest, and of others once one of their clients
    reports.
    """

    def __init__(self, config: TaskConfig, seq: int) -> None:
        self.current = Offers(config, seq)
        self._seq = seq
        self._by_manifest = {config.manifest: self.current}

    def under(self, config: TaskConfig) -> Offers:
        """Offers for clients that have agreed to these settings."""
        if config.manifest not in self._by_manifest:
            self._by_manifest[config.manifest] = Offers(config, self._seq)
        return self._by_manifest[config.manifest]

    def forget(self, manifest: bytes) -> None:
        """No client under this earlier manifest can continue."""
        self._by_manifest.pop(manifest, None)

    def on_loaded(self, pipeline: Pipeline) -> None:
        for stock in self._by_manifest.values():
            stock.on_loaded(pipeline)

    def on_offered(self, now: float, offered: Offered, pipeline: Pipeline) -> None:
        if (stock := self._by_manifest.get(offered.manifest)) is not None:
            stock.on_offered(now, offered, pipeline)

    def refill(self, now: float, pipeline: Pipeline) -> Effects:
        stocks = self._by_manifest.values()
        return [effect for stock in stocks for effect in stock.refill(now, pipeline)]

    def next_wake(self) -> float:
        return min(stock.next_wake() for stock in self._by_manifest.values())
