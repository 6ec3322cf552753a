"""No shipped configuration makes the partitioner replicate an array to change its layout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yml"))
WARNING = "full rematerialization"
OPTIONS = (
    "pipeline.schedule=circular pipeline.fsdp_gather=once mesh.ici.tensor=2",
    "pipeline.schedule=lockstep_1f1b mesh.ici.context=2",
)
FURTHER_OPTIONS = (
    "pipeline.schedule=circular pipeline.fsdp_gather=per_repeat",
    "pipeline.schedule=circular model.num_layers=6 pipeline.parallel_layers=4",
    "pipeline.schedule=circular mesh.ici.data=2",
    "pipeline.schedule=lockstep_1f1b mesh.ici.tensor=2",
    "pipeline.schedule=circular mesh.ici.context=2",
    "mesh.ici.stage=1 mesh.ici.tensor=2 mesh.ici.context=2 model.logit_tiles=4",
)

# The rows that a scatter adds to, its indices and its updates lie over the mesh in different
# orders; jax 0.12 copies the operand of the reshape instead.
PROVOKED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
lay = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
def add(x, i, u):
    x = lay(x, ("a", "b"), "c").at[lay(i, ("c", "b"))].add(lay(u, ("b", "c")))
    return lay(x, ("b", "c"), "a")
jax.jit(add).lower(jnp.ones((8, 8)), jnp.zeros(8, jnp.int32), jnp.ones((8, 8))).compile()
pair = Mesh(mesh.devices.reshape(4, 2), ("s", "t"))
x = jax.ShapeDtypeStruct((1, 4, 2, 16), jnp.float32, sharding=NamedSharding(pair, P(None, "s")))
join = jax.jit(lambda x: x.reshape(8, 16), out_shardings=NamedSharding(pair, P(None, "s")))
join.lower(x).compile()
"""


def compiler_log(*command):
    """Return standard error of a command, without a cache that would leave out the partitioner."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JAX_COMPILATION_CACHE")
    }
    env |= {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "1"}  # warnings
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def test_the_warning_is_known():
    """Or the tests below would pass whatever the partitioner does."""
    assert WARNING in compiler_log("-c", PROVOKED).lower()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(CONFIGS, id="configs", marks=pytest.mark.slow),
        pytest.param([f"configs/base.yml {options}" for options in OPTIONS], id="options"),
        pytest.param(
            [f"configs/base.yml {options}" for options in FURTHER_OPTIONS],
            id="further options",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_array_is_copied_whole(arguments):
    log = compiler_log("tests/helpers/compiled_configs.py", *arguments)
    assert all(argument in log for argument in arguments)
    found = [line for line in log.splitlines() if line in arguments or WARNING in line.lower()]
    assert found == arguments
