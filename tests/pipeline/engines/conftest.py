"""Traces engines as they are on other devices than simulated ones."""

import pytest


@pytest.fixture
def as_on_tpus(monkeypatch):
    """Leave out what keeps collectives of CPU devices in order."""
    monkeypatch.setattr("maxpipe.pipeline.engines.scheduled.engine.needs_order", lambda mesh: False)
