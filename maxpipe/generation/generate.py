"""From a checkpoint to new tokens: no pipeline, no optimizer, only devices of this process."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.reader import read_parameters
from maxpipe.config import MESH_AXES, Config
from maxpipe.generation.decoding import Decoder
from maxpipe.generation.sampling import Sampling
from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.weights import Weights
from maxpipe.sharding.rules import AxisRules


def load_parameters(step_directory: Path, config: Config) -> Params:
    """The parameters of a checkpoint in the compute dtype, laid over the tensor axis of all local devices.

    Raises:
      CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable: see `maxpipe.checkpoint.reader`.
    """
    shape = [-1 if axis == "tensor" else 1 for axis in MESH_AXES]
    mesh = jax.sharding.Mesh(np.asarray(jax.local_devices()).reshape(shape), MESH_AXES)
    rules, program = AxisRules(config.sharding.logical_axis_rules, mesh), ModelProgram(config.model)
    weights = Weights(rules, program.specs, ("layers_per_stage",), (config.model.num_layers,))
    return jax.jit(program.cast)(read_parameters(step_directory, weights.abstract()))


def generate(
    config: Config,
    params: Params,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    seed: int,
    max_tokens: int,
) -> Iterator[int]:
    """Yields tokens after `prompt`, each as soon as it is drawn; whoever reads them decides when to stop.

    Args:
      config: of the run; tokens see `data.sequence_length` tokens back.
      params: from `load_parameters`.
      prompt: token ids, at most `data.sequence_length`.
      sampling: how to draw.
      seed: of the draws; token n depends on it, on n and on the text so far.
      max_tokens: how many there are at most.
    """
    decoder = Decoder(config.model, config.data.sequence_length)
    key = jax.random.key(seed)

    @jax.jit
    def begin(params: Params, tokens: jax.Array) -> tuple[jax.Array, Any]:
        logits, cache = decoder.prefill(params, tokens)
        return sampling(logits, jax.random.fold_in(key, tokens.shape[1])), cache

    def following(
        params: Params, token: jax.Array, position: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        logits, cache = decoder.step(params, token, position, cache)
        return sampling(logits, jax.random.fold_in(key, position + 1)), cache

    proceed = jax.jit(following, donate_argnums=3)
    token, cache = begin(params, jnp.asarray([prompt], jnp.int32))
    for position in range(len(prompt), len(prompt) + max_tokens):
        yield int(token[0])
        if position + 1 < len(prompt) + max_tokens:
            token, cache = proceed(params, token, jnp.int32(position), cache)
