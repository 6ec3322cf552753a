"""The train step of a configuration, compiled from shapes alone."""

import re
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from maxpipe.config.sections import Config
from maxpipe.training.engine import SpmdEngine

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class OutOfMemory(Exception):
    """The compiler gave up: the program needs `needed` bytes and a device has `available`."""

    def __init__(self, needed: float, available: float):
        super().__init__(f"needs {needed:.0f} of {available:.0f} bytes")
        self.needed, self.available = needed, available


@dataclass(frozen=True)
class CompiledStep:
    """A step that has been compiled and not run.

    Attributes:
      jaxpr: before partitioning.
      executable: `jax.stages.Compiled`.
      state: abstract train state with shardings.
      seconds: tracing and compilation.
    """

    jaxpr: Any
    executable: Any
    state: Any
    seconds: float


def compile_step(config: Config, mesh: Mesh, engine: SpmdEngine) -> CompiledStep:
    """Compiles `engine.jitted_step`; no array is made.

    Raises:
      OutOfMemory: the compiler says that the program does not fit.
    """
    started = time.perf_counter()
    sharding = NamedSharding(mesh, engine.batch_spec)
    shape = (config.data.global_batch_size, config.data.sequence_length)
    dtypes = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), jnp.int32) | {"weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
    state = engine.abstract_state()
    traced = engine.jitted_step.trace(state, batch)
    try:
        executable = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        raise (_out_of_memory(str(error)) or error) from None
    return CompiledStep(traced.jaxpr, executable, state, time.perf_counter() - started)


def _out_of_memory(message: str) -> OutOfMemory | None:
    """Understands "Used 120.50G of 95.74G hbm"."""
    found = re.search(r"Used ([\d.]+)([KMGT])i?B? of ([\d.]+)([KMGT])i?B? hbm", message)
    if not found:
        return None
    needed, available = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
    return OutOfMemory(needed, available)


def shard_bytes(tree: Any) -> int:
    """Bytes of one device's part of an abstract tree with shardings."""
    leaves = jax.tree.leaves(tree)
    total = 0
    for leaf in leaves:
        size = 1
        for n in leaf.sharding.shard_shape(leaf.shape):
            size *= n
        total += size * leaf.dtype.itemsize
    return total
