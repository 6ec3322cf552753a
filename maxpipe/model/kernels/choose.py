"""Choosing the attention kernel, and wrapping it for arrays that lie on several devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maxpipe.config import ConfigError, Problem
from maxpipe.config.catalog import KERNELS
from maxpipe.config.imports import implementation
from maxpipe.config.sections import Config
from maxpipe.model.attention import AttentionFn
from maxpipe.sharding.context_parallel import AXIS, over_context, parts
from maxpipe.sharding.rules import AxisRules

EVERYWHERE = "dot_product"


def choose_kernel(config: Config, platform: str, say: Callable[[str], None]) -> str:
    """Name of the attention kernel; an automatic choice is said with its reason.

    Raises:
      ConfigError: the kernel asked for does not run on this backend or with these sizes.
    """
    asked, num_parts = config.model.attention, config.mesh.size("context")
    sizes = config.model, config.data.sequence_length, num_parts
    if asked != "auto":
        facts = KERNELS[asked]
        reason = implementation(facts).unfit(*sizes)
        if platform not in facts.platforms:
            reason = f"it runs on {' and '.join(facts.platforms)}, not on {platform}"
        if reason:
            raise ConfigError(
                Problem(
                    "model.attention", f"{asked} cannot be used: {reason}; use auto or {EVERYWHERE}"
                )
            )
        return asked
    preferred = [name for name, facts in KERNELS.items() if platform in facts.preferred_on]
    name = preferred[0] if preferred else EVERYWHERE
    if reason := implementation(KERNELS[name]).unfit(*sizes):
        say(f"model.attention={EVERYWHERE}: {name} cannot be used, {reason}")
        return EVERYWHERE
    say(f"model.attention={name}: the kernel for {platform}")
    return name


def build_attention(
    config: Config, rules: AxisRules, platform: str, say: Callable[[str], None]
) -> AttentionFn:
    """The attention function of a resolved configuration on the mesh of `rules`, whose devices are of `platform`."""
    name = choose_kernel(config, platform, say)
    kernel, length, count = (
        implementation(KERNELS[name]),
        config.data.sequence_length,
        rules.mesh.shape[AXIS],
    )
    if count > 1:
        return per_device(
            over_context(kernel.build_engine_inputs(config.model, parts(length, count))), rules
        )
    attention = kernel.build(config.model, length)
    return attention if name == EVERYWHERE else per_device(attention, rules)


def per_device(attention: AttentionFn, rules: AxisRules) -> AttentionFn:
    """Runs `attention` on each device's own part: the partitioner can split neither a kernel nor a manual collective.

    Inside a program that is already manual over some axes only the others are left to split.
    """
    length = "activation_length" if rules.mesh.shape[AXIS] > 1 else None

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        here = jax.sharding.get_abstract_mesh()
        manual = set(here.manual_axes)
        mesh: Any = here if manual else rules.mesh
        query = rules.spec_here(("activation_batch", length, "heads", None), q.shape)
        if query != rules.spec_here(("activation_batch", length, "kv_heads", None), k.shape):
            # More devices than key heads: a device needs those of its own query heads.
            k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        split = jax.shard_map(
            attention,
            mesh=mesh,
            axis_names={axis for axis in rules.mesh.axis_names if axis not in manual},
            check_vma=False,
            in_specs=(query, query, query, PartitionSpec(*query[:2])),
            out_specs=query,
        )
        return split(q, k, v, segment_ids)

    return run
