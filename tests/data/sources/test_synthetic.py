"""Random tokens."""

import numpy as np

from maxpipe.config.catalog import SOURCES
from maxpipe.config.imports import implementation
from maxpipe.config.sections import DataConfig


def test_documents() -> None:
    documents = implementation(SOURCES["synthetic"])(
        DataConfig(source="synthetic", sequence_length=64)
    )
    drawn = [documents[i] for i in range(300)]
    np.testing.assert_array_equal(drawn[7], documents[7])
    lengths = [len(ids) for ids in drawn]
    assert (min(lengths), max(lengths)) >= (1, 100)
    assert max(lengths) <= 128
    ids = np.concatenate(drawn)
    assert set(ids.tolist()) == set(range(259)) - {257}
