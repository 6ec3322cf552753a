"""Generate tokens with a checkpoint's parameters, on this process's devices, without a pipeline.

Attention is a parameter of the model. Decoding passes it a function that also keeps the keys and
values of earlier tokens, so any block gets a cache without code of its own.

Shapes: B sequences, P tokens of the prompt, T tokens, W window, N layers, K key/value heads,
C channels of a head, D model width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.reader import read_parameters
from maxpipe.config import MESH_AXES, Config
from maxpipe.config.sections import ModelConfig
from maxpipe.devices.start import check_platforms, name_machine
from maxpipe.model.kernels.dot_product import attend, dot_product_attention
from maxpipe.model.layers import SideInputs
from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.weights import Weights
from maxpipe.sharding.attention_contract import PLAIN, AttentionOptions, OverLatents
from maxpipe.sharding.rules import AxisRules

_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)

# Keys and values [B,W,K,C] of one layer, or [N,B,W,K,C] of N layers; with latent attention only
# keys, whose first channels are the values.
KeysValues = tuple[jax.Array, ...]


class Cache(NamedTuple):
    """Keys and values of earlier tokens: of each first dense layer, and of all others stacked."""

    first: list[KeysValues]
    stacked: KeysValues


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from logits."""

    temperature: float = 1.0  # divides logits; 0 takes the most likely token
    top_k: int = 0  # draw from this many most likely tokens only; 0 = all
    # Draw only from the most likely tokens that together have this probability (nucleus sampling,
    # Holtzman et al. 2020); 1 = all.
    top_p: float = 1.0

    def __call__(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Draw token ids, int32 [B], from logits, float32 [B,V]."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        # The best logit is 0 at any temperature; the bound keeps the divisor above 0 in float32.
        best = jnp.max(logits, axis=-1, keepdims=True)
        logits = (logits - best) / max(self.temperature, _LEAST_TEMPERATURE)
        if 0 < self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]  # [B,1]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p < 1:
            ordered = -jnp.sort(-logits, axis=-1)
            probability = jax.nn.softmax(ordered, axis=-1)
            # A token belongs to the nucleus if the more likely ones do not reach top_p.
            more_likely = jnp.cumsum(probability, axis=-1) - probability
            nucleus = jnp.where(more_likely < self.top_p, ordered, jnp.inf)
            least = jnp.min(nucleus, axis=-1, keepdims=True)  # [B,1]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(key, logits).astype(jnp.int32)


class Decoder:
    """A model that reads each token of a text once.

    Token number p is in slot p % W of the cache: a token sees the W newest, including itself. W is
    the sequence length in training, since the model has learned no longer distances. Parameters are
    {"embed", "layers" [N, ...], "head"} with floating leaves in the compute dtype. Experts take
    every token, whatever their capacity in training.
    """

    def __init__(self, config: ModelConfig, window: int):
        config = replace(config, moe=replace(config.moe, capacity_factor=0.0))
        self._config = config
        self._window = window
        self._program = ModelProgram(config)

    def prefill(
        self, params: Params, tokens: jax.Array, length: jax.Array | int
    ) -> tuple[jax.Array, Cache]:
        """Read a prompt, int32 [B,P], P at most W, of which the first `length` tokens count; return
        (logits of the next token, float32 [B,V]; cache).
        """
        x, cache = self._run(params, tokens, 0, None)
        last = jax.lax.dynamic_index_in_dim(x, length - 1, axis=1, keepdims=False)
        return self._program.logits(params, last), cache

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Return the logits of the token after each of `tokens`, float32 [B,T,V] of int32 [B,T], T
        at most W.
        """
        x, _ = self._run(params, tokens, 0, None)  # the compiler leaves out the cache
        return self._program.logits(params, x)

    def step(
        self, params: Params, token: jax.Array, position: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Read one more token, int32 [B], at a position of the sequence, int32 scalar; return
        (logits of the next token, float32 [B,V]; cache).
        """
        x, cache = self._run(params, token[:, None], position, cache)
        return self._program.logits(params, x[:, -1]), cache

    def _attend(
        self,
        qkv: tuple[jax.Array, jax.Array, jax.Array],
        position: jax.Array,
        before: KeysValues | None,
        options: AttentionOptions,
    ) -> tuple[jax.Array, KeysValues]:
        """Return (context, a layer's cache after these tokens), which are the first ones of texts
        or, with a cache, one more token.
        """
        q, k, v = qkv
        kept = (k,) if self._config.is_latent else (k, v)
        if before is None:
            assert k.shape[1] <= self._window
            # No token sees later ones, and `step` writes a slot before it reads it.
            padding = ((0, 0), (0, self._window - k.shape[1]), (0, 0), (0, 0))
            one_text = jnp.ones(k.shape[:2], jnp.int32)
            context = dot_product_attention(q, k, v, one_text, options)
            return context, tuple(jnp.pad(x, padding) for x in kept)  # [B,T,K,C] -> [B,W,K,C]
        slot = position % self._window
        slots = jnp.arange(self._window)
        # Slots fill in order; from position W - 1 on all are in use.
        mask = (slots <= position)[None, None, None]  # [1,1,1,W]
        if options.window is not None:  # compare it with how long ago each slot was written
            mask = mask & ((slot - slots) % self._window < options.window)
        after = tuple(
            jax.lax.dynamic_update_slice_in_dim(earlier, x, slot, axis=1)  # [B,W,K,C]
            for earlier, x in zip(before, kept, strict=True)
        )
        keys, values = after[0], after[-1][..., : v.shape[3]]
        context = attend(q, keys, values, mask, sinks=options.sinks, soft_cap=options.soft_cap)
        return context, after

    def _run(
        self, params: Params, tokens: jax.Array, start: jax.Array | int, cache: Cache | None
    ) -> tuple[jax.Array, Cache]:
        """Read tokens [B,T] from position `start` on; return (activations [B,T,D], cache)."""
        rows, length = tokens.shape
        positions = start + jnp.arange(length, dtype=jnp.int32)  # [T]
        side = SideInputs(
            positions=jnp.broadcast_to(positions, tokens.shape),
            segment_ids=jnp.ones_like(tokens),
            sequence_index=jnp.arange(rows, dtype=jnp.int32),
        )

        def layer(
            x: jax.Array,
            inputs: tuple[Params, KeysValues | None, jax.Array],
            *,
            is_first: bool = False,
        ) -> tuple[jax.Array, KeysValues]:
            weights, before, index = inputs
            caches: list[KeysValues] = []

            def attention(
                q: jax.Array,
                k: jax.Array,
                v: jax.Array,
                segment_ids: jax.Array,
                options: AttentionOptions = PLAIN,
            ) -> jax.Array:
                context, after = self._attend((q, k, v), jnp.int32(start), before, options)
                caches.append(after)
                return context

            program = ModelProgram(self._config, OverLatents(attention))
            numbered = side._replace(layer_index=index)
            if is_first:
                x = program.first_block(weights, x, numbered, None)
            else:
                x, _ = program.block(weights, x, numbered, None)
            (after,) = caches
            return x, after

        x = self._program.embed(params, tokens)  # [B,T,D]
        first_caches: list[KeysValues] = []
        for i in range(self._config.first_dense_layers):
            weights = params["embed"]["first"][str(i)]
            inputs = weights, None if cache is None else cache.first[i], jnp.int32(i)
            x, after = layer(x, inputs, is_first=True)
            first_caches.append(after)
        index = jnp.arange(self._config.first_dense_layers, self._config.num_layers)
        before = None if cache is None else cache.stacked
        x, stacked = jax.lax.scan(layer, x, (params["layers"], before, index))
        return x, Cache(first_caches, stacked)


def load_parameters(step_directories: Sequence[Path], config: Config) -> Params:
    """Return a checkpoint's parameters, or the mean of several, in the compute dtype.

    They are sharded over the tensor axis of all devices of this process. Errors are those of
    `maxpipe.checkpoint.reader`.
    """
    name_machine()
    check_platforms()
    shape = [-1 if axis == "tensor" else 1 for axis in MESH_AXES]
    mesh = jax.sharding.Mesh(np.asarray(jax.local_devices()).reshape(shape), MESH_AXES)
    rules = AxisRules(config.sharding.logical_axis_rules, mesh)
    program = ModelProgram(config.model)
    weights = Weights(rules, program.specs, ("layers_per_stage",), (config.model.stacked_layers,))
    return jax.jit(program.cast)(read_parameters(step_directories, weights.abstract()))


def generate(
    config: Config,
    params: Params,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    seed: int,
    max_tokens: int,
) -> Iterator[int]:
    """Yield tokens after `prompt`, each as soon as it is drawn; the caller decides when to stop.

    The prompt has at most `data.sequence_length` tokens, as many as a token sees. Token n depends
    on the seed, on n and on the text so far.
    """
    first, following = _programs(config.model, config.data.sequence_length, sampling)
    key = jax.random.key(seed)
    # Prompts are padded to one of few lengths to limit compilations.
    length = min(1 << (len(prompt) - 1).bit_length(), config.data.sequence_length)
    tokens = jnp.asarray([[*prompt, *[0] * (length - len(prompt))]], jnp.int32)
    token, cache = first(params, tokens, jnp.int32(len(prompt)), key)
    end = len(prompt) + max_tokens
    for position in range(len(prompt), end):
        yield int(token[0])
        if position + 1 < end:
            token, cache = following(params, token, jnp.int32(position), cache, key)


@lru_cache(maxsize=8)
def _programs(
    config: ModelConfig, window: int, sampling: Sampling
) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    """Return the programs that draw the token after a padded prompt, and after each further token;
    arguments are those of `Decoder`.
    """
    decoder = Decoder(config, window)

    def first(
        params: Params, tokens: jax.Array, length: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, Cache]:
        logits, cache = decoder.prefill(params, tokens, length)
        return sampling(logits, jax.random.fold_in(key, length)), cache

    def following(
        params: Params, token: jax.Array, position: jax.Array, cache: Cache, key: jax.Array
    ) -> tuple[jax.Array, Cache]:
        logits, cache = decoder.step(params, token, position, cache)
        return sampling(logits, jax.random.fold_in(key, position + 1)), cache

    return jax.jit(first), jax.jit(following, donate_argnums=3)
