"""Attention by two matrix products with the whole [T, T] matrix between them; runs on every backend."""

from maxpipe.config.sections import ModelConfig
from maxpipe.model.attention import AttentionFn, dot_product_attention
from maxpipe.model.kernels import KERNELS


@KERNELS.register()
class DotProduct:
    """`jax.nn.dot_product_attention` as XLA compiles it."""

    platforms = ("cpu", "gpu", "tpu")

    @staticmethod
    def unfit(config: ModelConfig, sequence_length: int) -> str:
        return ""

    @staticmethod
    def build(config: ModelConfig, sequence_length: int) -> AttentionFn:
        return dot_product_attention
