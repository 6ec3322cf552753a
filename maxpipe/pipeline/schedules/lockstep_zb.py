"""Zero bubble for one SPMD program: lockstep 1F1B whose ticks have a slot of their own for weight gradients."""

import numpy as np

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._table import stages_of_chunks
from maxpipe.pipeline.schedules.lockstep_1f1b import Lockstep1F1B


@SCHEDULES.register()
class LockstepZB(Lockstep1F1B):
    """Lockstep 1F1B with split backwards.

    F and I run in the ticks of `lockstep_1f1b`'s F and B, and the j-th W of every stage at tick j + D + d(S-1),
    when the first stage runs its j-th I: that is d*s ticks after the I on stage s, and no stage lacks what its W
    needs. Ticks in which the first or the last stages alone have an I then cost no W. The split is that of zero
    bubble (Qi et al., arXiv:2401.10241, whose B is our I), brought into lockstep. With M a multiple of d*S

        time       M*V (F + I + W) + d(S-1) (F + I), which is d(S-1) W less than lockstep_1f1b if B = I + W
        bubble     d(S-1) chunks of F + I
        in flight  d((V+1)S - 2 - s) + 1 + slack on stage s, counted until W has run: the first stage, which
                   sets the size of the program's buffers, has no more than with lockstep_1f1b
        stash      d*s + 1 chunks between their I and their W on stage s; buffers are those of the last stage, for
                   d(S-1) + 1 on each

    Other numbers of microbatches as in `lockstep_1f1b`.
    """

    @classmethod
    def _ticks(
        cls, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
    ) -> dict[str, np.ndarray]:
        whole = super()._ticks(num_stages, num_microbatches, num_repeats, forwarding_delay, slack)
        stage = stages_of_chunks(num_stages, num_repeats, "loop")
        return {"F": whole["F"], "I": whole["B"], "W": whole["B"] + forwarding_delay * stage}
