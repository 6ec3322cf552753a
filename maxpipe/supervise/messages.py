"""Define what supervisors report to the council of their run, and its orders, as lines of text.

Imports no JAX.
"""

import json
from dataclasses import asdict, dataclass
from typing import get_args

from maxpipe.devices.cluster import Sizes
from maxpipe.storage.records import Damaged, parse_record


@dataclass(frozen=True)
class Joined:
    """Supervisor `index` is there, and has no trainer running; the first report on a line.

    Its `memory` is served at HOST:PORT, with replicas of `attempt`, the last one it took part in.
    Its last trainer has told the `sizes`, for a council that begins anew.
    """

    count: int
    host: str
    memory: str = ""
    attempt: int = 0
    index: int = 0
    sizes: Sizes | None = None


@dataclass(frozen=True)
class Ended:
    """A trainer has ended; negative codes are signals."""

    attempt: int
    code: int


@dataclass(frozen=True)
class Stopping:
    """A supervisor was asked to stop by a signal, and has passed it on to its trainer."""

    number: int


@dataclass(frozen=True)
class Start:
    """Start a trainer."""

    attempt: int
    port: int  # where the attempt's coordinator listens, on supervisor 0's host
    job: str
    members: tuple[int, ...] = (0,)  # who takes part: processes 0, 1, ... of the attempt
    memories: tuple[str, ...] = ()  # HOST:PORT of their memories; empty without
    word: str = ""  # password of these memories
    whole: str = ""  # what trainers have to know if not all take part, see `Sizes`
    previous: int = 0  # who took no part in this one has replicas of another history


@dataclass(frozen=True)
class Save:
    """Make the trainer save and end, by SIGTERM, because others have come to join."""

    attempt: int


@dataclass(frozen=True)
class End:
    """End the trainer, if it has not ended by itself after some seconds."""

    attempt: int
    seconds: float


@dataclass(frozen=True)
class Finish:
    """End the supervisor, with this exit code."""

    code: int
    why: str


Report = Joined | Ended | Stopping
Order = Start | Save | End | Finish
Message = Report | Order
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> str:
    """Return a message as one line: its kind and JSON."""
    return f"{type(message).__name__} {json.dumps(asdict(message))}"


def decode(line: str) -> Message:
    """Return the message in a line; raises `Damaged` if there is none."""
    kind, _, record = line.partition(" ")
    if kind not in _KINDS:
        raise Damaged(f"no message: {line[:100]!r}")
    return parse_record(record, _KINDS[kind])
