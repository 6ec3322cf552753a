"""1F1B for one SPMD program: every tick has an F slot and a B slot, and all stages move together."""

import numpy as np

from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._groups import depth_first, group_microbatches
from maxpipe.pipeline.schedules._schedule import Schedule
from maxpipe.pipeline.schedules._table import Table, from_ticks


@SCHEDULES.register()
class Lockstep1F1B(Schedule):
    """Lockstep interleaved 1F1B.

    Stage s runs its k-th F at tick k + d*s and its j-th B at tick j + D + d*(S-1-s), where k walks (group of
    microbatches, chunk, microbatch) and j the same with chunks reversed; d is the forwarding delay, groups
    have at least d*S microbatches and D is the tick at which the last stage can start the first B. The order
    is Megatron's interleaved schedule (Narayanan et al., arXiv:2104.04473), its time and memory too, but no
    stage ever branches on its own.

    With groups of exactly d*S microbatches (M a multiple of d*S), D = d(V*S-1) + slack and

        time       (M*V + d(S-1)) (F + B), so a bubble of d(S-1) chunks of F + B
        in flight  d((V+1)S - 2 - 2s) + 1 + slack on stage s; (V+1)S - 1 - 2s for d = 1: independent of M

    A remainder of M is spread over the groups, which costs no time; where groups grow by r, D and the peak
    grow by (V-1)r. Fewer than d*S microbatches leave positions empty.
    """

    engines = ("scheduled",)
    fixed_repeats = None
    delayable = True
    slots_overlap = True

    @classmethod
    def _build(
        cls, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
    ) -> Table:
        return from_ticks(
            cls.name(),
            num_stages,
            num_repeats,
            cls._ticks(num_stages, num_microbatches, num_repeats, forwarding_delay, slack),
            lockstep=True,
            forwarding_delay=forwarding_delay,
            slack=slack,
        )

    @classmethod
    def _ticks(
        cls, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
    ) -> dict[str, np.ndarray]:
        """For each kind the tick of every unit [M, V*S]."""
        sizes = group_microbatches(num_microbatches, forwarding_delay * num_stages)
        strides = np.maximum(sizes, forwarding_delay * num_stages)
        forward = depth_first(sizes, strides, num_repeats)[:, :, None]
        backward = depth_first(sizes, strides, num_repeats)[:, ::-1, None]
        stage = np.arange(num_stages)
        first_backward = (num_repeats - 1) * strides.max() + forwarding_delay * (num_stages - 1) + slack
        shape = (num_microbatches, num_repeats * num_stages)
        return {
            "F": (forward + forwarding_delay * stage).reshape(shape),
            "B": (backward + first_backward + forwarding_delay * (num_stages - 1 - stage)).reshape(shape),
        }
