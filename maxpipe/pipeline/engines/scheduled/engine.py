"""What the scheduled engine asks of `sharding.logical_axis_rules`: its collectives are written for one layout.

The scheduled engine: runs loop-placed tables with at most one F, B (or I) and W per tick in one
SPMD program.

1F1B-class schedules interleave forward and backward of different microbatches, so that activations
in flight do not grow with the number of microbatches. Autodiff of a forward loop cannot express
that; here the backward is written out:
a tick runs an F slot, the head, and a B slot on residuals that wait in ring buffers as large as the
table's own peak; with split backwards the B slot leaves weight gradients, and a stash for them in
ring buffers of its own, to a W slot. The program is manual over stage, data, fsdp and context, and
left to the partitioner over the other axes.

Letters: S stages, V repeats, L layers per chunk, M microbatches, B sequences of a microbatch on one
data shard, T tokens of each on one device, D embed."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from maxpipe.config import ConfigError, Problem
from maxpipe.model.parameters import Params, ParamSpec, map_specs
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.chunk import apply_layers, layer_function
from maxpipe.pipeline.engines.base import Batch, EngineInputs, Metrics, SpmdEngine
from maxpipe.pipeline.engines.scheduled.ends import Embedding, Head
from maxpipe.pipeline.engines.scheduled.plan import LockstepPlan, lockstep_plan
from maxpipe.pipeline.engines.scheduled.split_vjp import HalvedVjp, SplitVjp
from maxpipe.pipeline.engines.scheduled.stage_program import Carry, Settings, StageProgram, filled
from maxpipe.pipeline.manual import (
    BATCH_AXES,
    MANUAL_AXES,
    ROW_AXES,
    Gather,
    gather_tree,
    manual_part,
    map_gathers,
    psum,
    sum_replicas,
)
from maxpipe.pipeline.remat import Remat
from maxpipe.pipeline.schedules.table import forward_only
from maxpipe.sharding.rules import KEY


def check_rules(parts: EngineInputs) -> None:
    """Refuses rules under which rows would be counted twice, or layers or vocabulary be missing on a device.

    Raises:
      ConfigError: names every rule that does not fit, and one that does.
    """
    rules, several = parts.rules, [axis for axis in ROW_AXES if parts.mesh.shape[axis] > 1]
    problems = []
    if (rows := _axes(rules.spec(("activation_batch",)))) != set(several):
        text = f"the scheduled engine splits rows over {_names(several)}, but activation_batch lays them"
        problems.append(
            f"{text} over {_names(rows)}; use [activation_batch, [{', '.join(several)}]]"
        )
    for axis, wanted in (("repeat", []), ("stage", ["stage"]), ("layers_per_stage", [])):
        wanted = [name for name in wanted if parts.mesh.shape[name] > 1]
        if (given := _axes(rules.spec((axis,)))) != set(wanted):
            text = f"the scheduled engine lays axis {axis!r} over {_names(wanted)}, not {_names(given)}"
            problems.append(f"{text}; use [{axis}, [{', '.join(wanted)}]]")
    table = parts.program.specs["embed"]["embedding"]
    if over := _axes(PartitionSpec(rules.spec(table.axes, table.shape)[0])):
        problems.append(
            f"the scheduled engine spreads the columns of the embedding table over {_names(over)}, not its rows; "
            f"take these mesh axes from {table.axes[0]!r} and give them to {table.axes[1]!r}"
        )
    if problems:
        raise ConfigError(*(Problem(KEY, text) for text in problems))


def _axes(spec: PartitionSpec) -> set[str]:
    """Manual mesh axes of a one-dimensional PartitionSpec."""
    (entry,) = manual_part(spec)
    return set(entry) if isinstance(entry, tuple) else {entry} if entry else set()


def _names(axes: Iterable[str]) -> str:
    return " and ".join(sorted(axes)) or "no axis"


class ScheduledEngine(SpmdEngine):
    """See `contract.Pipeline`.

    Args:
      parts: program, rules, configuration, layout, schedule.
      idle_fill: what idle slots compute on; tests fill them with NaN to prove that nothing reads
        them.

    Raises:
      ConfigError: the engine cannot work under the sharding rules.
    """

    layer_axes = ("repeat", "stage", "layers_per_stage")

    def __init__(self, parts: EngineInputs, *, idle_fill: float = 0.0):
        table = parts.table
        assert table is not None
        check_rules(parts)
        self._parts = parts
        self._program = parts.program
        self._layout = parts.layout
        self.plan = lockstep_plan(table)
        self.forward_plan = lockstep_plan(forward_only(table))
        self._num_microbatches = table.num_microbatches
        self._settings = Settings(
            parts.layout.num_stages, table.forwarding_delay == 2, skips_idle(parts), idle_fill
        )
        self._remat = Remat(parts.config)
        self._gather_once = parts.config.fsdp_gather == "once"
        self._gathers = map_specs(self._gather, parts.program.specs)

    def layer_index(self) -> np.ndarray:
        return self._layout.layer_index

    def to_canonical(self, leaf: jax.Array) -> jax.Array:
        return self._layout.to_canonical(leaf)

    def from_canonical(self, leaf: jax.Array) -> jax.Array:
        return self._layout.from_canonical(leaf)

    def loss_and_gradients(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[Metrics, Params]:
        batch = microbatches.prepared(batch, self._parts.context)
        scales = 1 / microbatches.weight_sum(batch), jnp.float32(1 / batch["tokens"].shape[0])
        key_data = jax.random.key_data(key) if self._program.needs_key else None
        run = self._manual(self._train, (PartitionSpec(), self._param_specs()), num_replicated=2)
        loss, gradients = run(batch, params, scales, key_data)
        return {"loss": loss}, gradients

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        weight = jnp.sum(batch["weights"])
        shards = self._parts.rules.size("activation_batch")
        batch = microbatches.pad_rows(batch, shards * self._num_microbatches)
        batch = microbatches.prepared(batch, self._parts.context)
        run = self._manual(self._evaluate, PartitionSpec(), num_replicated=0)
        return {"cross_entropy": run(batch, params), "weight": weight}

    def _manual(self, f: Any, out_specs: Any, num_replicated: int) -> Any:
        """`f(batch, params, *replicated)` as a program that is manual over `MANUAL_AXES`."""
        rules = self._parts.rules
        batch = microbatches.specs(
            manual_part(rules.spec(("activation_batch", "activation_length")))
        )
        # Replication is not tracked: jax#40823 loses sums where a conditional's predicate varies
        # over devices.
        return jax.shard_map(
            f,
            mesh=rules.mesh,
            axis_names=set(MANUAL_AXES),
            check_vma=False,
            in_specs=(batch, self._param_specs(), *[PartitionSpec()] * num_replicated),
            out_specs=out_specs,
        )

    def _param_specs(self) -> Params:
        rules, shape = self._parts.rules, self._layout.shape

        def layer(spec: ParamSpec) -> PartitionSpec:
            return manual_part(rules.spec(self.layer_axes + spec.axes, shape + spec.shape))

        specs = self._program.specs
        outer = {
            n: map_specs(lambda s: manual_part(rules.spec(s.axes, s.shape)), specs[n])
            for n in ("embed", "head")
        }
        return {**outer, "layers": map_specs(layer, specs["layers"])}

    def _gather(self, spec: ParamSpec) -> Gather:
        return Gather(
            self._parts.rules.spec(spec.axes, spec.shape), spec.dtype, self._program.config.dtype
        )

    def _outer(self, params: Params) -> Params:
        """What the head needs of {"embed", "head"}."""
        names = ("embed", "head") if self._program.config.tie_embeddings else ("head",)
        return {name: params[name] for name in names}

    def _prepare_layer(self, layer: Params) -> Params:
        return layer if self._gather_once else gather_tree(self._gathers["layers"], layer)

    def _chunk(self, x: jax.Array, weights: Params, rest: Any) -> tuple[jax.Array, jax.Array]:
        index, side, key = rest
        layer_fn = layer_function(
            self._program, self._prepare_layer, padded=not self._layout.is_even
        )
        scan = self._parts.config.scan_layers_per_stage
        layer_fn = self._remat.layer(layer_fn, is_only=self._layout.layers_per_stage == 1)
        return apply_layers(layer_fn, weights, index, x, side, key, scan=scan)

    def _head_loss(
        self, outer: Params, x: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if not self._gather_once:
            outer = gather_tree(self._outer(self._gathers), outer)
        return self._program.head_loss(outer, x, targets, weights)

    # From here on functions run inside the manual program: arrays are this device's parts.

    def _train(
        self, batch: Batch, params: Params, scales: Any, key_data: Any
    ) -> tuple[jax.Array, Params]:
        key = None if key_data is None else jax.random.wrap_key_data(key_data)
        stage = self._stage_program(batch, params, scales, key)
        first = jnp.zeros((), jnp.int32)
        vjp = HalvedVjp if self.plan.splits_backward else SplitVjp
        split = vjp(stage.chunk, self._activation(stage), *stage.inputs(first, first))
        carry = stage.run(self.plan, split, self._first_carry(stage, self.plan, split))
        loss = psum(carry.loss * scales[0] + carry.aux * scales[1], MANUAL_AXES)
        return loss, self._gradients(carry)

    def _evaluate(self, batch: Batch, params: Params) -> jax.Array:
        stage = self._stage_program(batch, params, (jnp.ones(()), jnp.ones(())), None)
        carry = stage.run(
            self.forward_plan, None, self._first_carry(stage, self.forward_plan, None)
        )
        return psum(carry.loss, MANUAL_AXES)

    def _stage_program(
        self, batch: Batch, params: Params, scales: Any, key: jax.Array | None
    ) -> StageProgram:
        layers = jax.tree.map(lambda p: p[:, 0], params["layers"])
        outer = self._outer(params)
        if self._gather_once:
            layers = map_gathers(
                lambda g, p: g.whole(p, leading=(None, None)), self._gathers["layers"], layers
            )
            outer = map_gathers(lambda g, p: g.whole(p), self._outer(self._gathers), outer)
        table = self._program.specs["embed"]["embedding"]
        return StageProgram(
            settings=self._settings,
            chunk=self._remat.iteration(self._chunk),
            embedding=Embedding(
                self._parts.rules.spec(table.axes, table.shape), self._program.config.dtype
            ),
            head=Head(self._head_loss, self._settings.num_stages),
            table=params["embed"]["embedding"],
            layers=layers,
            layer_index=jnp.asarray(self._layout.layer_index)[:, lax.axis_index("stage")],
            outer=outer,
            batch=microbatches.columns(batch, self._num_microbatches),
            key=key,
            loss_scale=scales[0],
            aux_scale=scales[1],
        )

    def _activation(self, stage: StageProgram) -> jax.ShapeDtypeStruct:
        """[B, T, D] of a microbatch."""
        rows, _, length = stage.batch["tokens"].shape
        shape = rows, length, self._program.config.embed_dim
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self._program.config.dtype))

    def _first_carry(
        self, stage: StageProgram, plan: LockstepPlan, split: SplitVjp | None
    ) -> Carry:
        x = self._activation(stage)

        def store(slots: int, like: Any) -> jax.Array:
            return filled((slots + 1, *like.shape), like.dtype, self._settings.idle_fill)

        def zeros(tree: Any) -> Any:
            return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), tree) if split else None

        leaving = jnp.zeros(x.shape, x.dtype) if self._settings.delayed else None
        return Carry(
            activations=store(plan.num_activation_slots, x),
            gradients=store(plan.num_gradient_slots, x) if split else None,
            residuals=[store(plan.num_residual_slots, kept) for kept in split.kept]
            if split
            else [],
            stash=[store(plan.num_stash_slots, s) for s in split.stash]
            if isinstance(split, HalvedVjp)
            else [],
            leaving_f=leaving,
            leaving_b=leaving if split else None,
            layers=zeros(stage.layers),
            head=zeros(stage.outer),
            table=zeros(stage.table),
            loss=jnp.zeros(()),
            aux=jnp.zeros(()),
        )

    def _gradients(self, carry: Carry) -> Params:
        """Sums over the devices that share a parameter; the result lies like the parameters."""
        layers, outer = carry.layers, carry.head
        gathers = self._outer(self._gathers)
        if self._gather_once:
            layers = map_gathers(
                lambda g, x: g.scatter(x, leading=(None, None)), self._gathers["layers"], layers
            )
            outer = map_gathers(lambda g, x: g.scatter(x), gathers, outer)
        layers = sum_replicas(self._gathers["layers"], layers, BATCH_AXES)
        outer = sum_replicas(gathers, outer, MANUAL_AXES)
        embed = sum_replicas(self._gathers["embed"], {"embedding": carry.table}, MANUAL_AXES)
        if "embed" in outer:
            embed = jax.tree.map(jnp.add, embed, outer["embed"])
        return {
            "embed": embed,
            "head": outer["head"],
            "layers": jax.tree.map(lambda g: g[:, None], layers),
        }


def skips_idle(parts: EngineInputs) -> bool:
    """Whether idle slots are skipped: `pipeline.skip_idle`, or on auto where it costs nothing.

    On a real pod an idle slot computed masked takes no time that another stage does not need.
    Simulated devices share cores, so there it does; but a conditional must not hold collectives
    that the partitioner may insert.
    """
    if parts.config.skip_idle != "auto":
        return parts.config.skip_idle == "true"
    automatic = [n for axis, n in parts.mesh.shape.items() if axis not in MANUAL_AXES]
    return parts.mesh.devices.flat[0].platform == "cpu" and max(automatic) == 1
