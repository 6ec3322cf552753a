"""The train step of a configuration, compiled from shapes alone."""

import re
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from maxpipe.config import Config, ConfigError, Problem
from maxpipe.training.trainer import SpmdTrainer

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

    def text(self) -> str:
        """The optimized HLO.

        Raises:
          ConfigError: JAX cannot read what libtpu wrote, since one is newer than the other.
        """
        try:
            return self.executable.as_text()
        except jax.errors.JaxRuntimeError as error:
            message = (
                f"this JAX cannot read the compiler's result ({str(error).splitlines()[0][:120]})"
            )
            remedy = "install the libtpu that it was made for: pip install -e '.[tpu]'"
            raise ConfigError(Problem("compile.topology", f"{message}; {remedy}")) from None


def compile_step(config: Config, mesh: Mesh, engine: SpmdTrainer) -> CompiledStep:
    """Compiles `engine.jitted_step`; no array is made.

    Raises:
      OutOfMemory: the compiler says that the program does not fit.
    """
    started = time.perf_counter()
    sharding = NamedSharding(mesh, engine.batch_spec)
    shape = (config.data.global_batch_size, config.data.sequence_length)
    dtypes = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), jnp.int32) | {
        "weights": jnp.float32
    }
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, dtype in dtypes.items()
    }
    state = engine.abstract_state()
    traced = engine.jitted_step.trace(state, batch)
    try:
        executable = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        raise (out_of_memory(str(error)) or error) from None
    return CompiledStep(traced.jaxpr, executable, state, time.perf_counter() - started)


def out_of_memory(message: str) -> OutOfMemory | None:
    """Understands "Used 120.5G of 95.7G hbm" and "memory required ... (74.8G) exceeds available HBM (15.7G)"."""
    amount = r"([\d.]+)([KMGT])"
    for pattern in (
        rf"Used {amount} of {amount} hbm",
        rf"\({amount}\) exceeds available HBM \({amount}\)",
    ):
        if found := re.search(pattern, message):
            needed, available = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
            return OutOfMemory(needed, available)
    return None


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
