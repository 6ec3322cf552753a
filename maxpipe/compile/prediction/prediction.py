"""Hold a predicted step: its seconds, their parts, phases and units, as data, JSON and lines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from maxpipe.compile.prediction.constants import Constants
from maxpipe.compile.prediction.operations import Part
from maxpipe.compile.prediction.unit_times import UnitSeconds
from maxpipe.compile.prediction.walk import Conditional


class CollectiveTime(NamedTuple):
    kind: str
    axes: str
    seconds: float


class PhaseTime(NamedTuple):
    """Times of a phase of a step.

    Attributes:
      name: "phase_1", "forward loop 1" or "outside the loops".
      slots: kinds of units that each tick computes, such as "FB"; "" on other engines.
      iterations: ticks, or iterations of the loop; 0 outside of loops.
      seconds: time of all iterations, and of what the phase computes before and after them.
      each: seconds of one iteration; 0 outside of loops.
    """

    name: str
    slots: str
    iterations: float
    seconds: float
    each: float


class Basis(NamedTuple):
    """What a prediction rests on; without constants, the clock of the chip is unknown."""

    libtpu: str
    constants: Constants | None
    crosses_slices: bool = False

    def text(self) -> str:
        constants = f"; {self.constants.text(self.crosses_slices)}" if self.constants else ""
        return f"libtpu {self.libtpu}'s cycle estimates{constants}"


class Speed(NamedTuple):
    tokens_per_second: float
    mfu: float


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a compiled program.

    Attributes:
      seconds: time of a step; None if something that matters cannot be priced.
      parts: seconds by part; they add up to what could be priced.
      collectives: exposed seconds, the slowest first; they add up to one of the parts.
      bubble: seconds of idle slots.
      has_bubble_in_parts: whether idle slots are computed masked, so that they are in the parts.
      leaves_out: what a step also runs but neither seconds nor parts include, in words.
      units: times of a chunk's units; None if there are none, or they cannot be told apart.
      unknown: what cannot be priced, in words.
      guessed: seconds in the parts that are priced by bytes, for lack of a compiler's estimate.
    """

    seconds: float | None
    basis: Basis
    parts: dict[Part, float]
    collectives: Sequence[CollectiveTime] = ()
    bubble: float | None = None
    has_bubble_in_parts: bool = True
    leaves_out: Sequence[str] = ()
    conditionals: Sequence[Conditional] = ()
    phases: Sequence[PhaseTime] = ()
    units: UnitSeconds | None = None
    speed: Speed | None = None
    unknown: Sequence[str] = ()
    guessed: float = 0.0

    def as_json(self) -> dict[str, object]:
        """Return plain data; times in seconds, null for what is unknown."""
        return {
            "seconds": self.seconds,
            "libtpu": self.basis.libtpu,
            "constants": asdict(self.basis.constants) if self.basis.constants else None,
            "guessed_seconds": self.guessed,
            "parts": {part.value: seconds for part, seconds in self.parts.items()},
            "collectives": [c._asdict() for c in self.collectives],
            "bubble": self.bubble,
            "bubble_in_parts": self.has_bubble_in_parts,
            "leaves_out": list(self.leaves_out),
            "conditionals": [c._asdict() for c in self.conditionals],
            "phases": [phase._asdict() for phase in self.phases],
            "units": asdict(self.units) if self.units else None,
            "tokens_per_second_per_chip": self.speed and self.speed.tokens_per_second,
            "mfu": self.speed and self.speed.mfu,
            "unknown": list(self.unknown),
        }

    def lines(self) -> list[str]:
        """Return the prediction for people."""
        if self.seconds is None:
            lines = [f"predicted   no step time: {'; '.join(self.unknown)}"]
        else:
            lines = [f"predicted   {self.seconds:.4g} s a step, from {self.basis.text()}"]
        if self.speed:
            rate = f"{self.speed.tokens_per_second:.4g} tokens/s/chip"
            mfu = f"MFU {100 * self.speed.mfu:.1f} %"
            lines.append(f"            {rate}, {mfu}: predicted, not measured")
        total = sum(self.parts.values()) or 1.0
        for part, seconds in sorted(self.parts.items(), key=lambda item: -item[1]):
            name = f"{part}, exposed" if part in (Part.COPIES, Part.COLLECTIVES) else part
            lines.append(f"  {name:<28} {seconds:>9.3g} s  {100 * seconds / total:>4.0f} %")
            if part is Part.COLLECTIVES:
                lines += [
                    f"    {f'{time.kind} {time.axes}'.strip():<26} {time.seconds:>9.3g} s"
                    for time in self.collectives
                ]
        if share := round(100 * self.guessed / total):
            because = "has no estimate of the compiler's and is priced by its bytes"
            lines.append(f"  {share} % of the step {because}")
        if self.bubble:
            name = f"bubble, {'within' if self.has_bubble_in_parts else 'besides'} the above"
            lines.append(f"  {name:<28} {self.bubble:>9.3g} s")
        for phase in self.phases:
            each = f"{phase.iterations:.0f} x {phase.each:.3g} s" if phase.iterations else ""
            name = f"{phase.name} {phase.slots}".strip()
            lines.append(f"  {name:<28} {phase.seconds:>9.3g} s  {each}".rstrip())
        lines += self._conditional_lines()
        if self.units:
            chunks = f" with its {self.units.repeats} chunks" if self.units.repeats > 1 else ""
            lines.append(f"  units of a stage{chunks}, for maxpipe.schedule: {self.units.words()}")
        return lines

    def _conditional_lines(self) -> list[str]:
        """Return how often conditionals do their work, with one line for all that are alike."""
        counts: dict[tuple[str, str, str], list[float]] = {}
        for c in self.conditionals:
            count = counts.setdefault((c.scope, c.phase, f"{c.seconds:.3g}"), [0.0, 0.0])
            count[:] = count[0] + c.taken, count[1] + c.reached
        return [
            f"  {scope} in {phase}: taken {taken:.4g} of {reached:.4g} times, {seconds} s each"
            for (scope, phase, seconds), (taken, reached) in counts.items()
            if taken < reached
        ]
