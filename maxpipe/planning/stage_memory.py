"""Memory of a stage's devices under a schedule, from shapes: which numbers of layers fit.

Letters: V chunks of a stage, D embed. Counted are parameters, optimizer state and the sums of
gradients; what the schedule keeps in flight on the stage, where earlier stages have more; and what
the largest unit works with, whole weights among it. What the compiler adds for its programs, and
loses between buffers, is not. Beside programs that libtpu 0.0.42.1 compiled for v5e (three layers a
stage, width 1024, bfloat16), what an I hands to its W is 3 % low, and what a B works with a third
high.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from maxpipe.config.sections import Config
from maxpipe.pipeline.schedules.slots import activation_slots
from maxpipe.pipeline.schedules.table import KINDS, Table
from maxpipe.planning.flops import layer_parameter_count
from maxpipe.planning.footprint import (
    axis_size,
    itemsize,
    kept_width,
    layer_widths,
    logits_bytes,
    microbatch_tokens,
    optimizer_bytes,
    working_width,
)


class StageMemory:
    """Bytes on a device of each stage.

    Args:
      config: resolved, for the MPMD engine.
      table: its schedule.
    """

    def __init__(self, config: Config, table: Table):
        self._config, self._table = config, table
        self._in_flight = units_in_flight(table)
        slots = activation_slots(table)
        self._waiting = slots.activations.peak + slots.gradients.peak

    def bytes(self, stage: int, sizes: Sequence[int]) -> float:
        """Peak on one device of a stage whose chunks have so many layers."""
        working = self._working(max(sizes)) + self._whole_weights(stage, max(sizes))
        if self._table.stage_of_chunk[-1] == stage:
            working += logits_bytes(self._config, microbatch_tokens(self._config))
        return self.state_bytes(stage, sum(sizes)) + self.in_flight_bytes(stage, sizes) + working

    def state_bytes(self, stage: int, layers: int) -> float:
        """Parameters, optimizer and gradients, all of them sharded over fsdp and tensor."""
        model, stage_of = self._config.model, self._table.stage_of_chunk
        first, last = bool(stage_of[0] == stage), bool(stage_of[-1] == stage)
        table, tied = model.vocab_size * model.embed_dim, model.tie_embeddings
        owned = layers * layer_parameter_count(model) + first * table + last * model.embed_dim
        if last and not tied:
            owned += table
        # Tied embeddings are a copy on the stage of the head, with a gradient and without an
        # optimizer.
        copied = table if last and tied and not first else 0
        size = itemsize(model.param_dtype) + 4.0
        shards = axis_size(self._config, "fsdp") * axis_size(self._config, "tensor")
        return ((owned + copied) * size + owned * optimizer_bytes(self._config)) / shards

    def in_flight_bytes(self, stage: int, sizes: Sequence[int]) -> float:
        """Chunks in flight, and inputs and gradients that have arrived and wait for their unit."""
        embed, layers = self._config.model.embed_dim, np.asarray(sizes, float)
        unit = embed + layers * kept_width(self._config)
        handed_over = embed + layers * handed_over_width(self._config)
        peak = float((self._in_flight[stage] @ np.concatenate([unit, handed_over])).max())
        return self._element_bytes * (peak + float(self._waiting[stage]) * embed)

    def _working(self, layers: int) -> float:
        """What the backward of a chunk has at once: what it computes again, and one layer's tensors with gradients."""
        config = self._config
        # A chunk is computed again as a whole, unless layer by layer.
        again = max(sum(layer_widths(config).values()) - kept_width(config), 0.0)
        if config.pipeline.remat_layers:
            again = config.model.embed_dim
        return self._element_bytes * (working_width(config) + layers * again)

    def _whole_weights(self, stage: int, layers: int) -> float:
        """Weights as a unit computes with them, in the dtype of activations: not spread over fsdp."""
        config, stage_of = self._config, self._table.stage_of_chunk
        size, table = itemsize(config.model.dtype), config.model.vocab_size * config.model.embed_dim
        ends = 0.0
        if stage_of[0] == stage:
            ends = table * size
        if stage_of[-1] == stage:
            ends = max(ends, table * (size + 4.0))  # with the head's gradient, float32
        is_gathered = axis_size(config, "fsdp") > 1
        gathered = layers * layer_parameter_count(config.model) * size if is_gathered else 0.0
        return (ends + gathered) / axis_size(config, "tensor")

    @cached_property
    def _element_bytes(self) -> float:
        """Bytes of one column of a microbatch's activations."""
        return microbatch_tokens(self._config) * itemsize(self._config.model.dtype)


def handed_over_width(config: Config) -> float:
    """Width on one device of what a layer's I leaves to its W.

    That is the inputs of products and the gradients of their results; beside them what the slicing
    does not take apart further: of the two norms, in float32, and of the gate's activation
    function.
    """
    widths, embed = layer_widths(config), config.model.embed_dim
    inputs = 2 * embed + widths["context"] + widths["mlp_up"]
    gradients = sum(widths.values()) - widths["context"]
    norms = 2 * embed * 4 / itemsize(config.model.dtype)
    return inputs + gradients + norms + widths["mlp_gate"]


def units_in_flight(table: Table) -> list[np.ndarray]:
    """For each stage, int [combinations, 2 V]: how many units of each of its chunks are in flight at once.

    The first V columns count those between F and the end of B or I, the others those between I and
    the end of W. Each combination that occurs is there once.
    """
    repeats = table.num_repeats
    events: list[list[tuple[int, int, str, int]]] = [[] for _ in range(table.num_stages)]
    for kind in table.kinds:
        for tick, stage, _, chunk in zip(*(a.tolist() for a in table.units(kind)), strict=True):
            events[stage].append((tick, KINDS.index(kind), kind, chunk))
    changes = {"F": ((0, 1),), "B": ((0, -1),), "I": ((0, -1), (repeats, 1)), "W": ((repeats, -1),)}
    found = []
    for mine in events:
        now, seen = [0] * (2 * repeats), set()
        for _, _, kind, chunk in sorted(mine):
            for first_column, change in changes[kind]:
                now[first_column + chunk] += change
            seen.add(tuple(now))
        found.append(np.array(sorted(seen)))
    return found
