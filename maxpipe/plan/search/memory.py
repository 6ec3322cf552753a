"""Compute the memory of a device, for the candidates of a block or for one configuration.

One program runs all stages, or each stage is a program, on the mpmd engine. There it counts
parameters, optimizer state and sums of gradients; what the schedule keeps in flight on the stage,
more on earlier stages; and what the largest unit works with, gathered weights included. Offloaded
residuals take memory of the device while they are used, and those of one unit more while they are
copied to the host or back. What the compiler adds for its programs and loses between buffers is
left out. What an I hands to its W, and what a B works with, is at most 3 % off programs that libtpu
compiled for v5e, except with `minimal`, where the latter is a tenth of the memory and 45 % low.

In the functions of stages, `first` and `last` are 1 where a stage has the first, or the last,
chunk; else 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np

from maxpipe.config.sections import Config
from maxpipe.pipeline.schedules.slots import activation_slots
from maxpipe.pipeline.schedules.table import Table
from maxpipe.plan.device_parameters import Parameters
from maxpipe.plan.footprint import itemsize, optimizer_bytes
from maxpipe.plan.number import FLOAT32, Number, single
from maxpipe.plan.search.block import BlockSizes, sizes_of_configuration
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.patterns import FIRST_STAGE, LAST_STAGE, OTHER_STAGES, units_in_flight

N = TypeVar("N", bound=Number, covariant=True)


@dataclass(frozen=True)
class Memory(Generic[N]):
    """Bytes on one device, of one configuration or of many."""

    parameters: N
    optimizer: N
    gradients: N  # sums, whole where they are scattered once a step
    activations: N  # everything that grows with tokens, less what gradients replace
    in_use: N  # copies of weights for computation, and gradients before they are added to the sums

    @property
    def total(self) -> N:
        parts = (self.parameters, self.optimizer, self.gradients, self.activations, self.in_use)
        return cast(N, sum(parts, 0.0))

    def single(self) -> "Memory[float]":
        return Memory(**{name: single(number) for name, number in vars(self).items()})


def memory_bytes(sizes: BlockSizes) -> Number:
    """Return the bytes of a device, or of one of the fullest stage where stages are programs."""
    if sizes.engine.one_program:
        return program_memory(sizes).total
    return fullest_stage(sizes)


def program_memory(sizes: BlockSizes) -> Memory[Number]:
    """Return the memory of a device where one program runs all stages, or there are none."""
    config, column = sizes.config, sizes.tokens * sizes.itemsize
    held = weights_held(sizes)
    # Stages of a lockstep engine divide layers outside the pipeline, and the head.
    lockstep = sizes.engine.lockstep
    share, heads = (sizes.share_of_outside(), sizes.stages) if lockstep else (1.0, 1)
    unit, head = column * working_columns(sizes, share), logits_work(sizes, sizes.tokens / heads)
    # The head has done its work before the backward of a layer begins.
    layers_are_more = unit + held.unit >= head + held.head
    # Late gradients take the place of residuals.
    kept = np.maximum(column * kept_columns(sizes) - held.late, 0.0)
    return Memory(
        parameters=itemsize(config.model.param_dtype) * sizes.weights.stored,
        optimizer=optimizer_bytes(config) * sizes.trained_weights.stored,
        gradients=held.gradients,
        activations=kept + np.where(layers_are_more, unit, head),
        in_use=held.copies + np.where(layers_are_more, held.unit, held.head),
    )


def kept_columns(sizes: BlockSizes) -> Number:
    """Return the width of what one program keeps for backwards at the fullest moment."""
    embed, saving, engine = sizes.config.model.embed_dim, sizes.saving, sizes.engine
    of_outside = sizes.outside * (embed + saving.residuals) + saving.first_kept
    if not engine.has_stages:  # units are layers
        return sizes.config.model.stacked_layers * (embed + saving.residuals) + of_outside
    unit = embed + sizes.layers * saving.residuals
    if engine.lockstep:
        residuals, arrivals, stash = map(sizes.of_pattern, ("residuals", "arrivals", "stash"))
        # Each store has a slot more, for scratch: two for activations and gradients.
        stashes = (stash + np.greater(stash, 0)) * sizes.layers * saving.stash
        stored = (residuals + 1) * unit + (arrivals + 2) * embed + stashes
        return stored + sizes.share_of_outside() * of_outside
    # The circular engine keeps a unit of every iteration, and the conveyor of inputs and outputs
    # with its gradient. Each stage runs the layers outside the pipeline on its microbatches.
    # Autodiff keeps the masks that choose each iteration's input and output, a byte per value.
    delay = sizes.config.pipeline.forwarding_delay
    iterations = sizes.microbatches * sizes.repeats + delay * (sizes.stages - 1)
    masks = 2 * iterations * sizes.gathers("per_iteration") * embed / sizes.itemsize
    of_stage = sizes.microbatches / sizes.stages
    return iterations * unit + masks + of_stage * (2 * embed + of_outside)


def working_columns(sizes: BlockSizes, first_share: Number = 1.0) -> Number:
    """Return the width of a chunk's work, or of first dense layers' on a share of a microbatch.

    Where units are programs of their own, first dense layers are left out, see `_first_excess`.
    """
    working: Number = _layer_work(sizes, sizes.facts)
    kept_results = np.minimum(sizes.layer.made, sizes.saving.residuals)
    if not sizes.engine.one_program:
        # The results are among what the chunk keeps or recomputes.
        by_layer = sizes.config.pipeline.remat_layers
        return working - (kept_results if by_layer else sizes.layer.made)
    if sizes.is_unrolled:
        # A loop copies a layer's residuals from its stack; an unrolled layer reads them in place.
        working = working - kept_results
    elif sizes.engine.has_stages:
        # What a backward holds but has not computed itself, it reads in its store.
        working = working + (sizes.layers - 1) * (sizes.saving.held - sizes.saving.residuals)
    return np.maximum(working, first_share * _layer_work(sizes, sizes.facts.of_first_layers))


def _first_excess(sizes: BlockSizes) -> Number:
    more = _layer_work(sizes, sizes.facts.of_first_layers) - working_columns(sizes)
    return sizes.tokens * sizes.itemsize * np.maximum(more, 0.0)


def _layer_work(sizes: BlockSizes, facts: Facts | None) -> Number:
    """Return the width of what a layer's backward holds, with keys and values that it gathers."""
    if facts is None:
        return 0.0
    layer, grid = facts.layer(sizes.block.grid.sizes), sizes.block.grid
    gathered = (1.0 - sizes.in_ring) * (grid.size("context") - 1)
    return layer.working + 2 * gathered * layer.key_values


def logits_work(sizes: BlockSizes, tokens: Number) -> Number:
    """Return the bytes of a tile of logits in float32 and of their gradient, for so many tokens."""
    columns = sizes.config.model.vocab_size / sizes.block.grid.size("tensor")
    of_tile = np.ceil(np.divide(tokens, sizes.tiles))
    return (FLOAT32 + sizes.itemsize) * of_tile * columns


class Held(NamedTuple):
    """Bytes of weights and gradients on one device, besides those at rest."""

    copies: Number  # of weights, all step long
    gradients: Number  # sums, all step long, and gradients that wait to be added
    late: Number  # the part of these that layers make one by one while their residuals are freed
    unit: Number  # what a unit makes of weights, and their gradients, while it computes
    head: Number  # the same for the head


def weights_held(sizes: BlockSizes) -> Held:
    """Return what an engine of one program holds besides parameters and optimizer at rest."""
    if not sizes.engine.has_stages:
        return _sequential(sizes)
    return _lockstep(sizes) if sizes.engine.lockstep else _circular(sizes)


def _sequential(sizes: BlockSizes) -> Held:
    weights, trained, size = sizes.weights, sizes.trained_weights, sizes.itemsize
    # A microbatch's gradients wait until all are computed, and are then added.
    several, stored = np.greater(sizes.microbatches, 1), itemsize(sizes.config.model.param_dtype)
    whole = weights.layers_gathered - weights.layers_at_rest
    # A loop over layers allocates all gradients at its start.
    late = sizes.is_unrolled * np.where(several, stored, FLOAT32) * trained.layers_at_rest
    return Held(
        copies=_cast_layers(sizes) + sizes.keeps_gathered * size * whole,
        gradients=(FLOAT32 + stored * several) * trained.at_rest,
        late=late,
        # A layer and its gradient.
        unit=size * (weights.of.layer_gathered + trained.of.layer_gathered),
        head=size * (weights.of.projection + trained.of.projection),
    )


def _cast_layers(sizes: BlockSizes) -> Number:
    """Return the bytes of layers that XLA casts before the loop over layers or iterations."""
    is_cast = sizes.itemsize < itemsize(sizes.config.model.param_dtype)
    return is_cast * sizes.itemsize * sizes.weights.layers_at_rest


def _lockstep(sizes: BlockSizes) -> Held:
    weights, trained, size = sizes.weights, sizes.trained_weights, sizes.itemsize
    of, of_trained = weights.of, trained.of
    stored = itemsize(sizes.config.model.param_dtype)
    once, in_steps = sizes.gathers("once"), sizes.gathers_in_steps()
    each = 1.0 - once  # per iteration; the engine has no repeats to gather for
    chunk = sizes.layers * of.layer_gathered
    # Weights that are whole are cast before the loop, all layers at once.
    is_whole = float(of.layer_gathered == of.layer_at_rest and size < stored)
    whole = of_trained.layer_gathered * (of_trained.layer_gathered > of_trained.layer_at_rest)
    gradients = each * (1.0 - in_steps) * (sizes.layers * of_trained.layer_at_rest + whole)
    gradients += once * sizes.layers * of_trained.layer_gathered
    # Gradients of layers outside the pipeline come all at once.
    outside = once * trained.outside_gathered
    outside += each * (trained.outside_at_rest + whole) * np.greater(trained.outside_at_rest, 0)
    gradients = np.maximum(gradients, outside)
    # In mode `once` the head and the sum of its gradients are whole, too; the embedding is not.
    embedding = of_trained.ends_at_rest - of_trained.shared_at_rest
    whole_sums = trained.layers_gathered + of_trained.shared + trained.outside_gathered + embedding
    # In steps the gradients of all layers of a chunk are whole, in the dtype of activations.
    whole_chunk = in_steps * sizes.layers * of_trained.layer_gathered
    gathered = weights.layers_gathered + of.shared + weights.outside_gathered
    return Held(
        # If weights are gathered in steps, XLA casts all shards before the loop, too.
        copies=np.maximum(in_steps, each * is_whole) * _cast_layers(sizes)
        + once * size * gathered
        # Layers outside the pipeline are laid out for use.
        + stored * weights.outside_at_rest,
        gradients=FLOAT32 * (each * trained.at_rest + once * whole_sums),
        late=0.0,
        unit=each * (1.0 - is_whole) * size * (chunk + whole_chunk) + FLOAT32 * gradients,
        head=each * size * of.projection + FLOAT32 * of_trained.projection,
    )


def _circular(sizes: BlockSizes) -> Held:
    weights, trained, size = sizes.weights, sizes.trained_weights, sizes.itemsize
    once, per_repeat = sizes.gathers("once"), sizes.gathers("per_repeat")
    each = 1.0 - per_repeat - once
    chunk = sizes.layers * weights.of.layer_gathered
    # A repeat's weights are gathered during the one before, or the one before that.
    fewest = sizes.config.pipeline.forwarding_delay * sizes.stages  # microbatches of a conveyor
    lookahead = 1.0 + np.equal(sizes.microbatches, fewest)
    sets = np.minimum(sizes.repeats, lookahead + 1.0) * per_repeat
    sums = np.minimum(sizes.repeats, 2.0) * per_repeat
    # The sums of the repeats at work, two at a switch, become gradients at rest when they are done.
    done = trained.at_rest - sums * trained.layers_at_rest / sizes.repeats
    whole = sizes.layers * sums * trained.of.layer_gathered + once * trained.over_fsdp
    # Layers outside the pipeline are gathered one by one, and have gradients at rest in any mode.
    rows = trained.in_rows - (1.0 - once) * trained.outside_at_rest
    is_outside = np.greater(weights.outside_at_rest, 0)
    at_once = np.maximum(each * chunk, is_outside * weights.of.layer_gathered)
    return Held(
        copies=each * _cast_layers(sizes)
        + size * (sets * chunk + once * weights.over_fsdp)
        # Gradients of the projection: the logits of all microbatches are made at once.
        + size * trained.of.projection
        + itemsize(sizes.config.model.param_dtype) * weights.outside_at_rest,
        gradients=FLOAT32 * ((1.0 - once) * done + whole + rows),
        late=0.0,
        # A chunk's weights, or those of a layer outside, and a layer's gradient before it is added.
        unit=size * (at_once + trained.of.layer_gathered),
        head=size * weights.of.projection,
    )


def fullest_stage(sizes: BlockSizes) -> Number:
    """Return the bytes on a device of the fullest stage, an array of the block's dimensions.

    Chunks are of equal size. Three stages are compared: those with the first and the last chunk,
    which are the same in schedules that turn back, and the fullest of the others.
    """
    turns_back, layers = sizes.of_pattern("turns_back"), sizes.layers
    totals = [
        _state(sizes, layers * sizes.repeats, first, last)
        + _in_flight(sizes, place, first)
        + _stage_work(sizes, layers, first, last)
        for place, first, last in (
            (FIRST_STAGE, 1.0, turns_back),
            (LAST_STAGE, turns_back, 1.0),
            (OTHER_STAGES, 0.0, 0.0),
        )
    ]
    return np.maximum.reduce(np.broadcast_arrays(*totals))


class StageMemory:
    """Bytes on a device of each stage, whose chunks may differ in size."""

    def __init__(self, config: Config, table: Table, *, on_tpus: bool = False):
        self._sizes = sizes_of_configuration(config, None, on_tpus=on_tpus, table=table)
        self._table = table
        slots = activation_slots(table)
        self._arrived = slots.activations.peak + slots.gradients.peak

    def bytes(self, stage: int, sizes: Sequence[int]) -> float:
        """Return the peak on one device of a stage whose chunks have `sizes` layers."""
        working = _stage_work(self._sizes, max(sizes), *self._ends(stage))
        held = self.state_bytes(stage, sum(sizes)) + self.in_flight_bytes(stage, sizes)
        return held + single(working)

    def state_bytes(self, stage: int, layers: int) -> float:
        return single(_state(self._sizes, layers, *self._ends(stage)))

    def in_flight_bytes(self, stage: int, chunks: Sequence[int]) -> float:
        """Return the bytes of chunks in flight, and of inputs and gradients not yet used."""
        sizes, layers = self._sizes, np.asarray(chunks, float)
        embed = sizes.config.model.embed_dim
        unit = embed + layers * single(sizes.saving.residuals)
        handed_over = embed + layers * single(sizes.saving.handed_over)
        if self._ends(stage)[0]:  # the units of the first chunk run first dense layers, too
            unit[0] += single(sizes.saving.first_kept)
            handed_over[0] += single(sizes.saving.first_handed_over)
        peak = float((self._units_in_flight[stage] @ np.concatenate([unit, handed_over])).max())
        columns = peak + float(self._arrived[stage]) * embed
        return single(sizes.tokens) * sizes.itemsize * columns

    @cached_property
    def _units_in_flight(self) -> list[np.ndarray]:
        return units_in_flight(self._table)

    def _ends(self, stage: int) -> tuple[float, float]:
        chunks = self._table.stage_of_chunk
        return float(chunks[0] == stage), float(chunks[-1] == stage)


def _owned(parameters: Parameters, layers: Number, first: Number, last: Number) -> Number:
    """Return the parameters that a stage owns; a part's embedding has the first dense layers."""
    ends = first * parameters.embed_of_stage + last * parameters.head_of_stage
    return layers * parameters.layer_at_rest + ends


def _state(sizes: BlockSizes, layers: Number, first: Number, last: Number) -> Number:
    """Return the bytes of parameters, optimizer state and sums of gradients of a stage.

    Weights that are cast and gathered once a step are held twice, and the sums of their gradients
    are whole; otherwise all are sharded as at rest.
    """
    model, all_of_them, trained = sizes.config.model, sizes.parameters, sizes.trained
    # Tied embeddings are copied to the stage of the head, with a gradient and no optimizer state.
    tied = model.tie_embeddings * last
    copied = tied * (1.0 - first)

    def at_rest(parameters: Parameters) -> Number:
        owned = _owned(parameters, layers, first, last)
        return owned + copied * parameters.embed_of_stage

    def whole(parameters: Parameters, copies: Number) -> Number:
        ends = (first + copies) * parameters.embed_gathered + last * parameters.head_gathered
        return layers * parameters.layer_gathered + ends

    state = itemsize(model.param_dtype) * at_rest(all_of_them)
    state = state + optimizer_bytes(sizes.config) * _owned(trained, layers, first, last)
    # The first chunk gathers the embeddings, and so does the last.
    gathered = sizes.itemsize * whole(all_of_them, tied) + FLOAT32 * whole(trained, copied)
    return state + np.where(sizes.gathers_once > 0, gathered, FLOAT32 * at_rest(trained))


def _in_flight(sizes: BlockSizes, place: int, first: Number) -> Number:
    """Return the bytes of chunks in flight on a stage, and of what has arrived there.

    `place` is one of the three in `patterns`. The first chunk runs the first dense layers, too.
    """
    embed, layers = sizes.config.model.embed_dim, sizes.layers
    unit = embed + layers * sizes.saving.residuals
    handed_over = embed + layers * sizes.saving.handed_over
    saved, late, *of_first, arrived = sizes.in_flight(place)
    dense = (sizes.saving.first_kept, sizes.saving.first_handed_over)
    columns = saved * unit + late * handed_over + arrived * embed
    columns += first * sum(n * kept for n, kept in zip(of_first, dense, strict=True))
    return sizes.tokens * sizes.itemsize * columns.max(axis=0)


def _stage_work(sizes: BlockSizes, layers: Number, first: Number, last: Number) -> Number:
    """Return what the largest unit of a stage works with; `layers` are those of its largest chunk.

    Weights that it gathers are included.
    """
    recomputed = np.maximum(sizes.layer.made - sizes.saving.residuals, 0.0)
    if (pipeline := sizes.config.pipeline).remat_layers:
        # Without `remat_iterations` the inputs of layers are residuals.
        recomputed = (
            pipeline.remat_iterations * sizes.config.model.embed_dim + sizes.saving.offloaded
        )
    columns = working_columns(sizes) + layers * (recomputed + sizes.saving.offloaded)
    each_time = (sizes.block.grid.size("fsdp") > 1) * (1.0 - sizes.gathers_once)
    values = sizes.tokens * columns + each_time * layers * sizes.parameters.layer_gathered
    unit = sizes.itemsize * values + first * _first_excess(sizes)
    # A forward ends with the head, after its layers and before a backward.
    return np.maximum(unit, last * logits_work(sizes, sizes.tokens)) + _ends_in_use(
        sizes, first, last
    )


def _ends_in_use(sizes: BlockSizes, first: Number, last: Number) -> Number:
    """Return the bytes of embedding and head as units compute with them, and of their gradients."""

    def projection(parameters: Parameters) -> float:
        is_tied = sizes.config.model.tie_embeddings
        return parameters.embed_gathered if is_tied else parameters.head_gathered

    head, trained = last * projection(sizes.parameters), last * projection(sizes.trained)
    embedding = first * sizes.parameters.embed_gathered * sizes.itemsize
    each_time = np.maximum(embedding, head * sizes.itemsize + trained * FLOAT32)
    # Gathered once they are part of the stage's state; the head's gradient is not.
    return np.where(sizes.gathers_once > 0, trained * sizes.itemsize, each_time)
