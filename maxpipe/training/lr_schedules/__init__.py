"""Learning-rate schedules; each module registers one, chosen by `optimizer.schedule`.

A variant maps (progress, config) to a share of the peak rate: progress is a float32 scalar that runs from 0 at the
end of the warm-up to 1 at `optimizer.decay_steps` and stays there.
"""

from collections.abc import Callable
from typing import Any

from maxpipe.registry import Registry

LR_SCHEDULES: Registry[Callable[[Any, Any], Any]] = Registry(__name__, __path__, "optimizer.schedule")
