"""Resumes in DIR, like a training, and saves every step until killed."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.config import CheckpointConfig

ROWS = 1 << 20


def state(step):
    return {"large": jnp.arange(ROWS, dtype=jnp.int32) * step, "host": np.full(ROWS, step)}


def main():
    checkpointer = Checkpointer(Path(sys.argv[1]), CheckpointConfig(keep=2))
    step = 0
    if checkpointer.steps():
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state(0))
        step = checkpointer.restore(target).step
    while True:
        step += 1
        checkpointer.save(step, state(step), np.full((2, 3), step), {"step": step})
        print("committed", step - 1, flush=True)  # `save` has waited for the previous step


if __name__ == "__main__":
    main()
