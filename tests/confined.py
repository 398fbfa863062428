"""A mark for tests that need confined training jobs."""

from __future__ import annotations

import pytest

from papaya.device import confinement

needs_confinement = pytest.mark.skipif(
    confinement.missing() is not None,
    reason=f"devices refuse signed programs here, because {confinement.missing()}",
)
