"""Choose the kernel of experts, and run it on arrays that are split over several devices.

Each device computes with the tokens that it has, and over mesh axis `expert` with those that need
its experts (`exchange`). Over mesh axis `tensor` it has a share of every expert's width, and the
shares of the results are summed.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from jax.experimental.layout import with_layout_constraint
from jax.sharding import PartitionSpec

from maxpipe.config.catalog import DISPATCHES, GROUPED_KERNELS
from maxpipe.config.imports import implementation
from maxpipe.config.sections import ModelConfig
from maxpipe.config.terminal import Note
from maxpipe.model.experts.capacity import layout_for
from maxpipe.model.experts.dispatch import Layout, Places
from maxpipe.model.experts.exchange import choose_dispatch, sparse
from maxpipe.model.experts.imbalance import for_imbalance
from maxpipe.model.experts.mixture import ExpertsFn, ExpertWeights, experts_with
from maxpipe.model.kernels.choose import choose
from maxpipe.model.layers import ROW_MAJOR, gating
from maxpipe.sharding.collectives import EXPERT_AXIS
from maxpipe.sharding.rules import AxisRules, axes_of, without

EVERYWHERE = "blocks"  # the kernel that runs on every backend, with every size


class Kernel(Protocol):
    """What a kernel's class offers; see `maxpipe.model.experts`."""

    def unfit(self, config: ModelConfig) -> str: ...

    def layout(self, num_assignments: int, num_experts: int, most: int | None = None) -> Layout: ...

    def multiply(
        self, rows: jax.Array, weights: jax.Array, places: Places, layout: Layout
    ) -> jax.Array: ...


def choose_kernel(config: ModelConfig, platform: str, note: Note) -> str:
    """Return the name of the kernel; see `maxpipe.model.kernels.choose.choose`."""
    return choose(
        "model.moe.kernel",
        config.moe.kernel,
        GROUPED_KERNELS,
        EVERYWHERE,
        lambda name: _kernel(name).unfit(config),
        platform,
        note,
    )


def build_experts(
    config: ModelConfig, rules: AxisRules, platform: str, note: Note, *, recomputes: bool = False
) -> ExpertsFn | None:
    """Build the function of a model's experts; None if the model has none.

    Args:
      config: the resolved model configuration.
      rules: logical axis rules, bound to the mesh.
      platform: platform of the mesh's devices, as JAX names it.
      note: function that prints a line.
      recomputes: whether the backward computes the rows of experts again in any case.

    Raises:
      ConfigError: see `choose_kernel`.
    """
    if not config.moe.experts:
        return None
    name = choose_kernel(config, platform, note)
    kernel, devices = _kernel(name), rules.mesh.shape[EXPERT_AXIS]
    layout = layout_for(kernel.layout, config.moe, devices)
    if devices == 1:
        experts = experts_with(layout, kernel.multiply, gating(config))
    else:
        multiply = sparse(kernel.multiply, devices)
        experts = experts_with(layout, multiply, gating(config))
        if recomputes:
            usual = layout_for(kernel.layout, config.moe, devices, usual=True)
            of_usual = experts_with(usual, multiply, gating(config))
            experts = for_imbalance(of_usual, experts, config.moe, devices)
        dispatch = DISPATCHES[choose_dispatch(config.moe, devices, platform, note)]
        experts = implementation(dispatch)(experts)
    if config.gating == "separate":
        experts = row_major(experts)
    return per_device(experts, rules, always=name != EVERYWHERE)


def row_major(experts: ExpertsFn) -> ExpertsFn:
    """Return `experts` with tokens laid out row by row, which spares TPUs copies around them."""

    def run(
        x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        y = experts(with_layout_constraint(x, ROW_MAJOR), choice, combine, weights)
        return with_layout_constraint(y, ROW_MAJOR)

    return run


def per_device(experts: ExpertsFn, rules: AxisRules, *, always: bool) -> ExpertsFn:
    """Run `experts` on each device's own tokens.

    XLA's partitioner would gather all tokens to sort them. Inside a program that is already manual
    over some axes only the other axes are left to split.

    Args:
      experts: function that computes the experts of one device.
      rules: logical axis rules, bound to the mesh.
      always: whether no axis may be left to the partitioner, even if it has one device, because
        the partitioner refuses Pallas kernels.
    """

    def run(
        x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        current = jax.sharding.get_abstract_mesh()
        manual = set(current.manual_axes)
        automatic = {axis for axis in rules.mesh.axis_names if axis not in manual}
        if not always and all(rules.mesh.shape[axis] == 1 for axis in automatic):
            return experts(x, choice, combine, weights)
        tokens = rules.automatic_spec(("activation_batch", "activation_length", None), x.shape)
        # [E, D, F]; what is left of fsdp is gathered.
        axes = ("expert", None, "expert_mlp")
        experts_of, _, width = rules.automatic_spec(axes, weights.gate.shape)
        (width,) = without(PartitionSpec(width), axes_of(tokens))  # devices of other tokens
        # Devices that share a width have operands and results of their own, in a new first
        # dimension: their sums are left to the partitioner, as with any product.
        copies = jax.tree.map(
            lambda a: jnp.broadcast_to(a, (_count(rules, width), *a.shape)), (x, choice, combine)
        )
        copied = PartitionSpec(width, *tokens)
        down_bias = weights.down_bias
        if down_bias is not None:
            # The sum has it once: of the devices that share a width, all but the first have zeros.
            zeros = ((0, _count(rules, width) - 1), (0, 0), (0, 0))
            down_bias = jnp.pad(down_bias[None], zeros)

        def of_device(
            copies: tuple[jax.Array, jax.Array, jax.Array],
            matrices: tuple[jax.Array, jax.Array, jax.Array],
            biases: tuple[jax.Array | None, jax.Array | None, jax.Array | None],
        ) -> jax.Array:
            x, choice, combine = (a[0] for a in copies)
            gate_bias, up_bias, down_bias = biases
            own_bias = None if down_bias is None else down_bias[0]
            own = ExpertWeights(*matrices, gate_bias, up_bias, own_bias)
            return experts(x, choice, combine, own)[None]

        split = jax.shard_map(
            of_device,
            mesh=current if manual else rules.mesh,
            axis_names=automatic,
            check_vma=False,
            in_specs=(
                copied,
                (
                    PartitionSpec(experts_of, None, width),
                    PartitionSpec(experts_of, None, width),
                    PartitionSpec(experts_of, width, None),
                ),
                (
                    PartitionSpec(experts_of, width),
                    PartitionSpec(experts_of, width),
                    PartitionSpec(width, experts_of, None),
                ),
            ),
            out_specs=copied,
        )
        biases = (weights.gate_bias, weights.up_bias, down_bias)
        matrices = (weights.gate, weights.up, weights.down)
        return jnp.sum(split(copies, matrices, biases), axis=0)

    return run


def _count(rules: AxisRules, entry: str | tuple[str, ...] | None) -> int:
    """Return the devices along the mesh axes of one entry of a PartitionSpec."""
    count = 1
    for axis in axes_of(PartitionSpec(entry)):
        count *= rules.mesh.shape[axis]
    return count


def _kernel(name: str) -> Kernel:
    return implementation(GROUPED_KERNELS[name])
