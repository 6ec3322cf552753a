"""Walk through a scheduled program with a clock.

Computation advances the clock. A start notes when its transfer will have ended; its done waits for
that moment, and only the wait counts as exposed. Transfers over the same links follow each other,
as there is one bandwidth for all of them, and so do copies within the chip. The body of a loop is
timed once and multiplied by its trip count. A conditional counts in proportion to how often its
work is done.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from maxpipe.compile.hlo import Computation, Instruction, Module, trip_count
from maxpipe.compile.prediction.operations import Part, Price, Prices
from maxpipe.compile.prediction.origins import Origin, Origins

OUTSIDE = "outside the loops"


class Place(NamedTuple):
    """Where the walk is.

    Attributes:
      phase: label of the outermost loop, or of the scheduled engine's phase.
      conditional: scope of the outermost enclosing conditional; "" outside.
      runs: how often a step gets here.
      loops: number of enclosing loops.
    """

    phase: str
    conditional: str
    runs: float
    loops: int = 0


class Spent(NamedTuple):
    """What an operation adds to a step; of a transfer, its start has the facts.

    `seconds` are those of each run: of a whole computation, or of the wait for a transfer.
    """

    name: str
    price: Price
    origin: Origin
    place: Place
    seconds: float

    @property
    def total(self) -> float:
        return self.place.runs * self.seconds


class Event(NamedTuple):
    """What runs from `start` to `end`, in seconds after a computation has begun.

    Attributes:
      price: None for a loop or a conditional.
      inside: name of the computation that a loop or a conditional runs.
      times: how often it runs in succession; less than 1 for a conditional that is not always
        taken.
      is_wait: whether this is the time in which computation stands still for a transfer, which has
        an event of its own.
    """

    name: str
    start: float
    end: float
    price: Price | None
    origin: Origin
    inside: str = ""
    times: float = 1
    is_wait: bool = False


class Loop(NamedTuple):
    """A loop that no other loop contains, and the seconds of one iteration."""

    phase: str
    body: str
    iterations: float
    seconds: float


class Conditional(NamedTuple):
    """A conditional, how often a step reaches it and does its work, and the time of that branch."""

    scope: str
    phase: str
    reached: float
    taken: float
    seconds: float


@dataclass
class Timeline:
    """A program that has been walked through.

    Attributes:
      seconds: time of the entry computation.
      events: events of each computation that was walked, by its name.
      unknown_loops: names of loops whose trip count is unknown, counted once.
      unpriced: why nothing could be priced, and the rest is empty; "" otherwise.
    """

    entry: str = ""
    seconds: float = 0.0
    spent: list[Spent] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    conditionals: list[Conditional] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)
    unknown_loops: list[str] = field(default_factory=list)
    unpriced: str = ""


# Price of the end of a transfer whose start is not in the same computation.
UNMATCHED = Price(Part.COPIES, None)

# (origin of a conditional, how often a step reaches it) -> how often it does its work.
TimesTaken = Callable[[Origin, float], float]


def every_time(origin: Origin, reached: float) -> float:
    return reached


def walk(
    module: Module, prices: Prices, origins: Origins, times_taken: TimesTaken = every_time
) -> Timeline:
    walker = _Walker(module, prices, origins, times_taken)
    entry = module.computations[module.entry]
    walker.timeline.entry = module.entry
    walker.timeline.seconds = walker.run(entry, Place(OUTSIDE, "", 1.0))
    return walker.timeline


class _Transfer(NamedTuple):
    end: float
    name: str
    price: Price
    origin: Origin


def _is_start(instruction: Instruction) -> bool:
    """Return whether an instruction only starts a transfer.

    Some starts on TPUs are fusions, recognized by their names.
    """
    return (
        instruction.opcode.endswith("-start")
        or instruction.opcode == "send"
        or instruction.name.startswith("async-collective-start")
    )


def _is_done(instruction: Instruction) -> bool:
    return instruction.opcode.endswith("-done") or instruction.name.startswith(
        "async-collective-done"
    )


class _Walker:
    def __init__(
        self, module: Module, prices: Prices, origins: Origins, times_taken: TimesTaken
    ) -> None:
        self._module = module
        self._prices = prices
        self._origins = origins
        self._times_taken = times_taken
        self.timeline = Timeline()

    def run(self, computation: Computation, place: Place) -> float:
        """Walk through one computation and return its seconds."""
        clock = 0.0
        under_way: dict[str, _Transfer] = {}
        free_from: dict[str, float] = {}  # by links
        events: list[Event] = []
        for instruction in computation.instructions.values():
            name, opcode = instruction.name, instruction.opcode
            origin = self._origins.of(instruction)
            phase_place = place
            # Phases that compute the same share computations, named after one of them.
            if origin.phase is not None and not place.phase.startswith("phase_"):
                phase_place = place._replace(phase=f"phase_{origin.phase}")
            if _is_start(instruction):
                moved = self._prices.transfer(computation, instruction)
                begin = max(clock, free_from.get(moved.links, 0.0))
                transfer = _Transfer(begin + (moved.seconds or 0.0), name, moved, origin)
                if moved.links:
                    free_from[moved.links] = transfer.end
                under_way |= dict.fromkeys(self._keys(instruction), transfer)
                events.append(Event(name, begin, transfer.end, moved, origin))
                if moved.seconds is None:
                    self._spend(name, moved, origin, phase_place, 0.0)
            elif opcode.endswith("-update"):
                for transfer in (under_way[n] for n in instruction.operands if n in under_way):
                    under_way[name] = transfer
            elif _is_done(instruction):
                awaited = self._awaited(computation, instruction, under_way)
                if not awaited:
                    self._spend(name, UNMATCHED, origin, phase_place, 0.0)
                for transfer in awaited:
                    end = max(clock, transfer.end)
                    began = transfer.name, transfer.price, transfer.origin
                    self._spend(*began, phase_place, end - clock)
                    if end > clock:
                        name, moved, source = began
                        events.append(Event(name, clock, end, moved, source, is_wait=True))
                    clock = end
            elif event := self._control(computation, instruction, origin, phase_place, clock):
                events.append(event)
                clock = event.end
            elif price := self._prices.of(computation, instruction):
                seconds = price.seconds or 0.0
                self._spend(name, price, origin, phase_place, seconds)
                events.append(Event(name, clock, clock + seconds, price, origin))
                if price.collective:
                    # Nothing else runs meanwhile.
                    events.append(events[-1]._replace(is_wait=True))
                clock += seconds
        self.timeline.events[computation.name] = events
        return clock

    def _keys(self, start: Instruction) -> list[str]:
        channel = self._prices.channel(start)
        return [start.name, f"channel {channel}"] if channel else [start.name]

    def _awaited(
        self, computation: Computation, done: Instruction, under_way: Mapping[str, _Transfer]
    ) -> list[_Transfer]:
        """Return the transfers whose end an instruction waits for.

        What arrives from another slice was sent by a device that runs the same program, so that it
        arrives when this device's own part of the transfer has been sent.
        """
        names = [name for name in done.operands if name in under_way]
        if not names:
            begun = computation.instructions.get(done.operands[0]) if done.operands else None
            channel = self._prices.channel(begun if begun and begun.opcode == "recv" else done)
            names = [name for name in (f"channel {channel}",) if name in under_way]
        return [under_way[name] for name in names]

    def _control(
        self,
        computation: Computation,
        instruction: Instruction,
        origin: Origin,
        place: Place,
        clock: float,
    ) -> Event | None:
        """Return the event of a loop, a conditional or a call that begins at `clock`, else None."""
        called = instruction.called()
        if instruction.opcode == "while":
            seconds, inside, times = self._loop(computation, instruction, origin, place)
        elif instruction.opcode == "conditional":
            seconds, inside, times = self._conditional(instruction, origin, place)
        elif instruction.opcode == "call" and called.get("to_apply"):
            inside, times = called["to_apply"][0], 1.0
            seconds = self.run(self._module.computations[inside], place)
        else:
            return None
        return Event(instruction.name, clock, clock + seconds, None, origin, inside, times)

    def _loop(
        self, computation: Computation, loop: Instruction, origin: Origin, place: Place
    ) -> tuple[float, str, float]:
        count = trip_count(self._module, computation, loop)
        if count is None:
            self.timeline.unknown_loops.append(loop.name)
            count = 1
        body = loop.called()["body"][0]
        is_outermost = not place.loops
        phase = place.phase
        if phase == OUTSIDE:
            direction = "backward" if origin.is_backward else "forward"
            number = 1 + sum(loop.phase.startswith(direction) for loop in self.timeline.loops)
            phase = f"{direction} loop {number}"
        inside = place._replace(phase=phase, loops=place.loops + 1, runs=place.runs * count)
        seconds = self.run(self._module.computations[body], inside)
        if is_outermost:
            self.timeline.loops.append(Loop(phase, body, count, seconds))
        return count * seconds, body, count

    def _conditional(
        self, instruction: Instruction, origin: Origin, place: Place
    ) -> tuple[float, str, float]:
        """Walk through both sides of a conditional; the longest branch is the one with the work."""
        branches = [self._module.computations[n] for n in instruction.called()["branches"]]
        silent = _Walker(self._module, self._prices, self._origins, self._times_taken)
        seconds = [silent.run(branch, place) for branch in branches]
        longest = seconds.index(max(seconds))
        taken = min(self._times_taken(origin, place.runs), place.runs)
        share = taken / place.runs if place.runs else 0.0
        scope = f"{origin.scope or 'other'}{' gradient' if origin.is_backward else ''}"
        expected = share * seconds[longest]
        for index, branch in enumerate(branches):
            # Of several branches without the work, the first stands for all.
            part = share if index == longest else 1 - share if index == (longest == 0) else 0.0
            if part:
                outermost = place.conditional or scope
                self.run(branch, place._replace(conditional=outermost, runs=part * place.runs))
            if index != longest:
                expected += part * seconds[index]
        self.timeline.conditionals.append(
            Conditional(scope, place.phase, place.runs, taken, seconds[longest])
        )
        return expected, branches[longest].name, share

    def _spend(self, name: str, price: Price, origin: Origin, place: Place, seconds: float) -> None:
        if seconds or price.seconds is None:
            self.timeline.spent.append(Spent(name, price, origin, place, seconds))
