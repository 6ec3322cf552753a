"""Attend with cuDNN's flash attention, on NVIDIA GPUs; JAX calls the library.

No [T, T] matrix exists, and with a window the tokens before it are skipped.
"""

from functools import partial

import jax
import numpy as np
from jax.extend import backend

from maxpipe.config.sections import ModelConfig
from maxpipe.sharding.attention_contract import PLAIN, AttentionFn, AttentionOptions, PartAttention

LARGEST_HEAD = 128  # size that every generation of GPUs takes; from Hopper on cuDNN takes 256
LEAST_CAPABILITY = "8.0"  # Ampere; earlier GPUs, T4 and V100, have no such kernels
UNIT = 8  # a head's size must be a multiple of it


class Cudnn:
    """`jax.nn.dot_product_attention(implementation="cudnn")`, causal, with windows.

    It does not see segment ids: the catalogue says that it does not separate documents.
    """

    @staticmethod
    def unfit(config: ModelConfig, sequence_length: int, num_parts: int) -> str:
        if config.dtype == "float32":
            return "model.dtype=float32, and it computes in bfloat16"
        if config.is_latent:
            return "values have other channels than keys (model.attention_kind=mla)"
        if config.head_dim > LARGEST_HEAD or config.head_dim % UNIT:
            limits = f"a multiple of {UNIT} up to {LARGEST_HEAD}"
            return f"model.head_dim={config.head_dim} is not {limits}"
        if num_parts > 1:
            return "it takes the queries of a whole sequence (mesh.*.context)"
        if config.attention_sinks:
            return "it has no sinks (model.attention_sinks)"
        if config.attention_soft_cap:
            return "it has no soft cap (model.attention_soft_cap)"
        client = backend.get_backend()
        if client.platform == "gpu" and "cuda" not in client.platform_version:
            return "it runs on GPUs of NVIDIA"
        # A machine without a GPU, which only plans, has devices without this attribute.
        capability = getattr(client.local_devices()[0], "compute_capability", LEAST_CAPABILITY)
        if float(capability) < float(LEAST_CAPABILITY):
            return (
                f"it needs compute capability {LEAST_CAPABILITY} (A100), this GPU has {capability}"
            )
        return ""

    @staticmethod
    def build(config: ModelConfig, sequence_length: int) -> AttentionFn:
        def attention(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            segment_ids: jax.Array,
            options: AttentionOptions = PLAIN,
        ) -> jax.Array:
            window, sinks, soft_cap = options
            assert sinks is None, "see `Cudnn.unfit`"
            assert not soft_cap, "see `Cudnn.unfit`"
            if not isinstance(window, jax.Array):
                return _attend(q, k, v, window=window or 0)
            # The window is a constant of the call: if it differs by layer, there are two calls.
            local, of_all = (partial(_attend, window=w) for w in (config.attention_window, 0))
            return jax.lax.cond(window <= config.attention_window, local, of_all, q, k, v)

        return attention

    @staticmethod
    def build_for_parts(config: ModelConfig, parts: np.ndarray) -> PartAttention:
        raise AssertionError("see `Cudnn.unfit`")


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> jax.Array:
    """Attend with a constant window, the query's own token included; 0 sees all tokens."""
    size = (window - 1, 0) if window else None  # tokens before and after
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=size, implementation="cudnn"
    )
