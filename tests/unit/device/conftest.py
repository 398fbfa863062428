"""Fixtures of the tests of bundles: a server, and the store of a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from papaya.device.bundles import BundleStore
from papaya.device.owners import OwnerPolicy
from tests.unit.device.bundle_server import POLICY, Open, Server


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Open:
    def open_store(*policies: OwnerPolicy, **settings: Any) -> BundleStore:
        chosen = {policy.pin.owner: policy for policy in policies or (POLICY,)}
        store = BundleStore(tmp_path / "bundles", chosen, **settings)
        request.addfinalizer(store.close)
        return store

    return open_store
