"""Compute the memory of a stage's devices on the mpmd engine, where stages are programs.

It counts parameters, optimizer state and sums of gradients; what the schedule keeps in flight on
the stage, more on earlier stages; and what the largest unit works with, gathered weights included.
Offloaded residuals take memory of the device while they are used, and those of one unit more while
they are copied to the host or back.
It leaves out what the compiler adds for its programs and loses between buffers. Compared with
programs that libtpu 0.0.42.1 compiled for v5e (three layers a stage, width 1024, bfloat16), the
estimate of what an I hands to its W is 3 % low. That of what a B works with is 2 % high with
rematerialisation `full`; with `minimal`, where it is a tenth of the stage's memory, 45 % low.

In the functions, `first` and `last` are 1 where a stage has the first, or the last, chunk; else 0.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from maxpipe.config.sections import Config
from maxpipe.pipeline.schedules.slots import activation_slots
from maxpipe.pipeline.schedules.table import Table
from maxpipe.plan.footprint import itemsize, optimizer_bytes
from maxpipe.plan.number import FLOAT32, Number, single
from maxpipe.plan.search.facts import Parameters
from maxpipe.plan.search.patterns import FIRST_STAGE, LAST_STAGE, OTHER_STAGES, units_in_flight
from maxpipe.plan.search.sizes import BlockSizes, sizes_of_configuration
from maxpipe.plan.search.working import first_excess, logits_work, working_columns


def fullest_stage(sizes: BlockSizes) -> Number:
    """Return the bytes on a device of the fullest stage, an array of the block's dimensions.

    Chunks are of equal size. Three stages are compared: those with the first and the last chunk,
    which are the same in schedules that turn back, and the fullest of the others.
    """
    turns_back, layers = sizes.of_pattern("turns_back"), sizes.layers
    totals = [
        _state(sizes, layers * sizes.repeats, first, last)
        + _in_flight(sizes, place, first)
        + _working(sizes, layers, first, last)
        for place, first, last in (
            (FIRST_STAGE, 1.0, turns_back),
            (LAST_STAGE, turns_back, 1.0),
            (OTHER_STAGES, 0.0, 0.0),
        )
    ]
    return np.maximum.reduce(np.broadcast_arrays(*totals))


class StageMemory:
    """Bytes on a device of each stage, whose chunks may differ in size.

    Args:
      on_tpus: whether the devices are known to be TPUs.
    """

    def __init__(self, config: Config, table: Table, *, on_tpus: bool = False):
        self._sizes = sizes_of_configuration(config, None, on_tpus=on_tpus, table=table)
        self._table = table
        slots = activation_slots(table)
        self._arrived = slots.activations.peak + slots.gradients.peak

    def bytes(self, stage: int, sizes: Sequence[int]) -> float:
        """Return the peak on one device of a stage whose chunks have `sizes` layers."""
        working = _working(self._sizes, max(sizes), *self._ends(stage))
        held = self.state_bytes(stage, sum(sizes)) + self.in_flight_bytes(stage, sizes)
        return held + single(working)

    def state_bytes(self, stage: int, layers: int) -> float:
        """Return the bytes of parameters, optimizer state and sums of gradients."""
        return single(_state(self._sizes, layers, *self._ends(stage)))

    def updated_parameters(self, stage: int, layers: int) -> float:
        """Return how many parameters the stage's optimizer updates on a device."""
        return single(_owned(self._sizes.trained, layers, *self._ends(stage)))

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
        """Return whether a stage has the first, and the last, chunk."""
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

    Args:
      place: place of the stage, one of the three in `InFlight`.
      first: 1 where it has the first chunk, which runs the first dense layers, too.
    """
    embed, layers = sizes.config.model.embed_dim, sizes.layers
    unit = embed + layers * sizes.saving.residuals
    handed_over = embed + layers * sizes.saving.handed_over
    at = sizes.in_flight(place)
    dense = (
        at.saved_first * sizes.saving.first_kept
        + at.handed_over_first * sizes.saving.first_handed_over
    )
    columns = at.saved * unit + at.handed_over * handed_over + first * dense + at.arrived * embed
    return sizes.tokens * sizes.itemsize * columns.max(axis=0)


def _working(sizes: BlockSizes, layers: Number, first: Number, last: Number) -> Number:
    """Return what the largest unit of a stage works with, with weights that it gathers.

    Args:
      layers: layers of the largest chunk.
      first, last: see the module.
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
    unit = sizes.itemsize * values + first * first_excess(sizes)
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
