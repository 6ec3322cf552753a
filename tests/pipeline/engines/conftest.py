"""What engines need for tests only: a block, and traces as they are on other devices."""

import pytest

from maxpipe.config.catalog import BLOCKS, Block


@pytest.fixture(autouse=True)
def balanced_block(monkeypatch):
    """Name a block with an auxiliary loss."""
    monkeypatch.setitem(BLOCKS, "balanced", Block("helpers.engines:BalancedBlock"))


@pytest.fixture
def as_on_tpus(monkeypatch):
    """Leave out what keeps collectives of CPU devices in order."""
    monkeypatch.setattr("maxpipe.pipeline.engines.scheduled.engine.needs_order", lambda mesh: False)
