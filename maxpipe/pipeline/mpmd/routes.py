"""How values get from the stage that computes them to the stages that read them, and how long they live there.

Transfers run along the pipeline only: a value that a later stage needs is handed on by those between, together with
the activation, so that it is there when the schedule lets the later stage start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import Var

from maxpipe.pipeline.mpmd.program import Name, SlicedProgram


@dataclass
class Routes:
    """Transfers and lifetimes, the same for every microbatch.

    Attributes:
      sends: for each computation, the values that its stage hands to the stage of the next one when it is done.
      uses: for each stage, the computations that read or send a value there.
    """

    sends: dict[Name, list[Var]]
    uses: list[dict[Var, set[Name]]]

    def last_reads(self, stage: int, name: Name) -> set[Var]:
        """Values on a stage that surely nothing needs after computation `name` has run."""
        return {v for v, names in self.uses[stage].items() if name in names and all(before(n, name) for n in names)}


def route(program: SlicedProgram, stage_of_chunk: Sequence[int]) -> Routes:
    """Finds the way of every value.

    Args:
      program: sliced.
      stage_of_chunk: the stage that holds each of the G chunks.
    """
    routes = Routes({name: [] for name in program.computations}, [{} for _ in range(max(stage_of_chunk) + 1)])
    back = "I" if any(name.kind == "I" for name in program.computations) else "B"
    there: set[tuple[Var, int]] = set()
    for name in program.computations:
        stage = stage_of_chunk[name.chunk]
        there.update((v, stage) for v in program.computations[name].writes)
        for v in program.computations[name].reads:
            for hop, following in _hops(program.producer[v], name, back):
                here, next_stage = stage_of_chunk[hop.chunk], stage_of_chunk[following.chunk]
                if (v, stage) not in there and (v, next_stage) not in there:
                    routes.sends[hop].append(v)
                    routes.uses[here].setdefault(v, set()).add(hop)
                    there.add((v, next_stage))
            routes.uses[stage].setdefault(v, set()).add(name)
    return routes


def before(first: Name, second: Name) -> bool:
    """Whether `first` is `second`, or runs before it in every schedule."""
    if first == second:
        return True
    if first.kind == "W":
        return False
    if first.kind == "F":
        return second.kind != "F" or first.chunk < second.chunk
    return second.kind != "F" and first.chunk >= second.chunk


def _hops(producer: Name, reader: Name, back: str) -> list[tuple[Name, Name]]:
    """The computations behind which a value moves to the next stage, with the one that follows there."""
    turn = max(producer.chunk, reader.chunk)
    if producer.kind == "F" and reader.chunk >= producer.chunk:
        return [(Name("F", c), Name("F", c + 1)) for c in range(producer.chunk, turn)]
    return [(Name(back, c), Name(back, c - 1)) for c in range(turn, reader.chunk, -1)]
