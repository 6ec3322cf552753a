"""Train a small model through a GPipe pipeline inside its own `jax.shard_map`.

    python examples/gpipe.py --stages 4 --microbatches 8 --steps 100

Of maxpipe it uses nothing but `maxpipe.pipeline.gpipe`. Four residual MLP blocks, one on each of
four simulated CPU devices (or real ones), learn to square their inputs. The loss is printed every
twenty steps and at the end.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.pipeline.gpipe import PipelineModule

WIDTH, ROWS = 16, 64


class Block(nn.Module):
    """Residual MLP: [rows, WIDTH] -> the same."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model through a GPipe pipeline.")
    parser.add_argument("--stages", type=int, default=4, help="devices, one block on each")
    parser.add_argument(
        "--microbatches", type=int, default=8, help=f"parts of a batch of {ROWS} rows"
    )
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.stages)

    mesh = Mesh(np.array(jax.devices()[: arguments.stages]), ("stage",))
    model = PipelineModule("stage", arguments.microbatches, Block)
    stacked, replicated = PartitionSpec("stage"), PartitionSpec()

    def loss_of_stage(params: dict, x: jax.Array) -> jax.Array:
        y = model.apply(params, x)
        # The result is real on the last stage only; a sum over the stages takes it from there.
        is_last = jax.lax.axis_index("stage") == arguments.stages - 1
        return jax.lax.psum(jnp.where(is_last, jnp.mean((y - x**2) ** 2), 0), "stage")

    init = jax.jit(
        jax.shard_map(model.init, mesh=mesh, in_specs=(replicated, replicated), out_specs=stacked)
    )
    loss = jax.shard_map(
        loss_of_stage, mesh=mesh, in_specs=(stacked, replicated), out_specs=replicated
    )
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(
        params: dict, state: optax.OptState, key: jax.Array
    ) -> tuple[dict, optax.OptState, jax.Array]:
        x = jax.random.uniform(key, (ROWS, WIDTH), minval=-1)
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = init(jax.random.key(0), jnp.zeros((ROWS, WIDTH)))
    state = jax.device_put(optimizer.init(params))
    batches = jax.device_put(jax.random.key(1), NamedSharding(mesh, replicated))
    for i in range(1, arguments.steps + 1):
        params, state, value = step(params, state, jax.random.fold_in(batches, i))
        if i == 1 or i % 20 == 0 or i == arguments.steps:
            print(f"step {i}: loss {value:.4f}")


if __name__ == "__main__":
    main()
