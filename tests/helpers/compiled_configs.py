"""Compile the training steps of configurations, reduced in size, for simulated devices.

`test_partitioner` runs it as a program, because the partitioner writes its warnings to standard
error. Each argument is a configuration file, followed by overrides. Several presets are the same
program at this size, which is compiled once.
"""

import math
import sys
from collections.abc import Sequence

import jax
import numpy as np

from maxpipe.builder import build_trainer
from maxpipe.config import MESH_AXES, Config, load, resolve
from maxpipe.devices.mesh import build_mesh
from maxpipe.training.trainer import SpmdTrainer

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
    "model.mla.q_lora_rank": 16,
    "model.mla.kv_lora_rank": 16,
    "model.mla.qk_nope_head_dim": 8,
    "model.mla.qk_rope_head_dim": 4,
    "model.mla.v_head_dim": 8,
}


def sizes_of(config: Config) -> dict[str, object]:
    """Return the sizes of a reduced configuration, those of the mesh excepted."""
    sizes: dict[str, object] = dict(SMALL)
    if config.model.attention_kind == "mla":
        del sizes["model.num_kv_heads"], sizes["model.head_dim"]
        sizes |= LATENT
    if config.model.first_dense_layers:
        # Four layers in the pipeline, and one of the same kind outside.
        sizes |= {
            "model.first_dense_layers": 1,
            "model.num_layers": 6,
            "pipeline.parallel_layers": 4,
        }
    return sizes


def reduced(path: str, overrides: Sequence[str]) -> Config:
    """Load a configuration with two devices on each mesh axis that has several."""
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
    batch = {
        name: jax.ShapeDtypeStruct(shape, np.int32)
        for name in ("tokens", "targets", "positions", "segment_ids")
    }
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
