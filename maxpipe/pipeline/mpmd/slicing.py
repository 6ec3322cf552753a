"""A marked program, cut into computations of stages."""

from typing import Any

from maxpipe.pipeline.mpmd.assemble import assemble
from maxpipe.pipeline.mpmd.inline import inline
from maxpipe.pipeline.mpmd.placement import place_equations
from maxpipe.pipeline.mpmd.program import SlicedProgram
from maxpipe.pipeline.mpmd.segments import segments
from maxpipe.pipeline.mpmd.split import split_backwards
from maxpipe.pipeline.mpmd.sums import split_sums


def slice_program(program: Any, *, split_backward: bool = False) -> SlicedProgram:
    """Cuts a program at its stage marks.

    A program with G marks has G chunks: a mark follows each, also the last, behind which stands the loss. Of a
    gradient, chunk c becomes computations F and B; of a forward alone, F.

    Args:
      program: closed jaxpr of a forward, or of `jax.value_and_grad` of one.
      split_backward: B becomes I, which computes what the stage before waits for, and W, which computes the rest.

    Raises:
      ValueError: the marks do not cut the program into stages; see `inline` and `segments`.
    """
    flat = inline(program, checkpoints=split_backward)
    cut = segments(flat)
    placement = place_equations(flat, cut)
    computations = assemble(flat, cut, placement, split_sums(cut, placement))
    if split_backward:
        computations = split_backwards(computations)
    return SlicedProgram(flat, cut.num_chunks, computations)
