"""FLOPs that a step asks the devices for, recomputation and masked idle slots included.

Counted on the jaxpr, where loops still have their lengths; XLA's own cost analysis counts a loop's
body once, and what TPUs do with a matrix product no longer looks like one. Matrix products and
kernels count, the rest is noise.
"""

import math
from collections.abc import Callable
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr

BranchRuns = Callable[[float], float]


def step_flops(jaxpr: ClosedJaxpr, branch_runs: BranchRuns = lambda runs: runs) -> float:
    """FLOPs of all devices together.

    Args:
      jaxpr: of the whole step, before partitioning.
      branch_runs: how often a conditional that is reached so many times does its work.
    """
    return _count(jaxpr.jaxpr, 1.0, branch_runs)


def _count(jaxpr: Jaxpr, runs: float, branch_runs: BranchRuns) -> float:
    return sum(_equation(eqn, runs, branch_runs) for eqn in jaxpr.eqns)


def _equation(eqn: Any, runs: float, branch_runs: BranchRuns) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        depth = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        return runs * 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)
    if name == "pallas_call":
        return runs * _kernel(params)
    if name == "cond":
        times = branch_runs(runs)
        return max(_count(open_jaxpr(branch), times, branch_runs) for branch in params["branches"])
    devices = 1
    if name == "scan":
        runs *= params["length"]
    elif name == "shard_map":
        # Shapes inside are those of one device, over the axes that the program names itself.
        # Devices are no runs: `branch_runs` is told how often one device gets to a conditional.
        devices = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return devices * sum(
        _count(inner, runs, branch_runs) for inner in map(open_jaxpr, inner_jaxprs(eqn))
    )


def _kernel(params: Any) -> float:
    estimate = params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops)
    grid = math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int))
    return grid * _count(open_jaxpr(params["jaxpr"]), 1.0, lambda runs: runs)
