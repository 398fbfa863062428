"""Papaya with eager steps: what a simulation of fewer than 20,000 client updates uses."""

from __future__ import annotations

from functools import partial

from common import serve
from papaya_peer import Papaya

if __name__ == "__main__":
    serve(partial(Papaya, compiled=False))
