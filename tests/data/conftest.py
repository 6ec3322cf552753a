"""Configurations of a few small text files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxpipe.config import Config, replace


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    """Return documents by path: of many lengths, all different except the empty ones."""
    texts = {}
    for i in range(23):
        path = tmp_path / f"{i:02}.txt"
        path.write_text("".join(chr(97 + (i + j) % 26) for j in range(i * i % 37)))
        texts[str(path)] = path.read_text()
    return texts


@pytest.fixture
def make_config(tmp_path: Path, texts: dict[str, str]) -> Callable[..., Config]:
    """Return a function that makes a config over `texts`, all of them in the training split."""

    def make(batch: int = 4, length: int = 16, **data: Any) -> Config:
        values = {"source": "text", "path": str(tmp_path / "*.txt"), "eval_fraction": 0.0, **data}
        return replace(
            Config(),
            **{"data.global_batch_size": batch, "data.sequence_length": length},
            **{f"data.{key}": value for key, value in values.items()},
        )

    return make


@pytest.fixture
def assert_batches_equal() -> Callable[[dict[str, np.ndarray], dict[str, np.ndarray]], None]:
    def check(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)

    return check
