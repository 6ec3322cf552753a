"""Hold what is known about a compiled step, as data, as JSON and as lines for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from maxpipe.compile.collectives import Collective
from maxpipe.compile.knobs import Gain, Knob
from maxpipe.compile.links import LinkUse
from maxpipe.compile.prediction.prediction import Prediction
from maxpipe.compile.prediction.timeline import Timeline
from maxpipe.config.catalog import ENGINES
from maxpipe.devices.chips import short_name
from maxpipe.plan.estimate import Bounds, Memory

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
        """Return the bytes of all parts."""
        return self.arguments + self.temp + self.program + self.results


class CompileTimes(NamedTuple):
    """Seconds that it took to make a program.

    Attributes:
      tracing: from Python code to a jaxpr.
      lowering: from the jaxpr to StableHLO.
      compiling: from StableHLO to a program, by XLA.
    """

    tracing: float
    lowering: float
    compiling: float

    @property
    def total(self) -> float:
        """Return the seconds of all parts."""
        return sum(self)

    def line(self) -> str:
        """Return the times as a line of a report."""
        parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self._asdict().items())
        return f"compiled    in {self.total:.0f} s: {parts}"


@dataclass(frozen=True)
class Report:
    """Everything that `maxpipe.compile` prints.

    Attributes:
      device_kind, num_devices, num_slices: what was compiled for.
      mesh: axis sizes.
      engine, schedule: names of the engine and its schedule.
      bubble: idle fraction of the schedule, from the simulator.
      shapes: memory estimated from shapes.
      capacity: memory of a device; None if unknown.
      model_flops: model FLOPs of a step over all devices.
      needed: bytes that the program needs on a device.
      compiler: memory from the compiler; None, like the fields that follow, if it gave up.
      flops: FLOPs of a step over all devices.
      collectives: the collectives of one device in a step.
      links: the traffic of one device by mesh axes, the slowest first; empty if the device's
        figures are unknown.
      bounds: bounds of the step; None if the device's figures are unknown.
      predicted: the step by the compiler's own estimates; None for devices other than TPUs.
      timeline: the timeline that `predicted` sums up; None without a prediction.
      compile_times: seconds of each phase; None if the compiler gave up.
      knobs: ways to save memory, if it does not fit.
      gains: ways to use the memory that is left, if it fits.
      hlo: text of the optimized program.
    """

    device_kind: str
    num_devices: int
    num_slices: int
    mesh: dict[str, int]
    engine: str
    schedule: str
    bubble: float
    shapes: Memory
    capacity: float | None
    model_flops: float
    needed: float = 0.0
    compiler: CompilerMemory | None = None
    flops: float | None = None
    collectives: Sequence[Collective] = ()
    links: Sequence[LinkUse] = ()
    bounds: Bounds | None = None
    predicted: Prediction | None = None
    timeline: Timeline | None = None
    compile_times: CompileTimes | None = None
    knobs: Sequence[Knob] = ()
    gains: Sequence[Gain] = ()
    hlo: str = ""

    @property
    def fits(self) -> bool:
        """Return whether the step fits; True if the memory is not known."""
        return self.capacity is None or self.needed <= self.capacity

    def as_json(self) -> dict[str, object]:
        """Return plain data: sizes in bytes, times in seconds, null for what is unknown."""
        memory: dict[str, float | None] = {
            f"{name}_bytes": value for name, value in asdict(self.shapes).items()
        }
        for name in ("arguments", "temp", "program"):
            memory[f"{name}_bytes"] = getattr(self.compiler, name) if self.compiler else None
        memory |= {"needed_bytes": self.needed, "capacity_bytes": self.capacity}
        units, times = self.predicted.units if self.predicted else None, self.compile_times
        bounds = None
        if self.bounds:
            bounds = {
                f"{name}_seconds": getattr(self.bounds, name)
                for name in ("compute", "hbm", "network", "step")
            }
            bounds |= {"mfu": self.bounds.mfu}
        return {
            "device_kind": self.device_kind,
            "num_devices": self.num_devices,
            "num_slices": self.num_slices,
            "mesh": self.mesh,
            "engine": self.engine,
            "schedule": self.schedule,
            "bubble": self.bubble,
            "fits": None if self.capacity is None else self.fits,
            "memory": memory,
            "flops": self.flops,
            "model_flops": self.model_flops,
            "collectives": [asdict(c) for c in self.collectives],
            "links": [asdict(use) for use in self.links],
            "bounds": bounds,
            "predicted_step_seconds": self.predicted.seconds if self.predicted else None,
            "predicted": self.predicted.as_json() if self.predicted else None,
            "schedule_words": units.words() if units else None,
            "compile_seconds": times.total if times else None,
            "compile_times": times._asdict() if times else None,
            "knobs": [asdict(k) for k in self.knobs],
            "gains": [asdict(gain) for gain in self.gains],
        }

    def lines(self) -> list[str]:
        """Return the report for people."""
        pipeline = self.engine
        if ENGINES[self.engine].has_stages:
            pipeline = (
                f"{self.schedule} on the {self.engine} engine, bubble {100 * self.bubble:.1f} %"
            )
        return [
            device_line(self.num_devices, self.device_kind, self.num_slices, self.mesh),
            f"pipeline    {pipeline}",
            *([self.compile_times.line()] if self.compile_times else []),
            *self._memory_lines(),
            *self._flop_lines(),
            *self._collective_lines(),
            *self._link_lines(),
            *self._bound_lines(),
            *(self.predicted.lines() if self.predicted else []),
            self._verdict(),
            *self._knob_lines(),
            *self._gain_lines(),
        ]

    def _memory_lines(self) -> list[str]:
        words = {"in_use": "copies of weights in use and their gradients"}
        sizes = asdict(self.shapes).items()
        shapes = ", ".join(f"{words.get(name, name)} {size(value)}" for name, value in sizes)
        lines = [f"memory      of one device, from shapes: {shapes}"]
        if self.compiler:
            names = ("arguments", "temp", "program")
            parts = ", ".join(f"{name} {size(getattr(self.compiler, name))}" for name in names)
            lines.append(f"            from the compiler: {parts}")
        return lines

    def _flop_lines(self) -> list[str]:
        if self.flops is None:
            return []
        share = 100 * self.model_flops / self.flops
        return [
            f"FLOPs       {self.flops:.3g} a step, model FLOPs {self.model_flops:.3g}: "
            f"{share:.0f} %; the rest is recomputation, idle slots and masked attention"
        ]

    def _collective_lines(self) -> list[str]:
        if not self.collectives:
            return ["collectives none"] if self.compiler else []
        lines = ["collectives of one device in a step:"]
        return [*lines, *map(collective_line, self.collectives)]

    def _link_lines(self) -> list[str]:
        if not self.links:
            return []
        lines = ["links that these can use, and the least time that they need there:"]
        for use in self.links:
            where = "network card (DCN)" if use.links is None else f"{use.links} of {use.of} links"
            time = "unknown" if use.seconds is None else f"{use.seconds:.3g} s"
            lines.append(f"  {use.kind:<19} {use.axes or 'unknown axes':<14} {where}, {time}")
        return lines

    def _bound_lines(self) -> list[str]:
        bounds = self.bounds
        if bounds is None and self.compiler is None:
            return ["bounds      none, since the compiler gave up"]
        if bounds is None:
            return ["bounds      unknown: this device's peak figures are not in the table of chips"]
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

    def _knob_lines(self) -> list[str]:
        return [] if self.fits else knob_lines(self.knobs, self.needed - (self.capacity or 0.0))

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


def device_line(count: int, kind: str, slices: int, mesh: Mapping[str, int]) -> str:
    """Return a line about the devices and their mesh, for people."""
    axes = " x ".join(f"{axis}={n}" for axis, n in mesh.items() if n > 1) or "one device"
    in_slices = f" in {slices} slices" if slices > 1 else ""
    return f"devices     {count} x {short_name(kind)}{in_slices}: {axes}"


def knob_lines(knobs: Sequence[Knob], missing: float) -> list[str]:
    """Return lines about ways to save the missing bytes, for people."""
    if not knobs:
        return [f"            {NO_KNOB}"]
    lines = ["            what would help, by estimate:"]
    for knob in knobs:
        enough = "  enough" if knob.saves >= missing else ""
        lines.append(f"  {knob.words:<60} saves {size(knob.saves)}{enough}")
    return lines


def collective_line(c: Collective) -> str:
    """Return a line about the collectives of one kind, for people."""
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
