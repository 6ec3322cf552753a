"""The other side: transformers and torch, imported by the tests that compare with them."""

import importlib

import pytest


@pytest.fixture(scope="session")
def transformers():
    return pytest.importorskip("transformers", reason="needs the extra `hf-test`")


@pytest.fixture(scope="session")
def torch():
    torch = pytest.importorskip("torch", reason="needs the extra `hf-test`")
    torch.set_num_threads(1)  # threads of tiny models only wait for each other
    return torch


@pytest.fixture(scope="session")
def record_hf(torch, transformers):
    """What builds the recorded models in torch."""
    return importlib.import_module("golden.record_hf")
