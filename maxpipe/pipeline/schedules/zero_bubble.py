"""ZB-H1 and ZB-H2: the backward is split into I and W, and W fills the bubble.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, whose B is our I. Letters: S
stages, M microbatches; F, I and W the time of a unit.
"""

from maxpipe.pipeline.schedules.order import place, split_backward
from maxpipe.pipeline.schedules.table import Table


def zb_h1(num_stages: int, num_microbatches: int) -> Table:
    """Build ZB-H1: zero bubble in the memory of 1F1B's first stage.

    Stage s runs S-s forwards, then I and F in turn, and runs each W s units after its I, which
    fills the end of 1F1B with W.

        bubble     (S-1)(F + I - W) for M >= S and W <= F
        in flight  min(M, S) on every stage, counted until W has run
    """
    orders = [
        split_backward(stage, num_microbatches, num_warmup=num_stages - stage, lag=stage)
        for stage in range(num_stages)
    ]
    return place("zb_h1", num_stages, num_microbatches, 1, orders)


def zb_h2(num_stages: int, num_microbatches: int) -> Table:
    """Build ZB-H2: twice the memory of 1F1B, almost no bubble.

    Stage s runs 2(S-s) - 1 forwards, then I and F in turn, and runs each W 2s units after its I.

        bubble     (S-1)(F + I - 2W) for M >= 2S-1, W <= F and 2W <= F + I, within each stage's own span
        in flight  min(M, 2S - 1) on every stage, counted until W has run
    """
    orders = [
        split_backward(
            stage, num_microbatches, num_warmup=2 * (num_stages - stage) - 1, lag=2 * stage
        )
        for stage in range(num_stages)
    ]
    return place("zb_h2", num_stages, num_microbatches, 1, orders)
