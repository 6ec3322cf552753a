"""Hold what a walk through a scheduled program has timed: operations, events, loops."""

from dataclasses import dataclass, field
from typing import NamedTuple

from maxpipe.compile.prediction.operations import Price
from maxpipe.compile.prediction.origins import Origin

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
