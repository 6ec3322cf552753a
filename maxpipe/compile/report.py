"""Hold what is known about a compiled step, as data, as JSON and as lines for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self, cast

from jax.sharding import Mesh

from maxpipe.compile.collectives import Collective, LinkUse
from maxpipe.compile.knobs import Gain, Knob
from maxpipe.compile.prediction.prediction import Prediction
from maxpipe.compile.prediction.walk import Timeline
from maxpipe.config.catalog import ENGINES
from maxpipe.config.sections import Config
from maxpipe.devices.chips import device_memory, short_name
from maxpipe.plan.auto_stages import bubble_fraction
from maxpipe.plan.estimate import Bounds
from maxpipe.plan.flops import model_flops_per_token
from maxpipe.plan.search.memory import Memory

COMPILER_PARTS = ("arguments", "temp", "program")  # of `CompilerMemory`, in reports
NO_KNOB = "no single change of batch, schedule or mesh helps on these devices; take more of them"


@dataclass(frozen=True)
class CompilerMemory:
    """Bytes on one device, as the compiler counts them.

    Attributes:
      arguments: parameters, optimizer state and batch.
      temp: everything else that is alive at the fullest moment.
      program: the code.
      results: results that do not reuse the arguments' memory.
    """

    arguments: int
    temp: int
    program: int
    results: int

    @property
    def total(self) -> int:
        return self.arguments + self.temp + self.program + self.results


class CompileTimes(NamedTuple):
    """Seconds from Python code to a jaxpr, to StableHLO, and to a program by XLA."""

    tracing: float
    lowering: float
    compiling: float

    @property
    def total(self) -> float:
        return sum(self)

    def line(self) -> str:
        parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self._asdict().items())
        return f"compiled    in {self.total:.0f} s: {parts}"


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What `maxpipe.compile` reports of a step, in one program or in several.

    Attributes:
      bubble: idle share of the stages' time, from the simulator.
      capacity: memory of a device; None if unknown.
      model_flops: model FLOPs of a step over all devices.
      needed: bytes that a device needs.
      predicted: the step by the compiler's own estimates; None for devices other than TPUs.
      knobs: ways to save memory, if it does not fit.
    """

    device_kind: str
    num_devices: int
    num_slices: int
    mesh: Mapping[str, int]
    engine: str
    schedule: str
    bubble: float
    capacity: float | None
    model_flops: float
    needed: float = 0.0
    predicted: Prediction | None = None
    knobs: Sequence[Knob] = ()

    @classmethod
    def of(cls, config: Config, mesh: Mesh, **more: Any) -> Self:
        """Return what is known of a resolved configuration before it is compiled, and `more`."""
        devices = mesh.devices.reshape(-1).tolist()
        is_pipelined = ENGINES[config.pipeline.engine].has_stages
        tokens = config.data.global_batch_size * config.data.sequence_length
        of_token = model_flops_per_token(config.model, config.data.sequence_length)
        return cls(
            device_kind=devices[0].device_kind,
            num_devices=mesh.size,
            num_slices=config.compile.num_slices,
            mesh=mesh.shape,
            engine=config.pipeline.engine,
            schedule=config.pipeline.schedule,
            bubble=bubble_fraction(config) if is_pipelined else 0.0,
            capacity=device_memory(devices),
            model_flops=tokens * of_token,
            **more,
        )

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.needed <= self.capacity

    def as_json(self) -> dict[str, object]:
        """Return plain data: sizes in bytes, times in seconds, null for what is unknown.

        What only one kind of report knows is null here.
        """
        names = ("device_kind", "num_devices", "num_slices", "engine", "schedule", "bubble")
        return {name: getattr(self, name) for name in names} | {
            "mesh": dict(self.mesh),
            "fits": None if self.capacity is None else self.fits,
            "memory": {"needed_bytes": self.needed, "capacity_bytes": self.capacity},
            "flops": None,
            "model_flops": self.model_flops,
            "collectives": None,
            "links": None,
            "bounds": None,
            "predicted_step_seconds": self.predicted and self.predicted.seconds,
            "predicted": self.predicted and self.predicted.as_json(),
            "compile_times": None,
            "knobs": plain(self.knobs),
            "gains": None,
        }

    def first_lines(self) -> list[str]:
        axes = " x ".join(f"{axis}={n}" for axis, n in self.mesh.items() if n > 1) or "one device"
        slices = f" in {self.num_slices} slices" if self.num_slices > 1 else ""
        pipeline = self.engine
        if ENGINES[self.engine].has_stages:
            bubble = f"bubble {100 * self.bubble:.1f} %"
            pipeline = f"{self.schedule} on the {self.engine} engine, {bubble}"
        kind = short_name(self.device_kind)
        return [
            f"devices     {self.num_devices} x {kind}{slices}: {axes}",
            f"pipeline    {pipeline}",
        ]

    def knob_lines(self) -> list[str]:
        if self.capacity is None or self.fits:
            return []
        if not self.knobs:
            return [f"            {NO_KNOB}"]
        lines = ["            what would help, by estimate:"]
        for knob in self.knobs:
            enough = "  enough" if knob.saves >= self.needed - self.capacity else ""
            lines.append(f"  {knob.words:<60} saves {size(knob.saves)}{enough}")
        return lines


@dataclass(frozen=True, kw_only=True)
class Report(StepReport):
    """A step in one program; what only the compiler knows is None if it gave up.

    Attributes:
      shapes: memory estimated from shapes.
      flops: FLOPs of a step over all devices.
      collectives, links: the collectives of one device in a step, and its traffic by mesh axes.
      bounds: bounds of the step; None if the device's figures are unknown.
      timeline: the timeline that `predicted` sums up.
      gains: ways to use the memory that is left, if it fits.
      hlo: text of the optimized program.
    """

    shapes: Memory[float]
    compiler: CompilerMemory | None = None
    flops: float | None = None
    collectives: Sequence[Collective] = ()
    links: Sequence[LinkUse] = ()
    bounds: Bounds | None = None
    timeline: Timeline | None = None
    compile_times: CompileTimes | None = None
    gains: Sequence[Gain] = ()
    hlo: str = ""

    def as_json(self) -> dict[str, object]:
        """Return plain data, see `StepReport.as_json`."""
        shared, times = super().as_json(), self.compile_times
        parts: dict[str, object] = dict.fromkeys(COMPILER_PARTS)
        if self.compiler:
            parts = {name: getattr(self.compiler, name) for name in COMPILER_PARTS}
        memory = in_bytes(asdict(self.shapes) | parts)
        bounds = self.bounds and {
            f"{name}_seconds": getattr(self.bounds, name)
            for name in ("compute", "hbm", "network", "step")
        } | {"mfu": self.bounds.mfu}
        units = self.predicted and self.predicted.units
        return shared | {
            "memory": memory | cast(dict[str, object], shared["memory"]),
            "flops": self.flops,
            "collectives": plain(self.collectives),
            "links": plain(self.links),
            "bounds": bounds,
            "schedule_words": units and units.words(),
            "compile_seconds": times and times.total,
            "compile_times": times and times._asdict(),
            "gains": plain(self.gains),
        }

    def lines(self) -> list[str]:
        return [
            *self.first_lines(),
            *([self.compile_times.line()] if self.compile_times else []),
            *self._memory_lines(),
            *self._flop_lines(),
            *self._network_lines(),
            *self._bound_lines(),
            *(self.predicted.lines() if self.predicted else []),
            self._verdict(),
            *self.knob_lines(),
            *self._gain_lines(),
        ]

    def _memory_lines(self) -> list[str]:
        words = {"in_use": "copies of weights in use and their gradients"}
        sizes = asdict(self.shapes).items()
        shapes = ", ".join(f"{words.get(name, name)} {size(value)}" for name, value in sizes)
        lines = [f"memory      of one device, from shapes: {shapes}"]
        if self.compiler:
            parts = (f"{name} {size(getattr(self.compiler, name))}" for name in COMPILER_PARTS)
            lines.append(f"            from the compiler: {', '.join(parts)}")
        return lines

    def _flop_lines(self) -> list[str]:
        if self.flops is None:
            return []
        share = 100 * self.model_flops / self.flops
        return [
            f"FLOPs       {self.flops:.3g} a step, model FLOPs {self.model_flops:.3g}: "
            f"{share:.0f} %; the rest is recomputation, idle slots and masked attention"
        ]

    def _network_lines(self) -> list[str]:
        if not self.collectives:
            return ["collectives none"] if self.compiler else []
        lines = ["collectives of one device in a step:", *map(collective_line, self.collectives)]
        if self.links:
            lines.append("links that these can use, and the least time that they need there:")
        for use in self.links:
            where = "network card (DCN)" if use.links is None else f"{use.links} of {use.of} links"
            time = "unknown" if use.seconds is None else f"{use.seconds:.3g} s"
            lines.append(f"  {use.kind:<19} {use.axes or 'unknown axes':<14} {where}, {time}")
        return lines

    def _bound_lines(self) -> list[str]:
        bounds = self.bounds
        if bounds is None:
            unknown = "unknown: this device's peak figures are not in the table of chips"
            return [
                f"bounds      {unknown if self.compiler else 'none, since the compiler gave up'}"
            ]
        network = "unknown" if bounds.network is None else f"{bounds.network:.3g} s"
        return [
            f"bounds      compute {bounds.compute:.3g} s (bubble included), "
            f"HBM {bounds.hbm:.3g} s, network {network}: at least {bounds.step:.3g} s a step",
            f"MFU         at most {100 * bounds.mfu:.1f} %",
        ]

    def _verdict(self) -> str:
        if self.capacity is None:
            return (
                f"verdict     needs {size(self.needed)} on each device; their memory is not known"
            )
        of = f"{size(self.needed)} of {size(self.capacity)}"
        if self.fits:
            return f"verdict     fits: {of} on each device"
        if self.compiler is None:  # all that it says when it gives up, apart from shapes
            of += " by the compiler's own count"
        excess = size(self.needed - self.capacity)
        return f"verdict     does NOT fit: {of}, {excess} too much on each device"

    def _gain_lines(self) -> list[str]:
        if not self.gains or not self.bounds or not self.capacity:
            return []
        lines = ["            what the idle memory would buy, by estimate:"]
        for gain in self.gains:
            memory = f"{size(gain.needed)} of {size(self.capacity)}"
            mfu = f"{100 * self.bounds.mfu:.1f} -> {100 * gain.mfu:.1f} %"
            line = f"  {gain.words:<32} would fit: {memory}, MFU at most {mfu}"
            lines.append(line + (gain.compiles and f"; {gain.compiles}"))
        return lines


def plain(values: Sequence[Collective | Gain | Knob | LinkUse]) -> list[dict[str, object]]:
    return [asdict(value) for value in values]


def in_bytes(sizes: Mapping[str, object]) -> dict[str, object]:
    return {f"{name}_bytes": value for name, value in sizes.items()}


def collective_line(c: Collective) -> str:
    where = f"{c.axes or 'none'}{' (DCN)' if c.network == 'dcn' else ''}"
    volume = f"operands {size(c.bytes)}, sends {size(c.sent_bytes)}"
    return f"  {c.kind:<19} {where:<14} {c.count:>8.0f} x  {volume}"


def size(count: float) -> str:
    """Return bytes with three digits in KiB, MiB, GiB or TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
