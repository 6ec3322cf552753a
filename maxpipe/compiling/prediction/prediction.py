"""Hold a predicted step: its seconds, their parts, phases and units, as data, JSON and lines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from maxpipe.compiling.prediction.constants import Constants
from maxpipe.compiling.prediction.operations import Part
from maxpipe.compiling.prediction.timeline import Conditional
from maxpipe.compiling.prediction.units import UnitSeconds


class CollectiveTime(NamedTuple):
    """Seconds of a step in which computation waits for collectives of one kind and axis."""

    kind: str
    axes: str
    seconds: float


class PhaseTime(NamedTuple):
    """What a phase of a step takes.

    Attributes:
      name: "phase_1", "forward loop" or "outside the loops".
      slots: kinds of units that each tick computes, such as "FB"; "" on other engines.
      iterations: ticks, or iterations of the loop; 0 outside of loops.
      seconds: of all iterations.
    """

    name: str
    slots: str
    iterations: float
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a compiled program.

    Attributes:
      seconds: of a step; None if something that matters cannot be priced.
      libtpu: version of the compiler whose estimates these are.
      constants: what the prediction assumes; None if the chip's are unknown.
      parts: seconds by part; they add up to what could be priced.
      collectives: exposed seconds, the slowest first; their sum is a part.
      bubble: seconds of idle slots, which are computed masked: within the parts, not besides them.
      conditionals: how often they are taken.
      phases: in order.
      units: None where there are no units, or where they cannot be told apart.
      tokens_per_second: of a chip.
      mfu: model FLOPs utilisation.
      unknown: what cannot be priced, in words.
    """

    seconds: float | None
    libtpu: str
    constants: Constants | None
    parts: dict[Part, float]
    collectives: Sequence[CollectiveTime] = ()
    bubble: float | None = None
    conditionals: Sequence[Conditional] = ()
    phases: Sequence[PhaseTime] = ()
    units: UnitSeconds | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    unknown: Sequence[str] = ()

    def as_json(self) -> dict[str, object]:
        """Return plain data; times in seconds, null for what is unknown."""
        return {
            "seconds": self.seconds,
            "libtpu": self.libtpu,
            "constants": asdict(self.constants) if self.constants else None,
            "parts": {part.value: seconds for part, seconds in self.parts.items()},
            "collectives": [c._asdict() for c in self.collectives],
            "bubble": self.bubble,
            "conditionals": [c._asdict() for c in self.conditionals],
            "phases": [phase._asdict() for phase in self.phases],
            "units": asdict(self.units) if self.units else None,
            "tokens_per_second_per_chip": self.tokens_per_second,
            "mfu": self.mfu,
            "unknown": list(self.unknown),
        }

    def lines(self) -> list[str]:
        """Return the prediction for people."""
        basis = f"libtpu {self.libtpu}'s cycle estimates"
        if self.constants:
            basis += f"; {self.constants.text()}"
        if self.seconds is None:
            lines = [f"predicted   no step time: {'; '.join(self.unknown)}"]
        else:
            lines = [f"predicted   {self.seconds:.4g} s a step, from {basis}"]
            if self.tokens_per_second is not None and self.mfu is not None:
                rate = f"{self.tokens_per_second:.4g} tokens/s/chip"
                lines.append(
                    f"            {rate}, MFU {100 * self.mfu:.1f} %: predicted, not measured"
                )
        total = sum(self.parts.values())
        for part, seconds in sorted(self.parts.items(), key=lambda item: -item[1]):
            name = f"{part}, exposed" if part in (Part.COPIES, Part.COLLECTIVES) else part
            lines.append(f"  {name:<28} {seconds:>9.3g} s  {100 * seconds / total:>4.0f} %")
        lines += [
            f"    {c.kind:<19} {c.axes or 'none':<14} {c.seconds:>9.3g} s" for c in self.collectives
        ]
        if self.bubble:
            lines.append(f"  {'bubble, within the above':<28} {self.bubble:>9.3g} s")
        for phase in self.phases:
            each = (
                f"{phase.iterations:.0f} x {phase.seconds / phase.iterations:.3g} s"
                if phase.iterations
                else ""
            )
            name = f"{phase.name} {phase.slots}".strip()
            lines.append(f"  {name:<28} {phase.seconds:>9.3g} s  {each}".rstrip())
        lines += [
            f"  {c.scope} in {c.phase}: taken {c.taken:.0f} of {c.reached:.0f} times, "
            f"{c.seconds:.3g} s each"
            for c in self.conditionals
            if c.taken < c.reached
        ]
        if self.units:
            lines.append(f"  units, for maxpipe.schedule: {self.units.words()}")
        return lines
