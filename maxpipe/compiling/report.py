"""What is known of a compiled step, as data, as JSON and as lines for people."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from maxpipe.compiling.collectives import Collective
from maxpipe.compiling.knobs import Knob
from maxpipe.planning.bounds import Bounds
from maxpipe.planning.estimate import Memory

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class CompilerMemory:
    """Bytes on one device, as the compiler counts them; results reuse the arguments' memory."""

    arguments: int
    temp: int
    program: int
    results: int

    @property
    def total(self) -> int:
        return self.arguments + self.temp + self.program + self.results


@dataclass(frozen=True)
class Report:
    """Everything `maxpipe.compile` says.

    Attributes:
      device_kind, num_devices, num_slices: what was compiled for.
      mesh: axis sizes.
      engine, schedule: what runs.
      bubble: idle fraction of the schedule, from the simulator.
      shapes: memory from shapes.
      compiler: memory from the compiler; None if it gave up.
      needed: bytes that the program needs on a device.
      capacity: memory of a device; None if unknown.
      flops, model_flops: of a step over all devices.
      collectives: of one device.
      bounds: None if the device's figures are unknown.
      compile_seconds: tracing and compilation.
      knobs: ways to save memory, if it does not fit.
      hlo: text of the optimized program; empty if the compiler gave up.
    """

    device_kind: str
    num_devices: int
    num_slices: int
    mesh: dict[str, int]
    engine: str
    schedule: str
    bubble: float
    shapes: Memory
    compiler: CompilerMemory | None
    needed: float
    capacity: float | None
    flops: float | None
    model_flops: float
    collectives: Sequence[Collective]
    bounds: Bounds | None
    compile_seconds: float
    knobs: Sequence[Knob] = ()
    hlo: str = ""

    @property
    def fits(self) -> bool:
        """False if the step is known not to fit."""
        return self.capacity is None or self.needed <= self.capacity

    def as_json(self) -> dict[str, Any]:
        """The report as plain data; sizes in bytes, times in seconds, null for what is unknown."""
        memory: dict[str, Any] = {
            f"{name}_bytes": value for name, value in asdict(self.shapes).items()
        }
        for name in ("arguments", "temp", "program"):
            memory[f"{name}_bytes"] = getattr(self.compiler, name) if self.compiler else None
        memory |= {"needed_bytes": self.needed, "capacity_bytes": self.capacity}
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
            "bounds": bounds,
            "compile_seconds": self.compile_seconds,
            "knobs": [asdict(k) for k in self.knobs],
        }

    def lines(self) -> list[str]:
        """The report for people."""
        axes = (
            " x ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1)
            or "one device"
        )
        slices = f" in {self.num_slices} slices" if self.num_slices > 1 else ""
        pipeline = self.engine
        if self.engine != "sequential":
            pipeline = (
                f"{self.schedule} on the {self.engine} engine, bubble {100 * self.bubble:.1f} %"
            )
        return [
            f"devices     {self.num_devices} x {self.device_kind}{slices}: {axes}",
            f"pipeline    {pipeline}",
            f"compiled    in {self.compile_seconds:.0f} s",
            *self._memory_lines(),
            *self._flop_lines(),
            *self._collective_lines(),
            *self._bound_lines(),
            self._verdict(),
            *self._knob_lines(),
        ]

    def _memory_lines(self) -> list[str]:
        shapes = ", ".join(f"{name} {size(value)}" for name, value in asdict(self.shapes).items())
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
            f"FLOPs       {self.flops:.3g} a step, model FLOPs {self.model_flops:.3g}: {share:.0f} %; "
            "the rest is recomputation and idle slots"
        ]

    def _collective_lines(self) -> list[str]:
        if not self.collectives:
            return ["collectives none"] if self.compiler else []
        lines = ["collectives of one device in a step:"]
        for c in self.collectives:
            where = f"{c.axes or 'none'}{' (DCN)' if c.network == 'dcn' else ''}"
            volume = f"operands {size(c.bytes)}, sends {size(c.sent_bytes)}"
            lines.append(f"  {c.kind:<19} {where:<14} {c.count:>8.0f} x  {volume}")
        return lines

    def _bound_lines(self) -> list[str]:
        b = self.bounds
        if b is None:
            return ["bounds      unknown: this device's peak figures are not in the table of chips"]
        network = "unknown" if b.network is None else f"{b.network:.3g} s"
        return [
            f"bounds      compute {b.compute:.3g} s (bubble included), HBM {b.hbm:.3g} s, network {network}: "
            f"at least {b.step:.3g} s a step",
            f"MFU         at most {100 * b.mfu:.1f} %",
        ]

    def _verdict(self) -> str:
        if self.capacity is None:
            return (
                f"verdict     needs {size(self.needed)} on each device; their memory is not known"
            )
        of = f"{size(self.needed)} of {size(self.capacity)}"
        if self.fits:
            return f"verdict     fits: {of} on each device"
        return f"verdict     does NOT fit: {of}, {size(self.needed - self.capacity)} too much on each device"

    def _knob_lines(self) -> list[str]:
        if self.fits:
            return []
        if not self.knobs:
            return [
                "            no single change of batch, schedule or mesh helps on these devices; take more of them"
            ]
        missing = self.needed - (self.capacity or 0.0)
        lines = ["            what would help, by estimate:"]
        for knob in self.knobs:
            enough = "  enough" if knob.saves >= missing else ""
            lines.append(f"  {knob.words:<60} saves {size(knob.saves)}{enough}")
        return lines


def size(count: float) -> str:
    """Bytes with three digits in KiB, MiB, GiB or TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
