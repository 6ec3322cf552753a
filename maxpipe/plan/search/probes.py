"""List the programs that a candidate's probe compiles; put their figures into its closed forms.

A probe is one stage's programs on the mpmd engine: forward and backward of a chunk in the middle of
the pipeline, and of the last chunk, which has the head. Its mesh, its microbatch and its policy are
the candidate's own, so that many candidates share it, whatever their schedule.

What another engine does in addition is the difference between its closed form and that of the same
chunk on the mpmd engine: a store of residuals, gathers in steps, sums of gradients by autodiff. The
figures include residuals that units hand over, and transfers of the head's parameters, which closed
forms leave out or count elsewhere: these are subtracted. No figure is taken from a whole compiled
step.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from maxpipe.config.catalog import ENGINES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import resolve
from maxpipe.config.options import OPTIONS, is_set, update
from maxpipe.config.printing import to_yaml
from maxpipe.config.sections import Config
from maxpipe.plan.auto_stages import run_table
from maxpipe.plan.gather_mode import with_gather_mode
from maxpipe.plan.search.block import block_of_configuration, has_closed_form
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.memory import memory_bytes, working_of
from maxpipe.plan.search.seconds import Seconds, Units
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.timing import composed
from maxpipe.plan.search.traffic import residual_seconds
from maxpipe.plan.search.units import units_of
from maxpipe.plan.search.waits import head_wait, unit_waits, waits_of
from maxpipe.plan.simulate import Costs, simulate
from maxpipe.plan.stores import Number

# Layers of a probed chunk; where there are several, each is also rematerialised by itself.
MOST_LAYERS = 2
LEAST_CHUNKS = 3  # the first, one in the middle, and the last
MIDDLE = 1  # the chunk that is neither first nor last
_SECTIONS = ("model.", "mesh.", "pipeline.", "sharding.")
_KEYS = (
    "data.sequence_length",
    "data.global_batch_size",
    "eval.every",
    "compile.topology",
    "compile.num_slices",
)


class UnitFigures(NamedTuple):
    """What the compiler says about one unit.

    Attributes:
      seconds: seconds that it takes, by the walk over its program.
      working: bytes on a device besides its arguments and results.
    """

    seconds: float
    working: float


class Probe(NamedTuple):
    """Programs to compile.

    Attributes:
      config: configuration on the mpmd engine, unresolved.
      layers: layers of each chunk.
      chunks: number of chunks.
      gather: its gather mode, the same as in the closed forms it is compared with.
      splits_backward: whether a backward is an I and a W.
    """

    config: Config
    layers: int
    chunks: int
    gather: str
    splits_backward: bool

    @property
    def kinds(self) -> str:
        """Return the kinds of units of a chunk."""
        return "FIW" if self.splits_backward else "FB"

    @property
    def units(self) -> list[str]:
        """Return the names of its programs, such as F1."""
        return [f"{kind}{chunk}" for chunk in (MIDDLE, self.chunks - 1) for kind in self.kinds]

    def text(self) -> str:
        """Return the YAML of the configuration: all that its programs follow from."""
        keys = [key for key in OPTIONS if key.startswith(_SECTIONS) or key in _KEYS]
        return to_yaml(self.config, [key for key in keys if is_set(self.config, key)])


class Probing:
    """A candidate that is to be probed, with its closed forms.

    Args:
      config: the candidate's configuration, unresolved.
      facts: sizes and costs of the model.
      machine: the devices.

    Attributes:
      probe: the probe to compile.
      text: the probe's text, by which candidates share it.

    Raises:
      ConfigError: its chunk does not run on the mpmd engine or has no closed form, or its chunks
        differ in their kinds of layers, so that one probe cannot stand for all.
    """

    def __init__(self, config: Config, facts: Facts, machine: Machine):
        resolved = resolve(config, machine.devices, machine.slices)
        if not has_closed_form(resolved):
            message = "a schedule from a file has no closed form"
            raise ConfigError(Problem("pipeline.schedule", message))
        self._config = with_gather_mode(resolved, machine.tpu)
        self._machine = machine
        self._sizes = BlockSizes(block_of_configuration(self._config), facts, machine.tpu)
        self.probe = self._probe(config)
        _check_kinds(self._config.model.layer_kinds, self.probe.layers)
        resolve(self.probe.config, machine.devices, machine.slices)
        self.text = self.probe.text()

    def _probe(self, config: Config) -> Probe:
        sizes = self._sizes
        stages = sizes.stages
        repeats = math.ceil(LEAST_CHUNKS / stages)
        layers = min(int(sizes.layers.flat[0]), MOST_LAYERS)
        if not sizes.engine.has_stages:
            layers = 1  # each is rematerialised on its own there
        # Gathers and casts before the loop, and gathers in steps, are closed forms: the probe has
        # none.
        is_ahead = sizes.engine.one_program and sizes.block.grid.size("fsdp") == 1
        in_steps = bool(sizes.gathers_in_steps().any())
        is_within = not sizes.engine.has_stages or bool(sizes.gathers("per_iteration").all())
        gather = "per_iteration" if is_within and not is_ahead and not in_steps else "once"
        plain, interleaved = (
            ("zb_h1", "interleaved_zb") if sizes.splits_backward else ("1f1b", "interleaved_1f1b")
        )
        rows = sizes.block.batch // int(sizes.microbatches.flat[0])
        # An option that the mpmd engine does not take does not affect a unit.
        unused = [key for key in OPTIONS if not ENGINES["mpmd"].takes(key)]
        changes: dict[str, object] = {key: OPTIONS[key].default for key in unused}
        changes |= {
            "pipeline.engine": "mpmd",
            "pipeline.schedule": plain if repeats == 1 else interleaved,
            "pipeline.num_repeats": repeats,
            "pipeline.num_microbatches": stages,
            "pipeline.fsdp_gather": gather,
            "pipeline.num_layers_per_stage": -1,
            "pipeline.layers_per_stage": [],
            "pipeline.parallel_layers": -1,
            "pipeline.unit_times": [],
            "base_model": "",
            "model.from_hf": "",
            "model.num_layers": stages * repeats * layers,
            "model.first_dense_layers": 0,
            "data.global_batch_size": rows * stages,
            "eval.every": 0,
        }
        return Probe(
            update(config, changes), layers, stages * repeats, gather, sizes.splits_backward
        )

    @cached_property
    def _twin(self) -> BlockSizes:
        """Return the sizes of the probed chunk on the mpmd engine."""
        sizes, probe = self._sizes, self.probe
        block = sizes.block._replace(
            engine="mpmd",
            schedule="zb_h1" if probe.splits_backward else "1f1b",
            gathers=(probe.gather,),
            repeats=np.array([1]),
            chunk=np.array([probe.layers]),
            outside=np.array([0]),
        )
        return BlockSizes(block, sizes.facts, sizes.tpu)

    def seconds(self, figures: Mapping[str, UnitFigures]) -> Seconds:
        """Return the step that follows from the figures of the probe's units.

        Raises:
          ValueError: a chunk with the head takes less than one without, or the schedule cannot be
            simulated.
        """
        sizes, machine = self._sizes, self._machine
        waits, units = waits_of(sizes, machine), self._units(figures)
        idle = None if sizes.engine.one_program else self._idle(units)
        step = composed(sizes, machine, units, waits, idle)
        return Seconds(*(float(np.asarray(part).flat[0]) for part in step))

    def _units(self, figures: Mapping[str, UnitFigures]) -> Units:
        """Return the times of a layer and of the head.

        A unit's program includes its waits. They are subtracted; the closed forms add them.
        """
        layers, last = self.probe.layers, self.probe.chunks - 1
        closed, twin = (units_of(sizes, self._machine) for sizes in (self._sizes, self._twin))
        waiting = unit_waits(self._twin, twin, waits_of(self._twin, self._machine))
        forward_wait, backward_wait = (wait / layers for wait in waiting)

        def total(kinds: str, chunk: int) -> float:
            return sum(figures[f"{kind}{chunk}"].seconds for kind in kinds)

        def of_layer(kinds: str) -> float:
            return total(kinds, MIDDLE) / layers

        kinds = self.probe.kinds
        head: Number = total(kinds, last) - total(kinds, MIDDLE)
        if head < 0:
            message = f"chunk {last} takes {-head:.3g} s less than chunk {MIDDLE}, without the head"
            raise ValueError(message)
        # A step counts these transfers with the embedding's. Products may have hidden them.
        head = np.maximum(head - head_wait(self._twin, self._machine), 0.0)
        weight_gradient = closed.weight_gradient
        if self.probe.splits_backward:
            backward = of_layer("I") - twin.input_gradient
            weight_gradient = weight_gradient + of_layer("W") - twin.weight_gradient
        else:
            backward = of_layer("B") - twin.input_gradient - twin.weight_gradient
        handed_over: Number = 0.0
        if self._sizes.engine.one_program:  # its closed form has a store of them
            handed_over = residual_seconds(self._twin, self._machine, self._twin.residuals)
        return Units(
            of_layer("F") - twin.forward - forward_wait - handed_over + closed.forward,
            backward - backward_wait - handed_over + closed.input_gradient,
            weight_gradient,
            # The engine decides which part of the head's work a device has.
            head * closed.head / twin.head,
        )

    def _idle(self, units: Units) -> float:
        """Return the seconds in which the busiest stage waits for others, by the simulator."""
        sizes = self._sizes
        forward_wait, backward_wait = unit_waits(sizes, units, waits_of(sizes, self._machine))
        times = (
            sizes.layers * units.forward + forward_wait,
            sizes.layers * units.input_gradient + backward_wait,
            sizes.layers * units.weight_gradient,
            units.head,
        )
        forward, gradient, weight, head = (float(np.asarray(t).flat[0]) for t in times)
        costs = Costs(forward, gradient + weight, gradient, weight, head=head)
        run = simulate(run_table(self._config), costs)
        return run.makespan - float(run.work.max())

    def memory(self, figures: Mapping[str, UnitFigures]) -> float:
        """Return the bytes of a device, with the working memory of the probed units."""
        closed, twin = working_of(self._sizes), working_of(self._twin)
        most = max(figures[f"{kind}{MIDDLE}"].working for kind in self.probe.kinds)
        # What the head needs depends on the engine's share of it, and stays a closed form.
        working = closed._replace(unit=most + closed.unit - twin.unit)
        return float(np.asarray(memory_bytes(self._sizes, working)).flat[0])


def _check_kinds(kinds: Sequence[str], layers: int) -> None:
    """Raise ConfigError if chunks of so many layers differ in the kinds of their layers."""
    period = next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[:-n])
    if layers % period:
        message = f"kinds of layers repeat every {period}, and a probe's chunk has {layers}"
        raise ConfigError(Problem("model.layer_pattern", message))
