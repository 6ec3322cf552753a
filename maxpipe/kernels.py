"""Choosing the attention kernel, and wrapping it for arrays that lie on several devices."""

from collections.abc import Callable
from typing import Any

import jax

from maxpipe.config import ConfigError, Problem
from maxpipe.config.sections import Config
from maxpipe.model.attention import AttentionFn
from maxpipe.model.kernels import KERNELS
from maxpipe.sharding import AxisRules, only

PREFERRED = {"tpu": "splash"}
EVERYWHERE = "dot_product"


def choose_kernel(config: Config, platform: str, say: Callable[[str], None]) -> str:
    """Name of the attention kernel; an automatic choice is said with its reason.

    Raises:
      ConfigError: the kernel asked for does not run on this backend or with these sizes.
    """
    asked, length = config.model.attention, config.data.sequence_length
    if asked != "auto":
        kernel = KERNELS.get(asked)
        reason = kernel.unfit(config.model, length)
        if platform not in kernel.platforms:
            reason = f"it runs on {' and '.join(kernel.platforms)}, not on {platform}"
        if reason:
            raise ConfigError(Problem("model.attention", f"{asked} cannot be used: {reason}; use auto or {EVERYWHERE}"))
        return asked
    name = PREFERRED.get(platform, EVERYWHERE)
    if reason := KERNELS.get(name).unfit(config.model, length):
        say(f"model.attention={EVERYWHERE}: {name} cannot be used, {reason}")
        return EVERYWHERE
    say(f"model.attention={name}: the kernel for {platform}")
    return name


def build_attention(config: Config, rules: AxisRules, platform: str, say: Callable[[str], None]) -> AttentionFn:
    """The attention function of a resolved configuration on the mesh of `rules`, whose devices are of `platform`."""
    name = choose_kernel(config, platform, say)
    kernel = KERNELS.get(name).build(config.model, config.data.sequence_length)
    return kernel if name == EVERYWHERE else per_device(kernel, rules)


def per_device(kernel: AttentionFn, rules: AxisRules) -> AttentionFn:
    """Runs `kernel` on each device's own sequences and heads: the partitioner cannot split a kernel.

    Inside a program that is already manual over some axes only the others are left to split.
    """

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        context = jax.sharding.get_abstract_mesh()
        manual = set() if context.empty else set(context.manual_axes)
        free = {axis for axis in rules.mesh.axis_names if axis not in manual}
        mesh: Any = context if manual else rules.mesh

        def spec(*axes: str | None) -> Any:
            return only(rules.spec(axes), free)

        query, key = (spec("activation_batch", None, heads, None) for heads in ("heads", "kv_heads"))
        split = jax.shard_map(
            kernel, mesh=mesh, axis_names=free, check_vma=False,
            in_specs=(query, key, key, spec("activation_batch", None)), out_specs=query,
        )  # fmt: skip
        return split(q, k, v, segment_ids)

    return attention
