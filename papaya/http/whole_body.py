"""Collects the body of a buffered route that did not come with its head.

Memory grows with what has come, not with what was announced: a thousand peers that announce a
megabyte and send nothing cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from papaya.http.exchange import Exchange

_FIRST_BYTES = 16 << 10


class WholeBody:
    """A receiver that calls the handler with everything."""

    def __init__(self, exchange: Exchange, handle: Callable[[Exchange, bytes], None]) -> None:
        self._exchange = exchange
        self._handle = handle
        self._buffer = bytearray(min(exchange.head.length, _FIRST_BYTES))
        self._filled = 0

    def buffer(self, remaining: int) -> memoryview:
        if self._filled == len(self._buffer):
            # Not resized: the loop may still hold a view of the old one.
            grown = bytearray(min(self._filled + remaining, 2 * self._filled))
            grown[: self._filled] = self._buffer
            self._buffer = grown
        return memoryview(self._buffer)[self._filled :]

    def received(self, count: int) -> None:
        self._filled += count

    def finished(self) -> None:
        self._handle(self._exchange, bytes(self._buffer))

    def broken(self) -> None:
        self._buffer = bytearray()
