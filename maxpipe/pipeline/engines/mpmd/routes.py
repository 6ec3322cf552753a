"""Find the route of every value from the stage that computes it to the stages that read it.

Transfers run along the pipeline only. A value that a later stage reads passes through the stages in
between, together with the activation, so that it is there when the schedule lets the later stage
start. Letters: G chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import Var

from maxpipe.pipeline.engines.mpmd.program import SlicedProgram, UnitName


@dataclass
class Routes:
    """Transfers and lifetimes, the same for every microbatch.

    Attributes:
      sends: for each computation, the values that its stage sends to the stage of the next one when
        it is done.
      uses: for each stage, the computations that read or send each value there.
    """

    sends: dict[UnitName, list[Var]]
    uses: list[dict[Var, set[UnitName]]]

    def last_reads(self, stage: int, name: UnitName) -> set[Var]:
        """Return the values on a stage that no schedule uses after computation `name`."""
        return {
            v
            for v, names in self.uses[stage].items()
            if name in names and all(before(other, name) for other in names)
        }


def route(program: SlicedProgram, stage_of_chunk: Sequence[int]) -> Routes:
    """Compute the transfers that each value needs.

    Args:
      program: the sliced program.
      stage_of_chunk: the stage that holds each of the G chunks.
    """
    num_stages = max(stage_of_chunk) + 1
    routes = Routes({name: [] for name in program.computations}, [{} for _ in range(num_stages)])
    backward_kind = "I" if any(name.kind == "I" for name in program.computations) else "B"
    arrived: set[tuple[Var, int]] = set()  # (value, stage)
    for name, computation in program.computations.items():
        stage = stage_of_chunk[name.chunk]
        arrived.update((v, stage) for v in computation.writes)
        for v in computation.reads:
            for sender, receiver in _hops(program.producer[v], name, backward_kind):
                # A hop is left out if an earlier reader has brought the value this far already.
                source, target = stage_of_chunk[sender.chunk], stage_of_chunk[receiver.chunk]
                if (v, stage) not in arrived and (v, target) not in arrived:
                    routes.sends[sender].append(v)
                    routes.uses[source].setdefault(v, set()).add(sender)
                    arrived.add((v, target))
            routes.uses[stage].setdefault(v, set()).add(name)
    return routes


def before(first: UnitName, second: UnitName) -> bool:
    """Return whether `first` is `second`, or runs before it in every schedule."""
    if first == second:
        return True
    # No other unit waits for a W.
    if first.kind == "W":
        return False
    # Forwards run from the first chunk to the last, and after them all backwards the other way.
    if first.kind == "F":
        return second.kind != "F" or first.chunk < second.chunk
    return second.kind != "F" and first.chunk >= second.chunk


def _hops(
    producer: UnitName, reader: UnitName, backward_kind: str
) -> list[tuple[UnitName, UnitName]]:
    """Return the (sender, receiver) pairs of a value's route from its producer to a reader."""
    turn = max(producer.chunk, reader.chunk)
    # With the activations, if the reader comes later in the forward; else with the gradients.
    if producer.kind == "F" and reader.chunk >= producer.chunk:
        return [(UnitName("F", c), UnitName("F", c + 1)) for c in range(producer.chunk, turn)]
    return [
        (UnitName(backward_kind, c), UnitName(backward_kind, c - 1))
        for c in range(turn, reader.chunk, -1)
    ]
