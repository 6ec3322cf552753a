"""Print the share of a chip's memory bandwidth that XLA's estimates give programs that only move.

python scripts/benchmark/memory_shares.py v5p:2x2x1

`devices.chips` holds the figures of Adam and SwiGLU. Needs libtpu and no TPU.
"""

import argparse
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from maxpipe.compile.prediction.constants import constants_of
from maxpipe.compile.topology import devices_of
from maxpipe.config.options import update
from maxpipe.config.sections import Config
from maxpipe.devices.chips import chip_for, devices_per_chip

SIDE = 8192
FLOAT32, BFLOAT16 = jnp.float32, jnp.bfloat16


class Program(NamedTuple):
    """What is compiled.

    Attributes:
      name: in the table.
      function: of arrays [SIDE, SIDE].
      dtypes: of its arguments.
      moved: bytes that it must read and write for each value.
    """

    name: str
    function: Callable[..., object]
    dtypes: tuple[jnp.dtype, ...]
    moved: int


def adam(
    p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return parameters and moments after an update."""
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return SwiGLU's product, computed in float32."""
    return jax.nn.silu(gate.astype(FLOAT32)).astype(BFLOAT16) * up


PROGRAMS = (
    Program("Adam, float32", adam, (FLOAT32,) * 4, 28),
    Program("SwiGLU, bfloat16", swiglu, (BFLOAT16,) * 2, 6),
)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", help="such as v5p:2x2x1")
    topology = parser.parse_args().topology
    devices = devices_of(update(Config(), {"compile.topology": topology}))
    chip = chip_for(devices[0].device_kind)
    constants = chip and constants_of(chip, devices_per_chip(devices))
    if constants is None:
        raise SystemExit(f"the clock of {topology} is not known; use v5e, v5p or v6e")
    sharding = SingleDeviceSharding(devices[0])
    print(f"| {topology} | s | share of {constants.hbm_bandwidth / 1e9:.0f} GB/s |\n|---|---|---|")
    for program in PROGRAMS:
        shapes = [jax.ShapeDtypeStruct((SIDE, SIDE), d, sharding=sharding) for d in program.dtypes]
        lowered = jax.jit(program.function, out_shardings=sharding).lower(*shapes)
        text = lowered.compile().as_text() or ""
        cycles = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))
        seconds = cycles / constants.clock
        share = program.moved * SIDE**2 / seconds / constants.hbm_bandwidth
        print(f"| {program.name} | {seconds:.3g} | {share:.2f} |")


if __name__ == "__main__":
    main()
