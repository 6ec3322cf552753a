"""Run loop-placed tables in one SPMD program, the backward written out: the scheduled engine.

1F1B-class schedules interleave forwards and backwards of different microbatches, so that the
activations in flight do not grow with the number of microbatches. Autodiff of a forward loop cannot
express that order, so here the backward is written out. From a table to gradients:

    tick_plan       the table as indices of units and of buffer slots, per tick and stage
    split_vjp       a chunk's vjp as functions that run in different ticks, and what passes between
    ends            embedding and head, their work spread over the stages
    outside         layers before or after the pipeline, spread over them too
    carry           what a stage keeps from tick to tick, and what a chunk computes on
    weight_transfers  gathers of a chunk's weights and sums of its gradients while it computes
    stage_program   the loop over ticks: F slot, head, B slot, W slot, transfers, embedding
    sharding        how parameters and batch lie over the mesh, and the rules that this allows
    engine          this module: builds these parts, and sums gradients over devices after the loop

Buffers are as large as the table's own peak. The program is manual over stage, data, fsdp, expert
and context; the partitioner handles the other axes.

Letters: S stages, V repeats, L layers per chunk, M microbatches, B sequences of a microbatch on one
data shard, T tokens of each on one device, D embed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from maxpipe.model.layers import AuxiliaryLosses
from maxpipe.model.parameters import Params, ParamSpec, map_specs
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.chunk import (
    Remat,
    apply_first_layers,
    apply_layers,
    checkpoint,
    layer_function,
    remat_policy,
)
from maxpipe.pipeline.engines.base import (
    Batch,
    EngineInputs,
    Metrics,
    SpmdEngine,
    float32_zeros,
    metrics_of,
)
from maxpipe.pipeline.engines.scheduled.carry import (
    Carry,
    ChunkInputs,
    ChunkOutputs,
    ChunkVjp,
    Weights,
    all_weights,
    filled,
)
from maxpipe.pipeline.engines.scheduled.ends import ShardedEmbedding, ShardedHead
from maxpipe.pipeline.engines.scheduled.outside import LayerInputs, ShardedLayers
from maxpipe.pipeline.engines.scheduled.sharding import (
    batch_specs,
    check_rules,
    param_specs,
    skips_idle,
    trained_parts,
    with_first,
)
from maxpipe.pipeline.engines.scheduled.stage_program import Settings, StageProgram
from maxpipe.pipeline.engines.scheduled.tick_plan import LockstepPlan, lockstep_plan
from maxpipe.pipeline.engines.scheduled.weight_transfers import WeightTransfers
from maxpipe.pipeline.manual import (
    BATCH_AXES,
    MANUAL_AXES,
    Gather,
    gather_tree,
    is_manual,
    map_gathers,
    needs_order,
    psum,
    sum_replicas,
)
from maxpipe.pipeline.schedules.table import forward_only
from maxpipe.pipeline.split_vjp import SplitBackwardVjp, SplitVjp
from maxpipe.pipeline.weights import for_use, gather_of, spec_for_use, with_outside

Outputs = TypeVar("Outputs")
Tree = TypeVar("Tree")
# Mesh axes of the partitioner that split the layer dimensions of a device's weights.
_LEADING = {"layers": (None, None), "outside": (None,)}
Scales = tuple[jax.Array, jax.Array]  # factors of token loss and auxiliary losses, float32 scalars


class ScheduledEngine(SpmdEngine):
    """Engine for loop-placed tables with at most one F, B (or I) and W per tick; see `base.Engine`.

    Args:
      idle_fill: what idle slots compute on; tests fill them with NaN to prove that nothing reads
        them.

    Raises:
      ConfigError: the engine cannot work under the sharding rules.
      ScheduleError: the engine cannot run the table.
    """

    def __init__(self, inputs: EngineInputs, *, idle_fill: float = 0.0):
        table = inputs.table
        assert table is not None
        check_rules(inputs)
        self._inputs = inputs
        self._program = inputs.program
        self._layout = inputs.layout
        self.plan = lockstep_plan(table)
        self.forward_plan = lockstep_plan(forward_only(table))
        self._num_microbatches = table.num_microbatches
        self._settings = Settings(
            num_stages=inputs.layout.num_stages,
            delayed=table.forwarding_delay == 2,
            skip_idle=skips_idle(inputs.config, inputs.mesh),
            in_order=needs_order(inputs.mesh),
            idle_fill=idle_fill,
        )
        # XLA's partitioner would give every device the whole array if it were not filled.
        self._store_fill = idle_fill or (None if is_manual(inputs.mesh) else 0.0)
        # B reads what F stored at slots known only at run time, unless there is one stage.
        is_single = inputs.layout.num_stages == 1
        self._remat = Remat(inputs.config, remat_policy(inputs.config), prevent_cse=is_single)
        self._gather_once = inputs.config.fsdp_gather == "once"
        specs = with_first(inputs.program.specs)
        self._trained = partial(trained_parts, specs)
        self._gathers = map_specs(self._gather, specs) | {"outside": {}}
        self._gather_first = map_specs(self._gather, specs["first"].get("0", {}))
        self._outside: ShardedLayers | None = None
        self._before: ShardedLayers | None = None
        if specs["first"] or inputs.layout.outside_first:
            self._before = ShardedLayers(self._layers_before, self._trained)
        if inputs.layout.num_outside:
            self._outside = ShardedLayers(self._outside_layers)
            self._gathers["outside"] = map_specs(
                lambda spec: self._gather(spec, spec_for_use(inputs.rules, spec)),
                inputs.program.specs["layers"],
            )
        splits_layers = any(g.gathered_axes for g in jax.tree.leaves(self._gathers["layers"]))
        self._gathers_in_steps = inputs.gathers_in_steps and splits_layers
        # Layers that no axis splits are cast once: XLA would do so for every use, and hold all.
        self._layers_once = self._gather_once or not splits_layers

    def loss_and_gradients(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[Metrics, Params]:
        batch = microbatches.prepared(batch, self._inputs.context)
        # Divisors are those of the global batch, hence computed outside the manual program.
        scales = 1 / microbatches.weight_sum(batch), jnp.float32(1 / batch["tokens"].shape[0])
        key_data = jax.random.key_data(key) if self._program.needs_key else None
        out_specs = (PartitionSpec(), self._trained(param_specs(self._inputs)))
        run = self._manual(self._train, out_specs, num_replicated=2)
        metrics, gradients = run(batch, self._with_outside(params), scales, key_data)
        # The program has these layers as separate parts; parameters do not.
        if first := gradients.pop("first"):
            gradients["embed"] |= {"first": first}
        if outside := gradients.pop("outside"):
            specs, rules = self._program.specs["layers"], self._inputs.rules
            layers = with_outside(rules, self._layout, specs, gradients["layers"], outside)
            gradients["layers"] = layers
        return metrics, gradients

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        weight = jnp.sum(batch["weights"])
        shards = self._inputs.rules.size("activation_batch")
        # The forward table is for M microbatches, and each has a row for every data shard.
        batch = microbatches.pad_rows(batch, shards * self._num_microbatches)
        batch = microbatches.prepared(batch, self._inputs.context)
        run = self._manual(self._evaluate, PartitionSpec(), num_replicated=0)
        return {"cross_entropy": run(batch, self._with_outside(params)), "weight": weight}

    def _with_outside(self, params: Params) -> Params:
        """Return `params` with "outside": the layers outside the pipeline as they lie for use.

        The first dense layers become a separate part, "first".
        """
        params = with_first(params)
        if self._outside is None:
            return params | {"outside": {}}
        specs, rules = self._program.specs["layers"], self._inputs.rules
        return params | {"outside": for_use(rules, self._layout, specs, params["layers"])}

    def _manual(
        self,
        f: Callable[..., Outputs],
        out_specs: PartitionSpec | tuple[PartitionSpec, Params],
        num_replicated: int,
    ) -> Callable[..., Outputs]:
        """Return `f(batch, params, *replicated)` as a program that is manual over `MANUAL_AXES`."""
        replicated = [PartitionSpec()] * num_replicated
        # Replication is not tracked: jax#40823 loses sums where a conditional's predicate varies
        # over devices.
        return jax.shard_map(
            f,
            mesh=self._inputs.mesh,
            axis_names=set(MANUAL_AXES),
            check_vma=False,
            in_specs=(batch_specs(self._inputs), param_specs(self._inputs), *replicated),
            out_specs=out_specs,
        )

    def _gather(self, spec: ParamSpec, at_rest: PartitionSpec | None = None) -> Gather:
        dtype = self._program.config.dtype
        return gather_of(self._inputs.rules, spec, dtype, at_rest=at_rest)

    @property
    def _head_parts(self) -> tuple[str, ...]:
        return ("embed", "head") if self._program.config.tie_embeddings else ("head",)

    def _outer(self, params: dict[str, Tree]) -> dict[str, Tree]:
        """Return the part of {"embed", "head", "outside", ...} that follows the last chunk."""
        names = self._head_parts
        if self._outside and not self._layout.outside_first:
            names += ("outside",)
        return {name: params[name] for name in names}

    # What a chunk and the head compute; differentiated by the stage program. With
    # `fsdp_gather=once` their weights are gathered already, otherwise they gather them themselves;
    # layers that no axis splits are cast already in both modes.

    @property
    def _loops(self) -> bool:
        is_loop = self._inputs.config.scan_layers_per_stage
        return is_loop and self._layout.layers_per_stage > 1

    def _chunk(self, x: jax.Array, weights: Weights, inputs: ChunkInputs) -> ChunkOutputs:
        """Apply the layers of a chunk to x [B, T, D]."""
        layer_fn = layer_function(
            self._program, self._prepare_layer, padded=not self._layout.is_even
        )
        layer_fn = self._remat.layer(layer_fn, is_only=self._layout.layers_per_stage == 1)
        index, side, key, _ = inputs
        layers, scan = all_weights(weights, inputs), self._loops
        return apply_layers(layer_fn, layers, index, x, side, key, scan=scan)

    def _prepare_layer(self, layer: Params) -> Params:
        # Weights are gathered before the loop, before the chunk, or in the layer itself.
        is_whole = self._layers_once or self._gathers_in_steps
        return layer if is_whole else gather_tree(self._gathers["layers"], layer)

    def _head_loss(
        self, outer: Params, x: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return (loss sum, cross-entropy sum) of tokens x [P, D], targets [P], weights [P]."""
        outer = {name: outer[name] for name in self._head_parts}
        if not self._gather_once:
            outer = gather_tree({name: self._gathers[name] for name in outer}, outer)
        return self._program.head_loss(outer, x, targets, weights)

    def _outside_layers(
        self, weights: Params, x: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Apply the layers outside the pipeline to x [rows, T, D]; weights [num_outside, ...]."""

        def prepare(layer: Params) -> Params:
            return layer if self._gather_once else gather_tree(self._gathers["outside"], layer)

        config = self._inputs.config
        layer_fn = layer_function(self._program, prepare, padded=False)
        layer_fn = checkpoint(layer_fn, remat_policy(config))
        index, scan = jnp.asarray(self._layout.outside_index), config.scan_layers_per_stage
        return apply_layers(layer_fn, weights, index, x, *inputs, scan=scan)

    def _layers_before(
        self, weights: dict[str, Params], x: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Apply the layers before the pipeline to x [rows, T, D]: "first" ones, then "outside"."""

        def prepare(layer: Params) -> Params:
            return layer if self._gather_once else gather_tree(self._gather_first, layer)

        policy = remat_policy(self._inputs.config)
        x = apply_first_layers(self._program, weights["first"], prepare, policy, x, *inputs)
        if not self._layout.outside_first:
            return x, self._program.no_auxiliary()
        return self._outside_layers(weights["outside"], x, inputs)

    # From here on functions run inside the manual program: arrays are this device's parts.

    def _train(
        self, batch: Batch, params: Params, scales: Scales, key_data: jax.Array | None
    ) -> tuple[Metrics, Params]:
        """Return (losses of the global batch, gradients of this device's shards)."""
        # 1. This stage's weights, layer indices and microbatches.
        key = None if key_data is None else jax.random.wrap_key_data(key_data)
        stage = self._stage_program(batch, params, scales, key)

        # 2. Trace the chunk's vjp once, for any chunk and microbatch.
        first = jnp.zeros((), jnp.int32)
        make_vjp = SplitBackwardVjp if self.plan.splits_backward else SplitVjp
        operands = stage.chunk_operands(first, first)
        vjp = make_vjp(stage.chunk, self._activation(stage), *operands)

        # 3. All ticks.
        carry = stage.run(self.plan, vjp, self._first_carry(stage, self.plan, vjp))

        # 4. Sum over devices. The loss too: each stage has computed a share of the head's tokens.
        metrics = metrics_of(carry.loss * scales[0], carry.aux, scales[1])
        metrics = jax.tree.map(lambda value: psum(value, MANUAL_AXES), metrics)
        return metrics, self._gradients(carry)

    def _evaluate(self, batch: Batch, params: Params) -> jax.Array:
        """Return the cross-entropy sum of the global batch."""
        stage = self._stage_program(batch, params, (jnp.ones(()), jnp.ones(())), None)
        plan = self.forward_plan
        carry = stage.run(plan, None, self._first_carry(stage, plan, None))
        return psum(carry.loss, MANUAL_AXES)

    def _stage_program(
        self, batch: Batch, params: Params, scales: Scales, key: jax.Array | None
    ) -> StageProgram:
        # [V + E, 1, L, ...] -> [V, L, ...], what chunks read
        layers = jax.tree.map(lambda p: p[: self._layout.num_repeats, 0], params["layers"])
        if self._layers_once:
            layers = self._once(Gather.gather, "layers", layers)
        outer, before_weights = self._outer(params), {}
        if self._before:
            outside = params["outside"] if self._layout.outside_first else {}
            before_weights = {"first": params["first"], "outside": outside}
        after = None if self._layout.outside_first else self._outside
        if self._gather_once:
            outer, before_weights = (
                {name: self._once(Gather.gather, name, part) for name, part in parts.items()}
                for parts in (outer, before_weights)
            )
        embedding = self._program.specs["embed"]["embedding"]
        # Each device has all rows of the table, the vocabulary; columns are spread, see `ends`.
        table_spec = self._inputs.rules.spec(embedding.axes, embedding.shape)
        layer_index = jnp.asarray(self._layout.layer_index)  # [V + E, S, L]
        return StageProgram(
            settings=self._settings,
            chunk=self._remat.iteration(self._chunk),
            embedding=ShardedEmbedding(
                table_spec, self._program.config.dtype, self._program.scale_embedding
            ),
            head=ShardedHead(self._head_loss, self._settings.num_stages, after, self._trained),
            embedding_table=params["embed"]["embedding"],
            layers=layers,
            layer_specs=self._program.specs["layers"],
            by_layer=not self._loops,
            layer_index=layer_index[:, lax.axis_index("stage")],
            outer=outer,
            before=self._before,
            before_weights=before_weights,
            batch=microbatches.columns(batch, self._num_microbatches),
            key=key,
            weight_transfers=WeightTransfers(self._gathers["layers"], layers)
            if self._gathers_in_steps
            else None,
            loss_scale=scales[0],
            aux_scale=scales[1],
        )

    def _once(self, move: Callable[..., jax.Array], name: str, part: Params) -> Params:
        """Move a part of the parameters, or of their gradients, once a step.

        `Gather.gather` makes shards whole, not differentiably; `Gather.scatter` sums the gradients
        of what it returned.
        """
        leading = _LEADING.get(name, ())
        return part and map_gathers(lambda g, x: move(g, x, leading), self._gathers[name], part)

    def _activation(self, stage: StageProgram) -> jax.ShapeDtypeStruct:
        """Return the shape of a microbatch's activation, [B, T, D]."""
        rows, _, length = stage.batch["tokens"].shape  # [B, M, T]
        shape = rows, length, self._program.config.embed_dim
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self._program.config.dtype))

    def _first_carry(self, stage: StageProgram, plan: LockstepPlan, vjp: ChunkVjp | None) -> Carry:
        activation, sizes = self._activation(stage), plan.sizes

        def store(slots: int, like: jax.ShapeDtypeStruct | jax.core.ShapedArray) -> jax.Array:
            # One slot more: the scratch slot.
            return filled((slots + 1, *like.shape), like.dtype, self._store_fill)

        def stores(slots: int, shapes: Sequence[jax.core.ShapedArray]) -> list[jax.Array]:
            return [store(slots, shape) for shape in shapes]

        def zeros(parts: Params) -> Params:
            # Frozen parameters have no sums, so nothing of theirs is added up or sent.
            return float32_zeros(self._trained(parts))

        ends = {"layers": stage.layers, "embed": {"embedding": stage.embedding_table}}
        sums = zeros(ends) if vjp else None
        outgoing = jnp.zeros(activation.shape, activation.dtype) if self._settings.delayed else None
        return Carry(
            activations=store(sizes.activations, activation),
            gradients=store(sizes.gradients, activation) if vjp else None,
            residuals=stores(sizes.residuals, vjp.residuals) if vjp else [],
            stash=stores(sizes.stash, vjp.stash) if isinstance(vjp, SplitBackwardVjp) else [],
            outgoing_activation=outgoing,
            outgoing_gradient=outgoing if vjp else None,
            layer_gradients=sums["layers"] if sums else None,
            outer_gradients=zeros(stage.outer) if vjp else None,
            before_gradients=zeros(stage.before_weights) if vjp else None,
            table_gradient=sums["embed"]["embedding"] if sums else None,
            loss=jnp.zeros(()),
            aux=self._program.no_auxiliary(),
        )

    def _gradients(self, carry: Carry) -> Params:
        """Sum gradients over the devices that share a parameter; each keeps those of its shards."""
        layers, outer, before = carry.layer_gradients, carry.outer_gradients, carry.before_gradients
        assert layers is not None
        assert outer is not None
        assert before is not None
        # Parts that all stages compute with; layers outside the pipeline are before or after it.
        shared: dict[str, Params] = {"first": {}, "outside": {}}
        shared |= before | outer
        if self._layers_once:
            layers = self._once(Gather.scatter, "layers", layers)
        if self._gather_once:
            shared = {n: self._once(Gather.scatter, n, part) for n, part in shared.items()}
        # Layers differ between stages.
        layers = sum_replicas(self._gathers["layers"], layers, BATCH_AXES)
        outside_rows = self._layout.shape[0] - self._layout.num_repeats
        layers = jax.tree.map(
            # [V, L, ...] -> [V + E, L, ...]
            lambda g: jnp.pad(g, [(0, outside_rows)] + [(0, 0)] * (g.ndim - 1)),
            layers,
        )
        shared = {
            name: sum_replicas(self._gathers[name], part, MANUAL_AXES) if part else part
            for name, part in shared.items()
        }
        embed = sum_replicas(
            self._gathers["embed"], {"embedding": carry.table_gradient}, MANUAL_AXES
        )
        # Tied weights have the gradients of both ends.
        if "embed" in shared:
            embed = jax.tree.map(jnp.add, embed, shared["embed"])
        return {
            "embed": embed,
            "head": shared["head"],
            # [V + E, L, ...] -> [V + E, 1, L, ...]
            "layers": jax.tree.map(lambda g: g[:, None], layers),
            "first": shared["first"],
            "outside": shared["outside"],
        }
