"""Pipeline a model of one's own, which is no decoder, over devices that run different programs.

    python examples/own_model_mpmd.py --schedule 1f1b --devices-per-stage 1 1 1 --steps 60
    python examples/own_model_mpmd.py --schedule zb_h1 --devices-per-stage 2 1 1 --steps 60

An autoencoder in Flax learns to reconstruct its inputs. Its three stages differ in work and width,
encoder and decoder share one matrix (the first and the last stage), and a skip connection leads
from the first stage to the last. A stage with two devices divides the rows of a microbatch. The
program first compares loss and gradients with those of the plain function, then trains, with an
optimizer on each stage.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh, PartitionSpec

from maxpipe.pipeline import mpmd

FEATURES, WIDTH, NARROW, ROWS = 24, 32, 8, 48


class Autoencoder(nn.Module):
    """Map [rows, FEATURES] to a reconstruction of the same shape."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # Stage 0: the encoder.
        shared = self.param("shared", nn.initializers.lecun_normal(), (FEATURES, WIDTH))
        encoded = x @ shared
        x = mpmd.mark_stage_boundary(nn.gelu(encoded))
        # Stage 1: four layers through a bottleneck, recomputed in the backward.
        for _ in range(2):
            x = nn.gelu(nn.remat(nn.Dense)(NARROW)(x))
            x = nn.gelu(nn.remat(nn.Dense)(WIDTH)(x))
        x = mpmd.mark_stage_boundary(x)
        # Stage 2: the decoder, with the skip connection and the encoder's matrix.
        x = mpmd.mark_stage_boundary(nn.LayerNorm()(x + encoded))
        return x @ shared.T


def loss(params: dict, batch: jax.Array) -> jax.Array:
    """Return the mean squared error, a mean over rows."""
    return jnp.mean((Autoencoder().apply(params, batch) - batch) ** 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pipeline an autoencoder over three stages.")
    parser.add_argument("--schedule", default="1f1b", help="with one chunk per stage")
    parser.add_argument("--microbatches", type=int, default=6, help=f"parts of {ROWS} rows")
    parser.add_argument("--devices-per-stage", type=int, nargs=3, default=[1, 1, 1])
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    sizes = arguments.devices_per_stage
    jax.config.update("jax_num_cpu_devices", sum(sizes))

    # 1. A table, and a mesh for each stage.
    table = mpmd.load_schedule(arguments.schedule, len(sizes), arguments.microbatches)
    devices = iter(jax.devices())
    meshes = [Mesh([next(devices) for _ in range(size)], ("data",)) for size in sizes]

    # 2. Cut the function, and put each parameter on its stage.
    step = mpmd.pipelined(
        jax.value_and_grad(loss), table, meshes, batch_specs=PartitionSpec("data")
    )
    key = jax.random.key(0)
    sources = jax.random.normal(key, (4, FEATURES))  # inputs are mixtures of four vectors
    batch = jax.random.normal(jax.random.key(1), (ROWS, 4)) @ sources
    initial = Autoencoder().init(key, batch)
    params = jax.device_put(initial, step.param_shardings(initial, batch))

    # 3. Compare with the plain function.
    results = step(params, batch)
    expected = jax.value_and_grad(loss)(initial, batch)
    differences = jax.tree.map(
        lambda a, b: float(jnp.max(jnp.abs(jax.device_get(a) - b))), results, expected
    )
    print(f"largest difference of the loss: {differences[0]:.1e}")
    print(f"largest difference of a gradient: {max(jax.tree.leaves(differences[1])):.1e}")
    for stage, part in enumerate(step.by_stage(params)):
        paths = jax.tree_util.tree_leaves_with_path(part["params"])
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
        print(f"stage {stage} (devices: {sizes[stage]}) has {', '.join(names)}")

    # 4. Train: each stage updates its own parameters.
    optimizer = optax.adam(1e-2)

    @jax.jit
    def update(params: dict, state: optax.OptState, gradients: dict) -> tuple[dict, optax.OptState]:
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    by_stage = step.by_stage(params)
    states = [jax.jit(optimizer.init)(part) for part in by_stage]
    for i in range(1, arguments.steps + 1):
        rows = jax.random.normal(jax.random.fold_in(key, i), (ROWS, 4))
        value, gradients = step(step.join(by_stage), rows @ sources)
        updated = map(update, by_stage, states, step.by_stage(gradients))
        by_stage, states = zip(*updated, strict=True)
        if i == 1 or i % 20 == 0 or i == arguments.steps:
            print(f"step {i}: loss {value:.4f}")


if __name__ == "__main__":
    main()
