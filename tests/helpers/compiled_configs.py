"""Compiles the training steps of configurations, reduced in size, for simulated devices; run by `test_partitioner`.

The partitioner writes its warnings to standard error. Arguments: configuration files, each with
overrides after it.
"""

import math
import sys

import jax
import numpy as np

from maxpipe.builder import build_trainer
from maxpipe.config import MESH_AXES, load, resolve
from maxpipe.devices.mesh import build_mesh

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


def reduced(path, overrides):
    """The configuration with two devices on each of its mesh axes that have several."""
    mesh = load(path).config.mesh
    sizes = {}
    for axis in MESH_AXES:
        several = getattr(mesh.ici, axis) != 1 or getattr(mesh.dcn, axis) != 1
        sizes |= {f"mesh.ici.{axis}": 2 if several else 1, f"mesh.dcn.{axis}": 1}
    words = [f"{key}={value}" for key, value in (SMALL | sizes).items()]
    loaded = load(path, [*words, *overrides])
    return resolve(loaded, math.prod(getattr(loaded.config.mesh.ici, axis) for axis in MESH_AXES))


def compile_step(config):
    devices = math.prod(getattr(config.mesh.ici, axis) for axis in MESH_AXES)
    engine = build_trainer(config, build_mesh(config, jax.devices()[:devices]))
    shape = (config.data.global_batch_size, config.data.sequence_length)
    batch = {
        n: jax.ShapeDtypeStruct(shape, np.int32)
        for n in ("tokens", "targets", "positions", "segment_ids")
    }
    batch["weights"] = jax.ShapeDtypeStruct(shape, np.float32)
    engine.jitted_step.lower(engine.abstract_state(), batch).compile()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path, *overrides = argument.split()
        print(argument, file=sys.stderr, flush=True)
        compile_step(reduced(path, overrides))
