"""States of trainers: drawn, placed as a checkpoint's, stepped, and compared to the bit."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from helpers.engines import make_batch


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Assert that two trees have the same structure, dtypes, shapes and bytes."""
    tree: Any = jax.tree.structure(expected)
    assert tree == jax.tree.structure(actual)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), (
            jax.tree_util.keystr(path)
        )


def drawn(trainer: Any) -> Any:
    """Return a canonical state of random numbers: a lost or swapped layer shows."""
    rng = np.random.default_rng(0)
    shapes = trainer.abstract_canonical()
    return jax.tree.map(lambda leaf: (rng.random(leaf.shape) * 100).astype(leaf.dtype), shapes)


def placed(trainer: Any, canonical: Any) -> Any:
    """Return what a checkpoint of `canonical` holds, laid out as the trainer asks for."""
    return jax.tree.map(
        lambda x, to: jax.device_put(x, to.sharding), canonical, trainer.abstract_canonical()
    )


def run(
    trainer: Any, place: Any, state: Any, steps: Iterable[int], rows: int
) -> tuple[Any, list[dict[str, Any]]]:
    """Return the state after steps with batches of these seeds, and the metrics of each."""
    metrics = []
    for seed in steps:
        state, step_metrics = trainer.step(state, place(make_batch(rows, seed=seed)))
        metrics.append(jax.device_get(step_metrics))
    return state, metrics
