"""No shipped configuration makes the partitioner replicate an array to change its layout.

The partitioner writes its warnings to standard error, so the tests run this file as a program, for
simulated devices. Each argument is a configuration file, followed by overrides. Several presets are
the same program once they are reduced in size, which is compiled once.
"""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from maxpipe.builder import build_trainer
from maxpipe.config import MESH_AXES, Config, load, resolve
from maxpipe.devices.mesh import build_mesh
from maxpipe.pipeline.microbatches import ARRAYS
from maxpipe.training.trainer import SpmdTrainer

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yml"))
WARNING = "full rematerialization"
OPTIONS = ("pipeline.schedule=circular pipeline.fsdp_gather=once mesh.ici.tensor=2",)
FURTHER_OPTIONS = (
    "pipeline.schedule=circular pipeline.fsdp_gather=per_repeat",
    "pipeline.schedule=circular model.num_layers=6 pipeline.parallel_layers=4",
    "pipeline.schedule=circular mesh.ici.data=2",
    "pipeline.schedule=lockstep_1f1b mesh.ici.context=2",
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
    env = {n: v for n, v in os.environ.items() if not n.startswith("JAX_COMPILATION_CACHE")}
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
    log = compiler_log(__file__, *arguments)
    assert all(argument in log for argument in arguments)
    found = [line for line in log.splitlines() if line in arguments or WARNING in line.lower()]
    assert found == arguments


SMALL = {
    "model.num_layers": 4,
    "model.embed_dim": 32,
    "model.num_query_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.mlp_dim": 64,
    "model.vocab_size": 64,
    "data.sequence_length": 16,
    "data.global_batch_size": 32,
    "eval.global_batch_size": 32,
    "pipeline.num_repeats": 2,
    "pipeline.num_layers_per_stage": -1,
    "pipeline.layers_per_stage": "[]",
    "pipeline.num_microbatches": 4,
    "mesh.simulated_devices": 8,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def sizes_of(config: Config) -> dict[str, object]:
    sizes: dict[str, object] = dict(SMALL)
    if config.model.attention_kind == "mla":
        del sizes["model.num_kv_heads"], sizes["model.head_dim"]
        sizes |= {f"model.mla.{name}": size for name, size in LATENT.items()}
    if config.model.first_dense_layers:
        # Four layers in the pipeline, and one of the same kind outside.
        sizes |= {"model.first_dense_layers": 1, "model.num_layers": 6}
        sizes["pipeline.parallel_layers"] = 4
    return sizes


def reduced(path: str, overrides: Sequence[str]) -> Config:
    config = load(path).config
    mesh, sizes = config.mesh, sizes_of(config)
    for axis in MESH_AXES:
        several = getattr(mesh.ici, axis) != 1 or getattr(mesh.dcn, axis) != 1
        sizes |= {f"mesh.ici.{axis}": 2 if several else 1, f"mesh.dcn.{axis}": 1}
    words = [f"{key}={value}" for key, value in sizes.items()]
    loaded = load(path, [*words, *overrides])
    return resolve(loaded, math.prod(getattr(loaded.config.mesh.ici, axis) for axis in MESH_AXES))


def compile_step(config: Config, compiled: set[str]) -> None:
    """Compile the training step of a resolved configuration, unless its text is in `compiled`."""
    devices = math.prod(getattr(config.mesh.ici, axis) for axis in MESH_AXES)
    trainer = build_trainer(config, build_mesh(config, jax.devices()[:devices]))
    shape = (config.data.global_batch_size, config.data.sequence_length)
    batch = dict.fromkeys(ARRAYS, jax.ShapeDtypeStruct(shape, np.int32))
    batch["weights"] = jax.ShapeDtypeStruct(shape, np.float32)
    assert isinstance(trainer, SpmdTrainer)
    lowered = trainer.jitted_step.lower(trainer.abstract_state(), batch)
    text = lowered.as_text()
    if text not in compiled:
        lowered.compile()
        compiled.add(text)


if __name__ == "__main__":
    compiled: set[str] = set()
    for argument in sys.argv[1:]:
        path, *overrides = argument.split()
        print(argument, file=sys.stderr, flush=True)
        compile_step(reduced(path, overrides), compiled)
    print(f"{len(compiled)} programs compiled", file=sys.stderr)
