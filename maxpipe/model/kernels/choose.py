"""Choose the attention kernel and the form of rotation, and run it on arrays that devices share."""

from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from maxpipe.config import ConfigError, Problem
from maxpipe.config.catalog import KERNELS
from maxpipe.config.imports import implementation
from maxpipe.config.model_facts import Kernel as KernelFacts
from maxpipe.config.sections import Config, ModelConfig
from maxpipe.config.terminal import Note, ignore_note
from maxpipe.sharding.attention_contract import (
    PLAIN,
    AttentionFn,
    AttentionOptions,
    PartAttention,
    PartToPart,
)
from maxpipe.sharding.collectives import CONTEXT_AXIS
from maxpipe.sharding.context_parallel import over_context, parts
from maxpipe.sharding.rules import AxisRules

EVERYWHERE = "dot_product"  # the kernel that runs on every backend, with every size


class Kernel(Protocol):
    """What a kernel's class offers; see `maxpipe.model.kernels`."""

    def unfit(self, config: ModelConfig, sequence_length: int, num_parts: int) -> str: ...

    def build(self, config: ModelConfig, sequence_length: int) -> AttentionFn: ...

    def build_for_parts(self, config: ModelConfig, parts: np.ndarray) -> PartAttention: ...

    def build_for_ring(self, config: ModelConfig, length: int) -> PartToPart: ...


def choose_kernel(config: Config, platform: str, note: Note) -> str:
    """Return the name of the attention kernel; an automatic choice is printed with its reason.

    Args:
      config: the resolved configuration.
      platform: platform of the devices, as JAX names it.
      note: function that prints a line.

    Raises:
      ConfigError: the configured kernel does not run on this platform or with these sizes.
    """
    length, num_parts = config.data.sequence_length, config.mesh.size("context")

    def unfit(name: str) -> str:
        if config.data.packing and not KERNELS[name].separates_documents:
            return "data.packing=true, and it does not separate documents"
        is_ring = num_parts > 1 and config.sharding.context_strategy == "ring"
        if is_ring and not KERNELS[name].in_ring:
            return "sharding.context_strategy=ring, and it does not attend to parts of the keys"
        return _kernel(name).unfit(config.model, length, num_parts)

    return choose(
        "model.attention", config.model.attention, KERNELS, EVERYWHERE, unfit, platform, note
    )


def kernel_problems(config: Config, platform: str) -> tuple[Problem, ...]:
    """Return why the configured attention kernel does not run; nothing if it does."""
    try:
        choose_kernel(config, platform, ignore_note)
    except ConfigError as error:
        return error.problems
    return ()


def choose(
    key: str,
    configured: str,
    kernels: Mapping[str, KernelFacts],
    everywhere: str,
    unfit: Callable[[str], str],
    platform: str,
    note: Note,
) -> str:
    """Return the name of a kernel; an automatic choice is printed with its reason.

    Args:
      key: configuration key that names the kernel.
      configured: its value, a name or auto.
      kernels: facts of the catalogue's kernels, by name.
      everywhere: name of the kernel that runs on every backend, with every size.
      unfit: function that returns why a kernel cannot serve, or an empty string.
      platform: platform of the devices, as JAX names it.
      note: function that prints a line.

    Raises:
      ConfigError: the configured kernel does not run on this platform or with these sizes.
    """
    if configured != "auto":
        reason, platforms = unfit(configured), kernels[configured].platforms
        if platform not in platforms:
            reason = f"it runs on {' and '.join(platforms)}, not on {platform}"
        if reason:
            message = f"{configured} cannot be used: {reason}; use auto or {everywhere}"
            raise ConfigError(Problem(key, message))
        return configured
    preferred = [name for name, facts in kernels.items() if platform in facts.preferred_on]
    name = preferred[0] if preferred else everywhere
    if reason := unfit(name):
        note(f"{key}={everywhere}: {name} cannot be used, {reason}")
        return everywhere
    note(f"{key}={name}: the kernel for {platform}")
    return name


def choose_rotation(config: Config, platform: str, note: Note) -> str:
    """Return how queries and keys are rotated, "slices" or "product"; see `choose_kernel`."""
    why = "spares the TPU transposes of queries and keys"
    return _choose_for_tpus(config, platform, note, "rotation", ("product", why), "slices")


def choose_gating(config: Config, platform: str, note: Note) -> str:
    """Return how a gated MLP is computed, "fused" or "separate"; see `choose_kernel`."""
    why = (
        "gate times up is computed once, not in each product, and activations of pipelines stay "
        "row-major"
    )
    return _choose_for_tpus(config, platform, note, "gating", ("separate", why), "fused")


def _choose_for_tpus(
    config: Config,
    platform: str,
    note: Note,
    name: str,
    on_tpus: tuple[str, str],
    elsewhere: str,
) -> str:
    """Return the value of `model.<name>`; auto takes the one of `on_tpus` on TPUs in bfloat16."""
    configured: str = getattr(config.model, name)
    if configured != "auto":
        return configured
    if platform != "tpu" or config.model.dtype != "bfloat16":
        return elsewhere
    value, why = on_tpus
    note(f"model.{name}={value}: {why}")
    return value


def build_attention(config: Config, rules: AxisRules, platform: str, note: Note) -> AttentionFn:
    """Build the attention function of a resolved configuration.

    Args:
      config: the resolved configuration.
      rules: logical axis rules, bound to the mesh.
      platform: platform of the mesh's devices, as JAX names it.
      note: function that prints a line.

    Raises:
      ConfigError: see `choose_kernel`.
    """
    name = choose_kernel(config, platform, note)
    kernel, length = _kernel(name), config.data.sequence_length
    num_parts = rules.mesh.shape[CONTEXT_AXIS]
    if num_parts > 1 and config.sharding.context_strategy == "ring":
        from maxpipe.sharding.ring_attention import over_ring  # which few runs need

        return per_device(
            over_ring(kernel.build_for_ring(config.model, length // num_parts)), rules
        )
    if num_parts > 1:
        of_part = kernel.build_for_parts(config.model, parts(length, num_parts))
        return per_device(over_context(of_part), rules)
    attention = kernel.build(config.model, length)
    # XLA's partitioner splits matrix products by itself.
    return attention if name == EVERYWHERE else per_device(attention, rules)


def per_device(attention: AttentionFn, rules: AxisRules) -> AttentionFn:
    """Run `attention` on each device's own part.

    XLA's partitioner can split neither a kernel nor an explicit collective. Inside a program that
    is already manual over some axes only the other axes are left to split.
    """
    length = "activation_length" if rules.mesh.shape[CONTEXT_AXIS] > 1 else None

    def run(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        options: AttentionOptions = PLAIN,
    ) -> jax.Array:
        current = jax.sharding.get_abstract_mesh()
        manual = set(current.manual_axes)
        query = rules.automatic_spec(("activation_batch", length, "heads", None), q.shape)
        if query != rules.automatic_spec(("activation_batch", length, "kv_heads", None), k.shape):
            # There are more devices than key heads, so each gets the keys of its own query heads:
            # [B, T, K, C] -> [B, T, H, C].
            k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        # A window that differs by layer is an array, which every device has.
        window = options.window if isinstance(options.window, jax.Array) else None

        def of_device(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            segment_ids: jax.Array,
            window: jax.Array | None,
            sinks: jax.Array | None,
        ) -> jax.Array:
            own = options if window is None else options._replace(window=window)
            return attention(q, k, v, segment_ids, own._replace(sinks=sinks))

        split = jax.shard_map(
            of_device,
            mesh=current if manual else rules.mesh,
            axis_names={axis for axis in rules.mesh.axis_names if axis not in manual},
            check_vma=False,
            in_specs=(
                query,
                query,
                query,
                PartitionSpec(*query[:2]),
                PartitionSpec(),
                PartitionSpec(*query[2:3]),
            ),
            out_specs=query,
        )
        return split(q, k, v, segment_ids, window, options.sinks)

    return run


def _kernel(name: str) -> Kernel:
    return implementation(KERNELS[name])
