"""Count the FLOPs of a traced program, recomputation and masked idle slots included.

The count runs over the jaxpr, where loops still have their lengths: XLA's own cost analysis counts
the body of a loop once, and after TPU compilation a matrix product no longer looks like one. Matrix
products, convolutions and kernels count (attention kernels by the blocks that they visit);
element-wise operations are noise.
"""

import math
import re
from collections.abc import Callable

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import partial_eval as pe

from maxpipe.model.experts.exchange import SPARSE_CALL
from maxpipe.model.experts.imbalance import USUAL_CALL
from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr, shaped

# Maps how often a conditional is reached to how often it does its work.
BranchRuns = Callable[[float], float]
_ATTENTION = "splash_"  # part of the names of splash attention's kernels


def every_time(runs: float) -> float:
    return runs


def program_flops(jaxpr: ClosedJaxpr, branch_runs: BranchRuns = every_time) -> float:
    """Return the FLOPs over all devices of a program that is not partitioned yet."""
    return _count(jaxpr.jaxpr, 1.0, branch_runs)


def equation_flops(eqn: JaxprEqn, runs: float = 1.0, branch_runs: BranchRuns = every_time) -> float:
    """Return the FLOPs of an equation that runs `runs` times, with all that it calls."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        depth = math.prod(shaped(eqn.invars[0]).shape[d] for d in contracted)
        return runs * 2.0 * depth * math.prod(shaped(eqn.outvars[0]).shape)
    if name.startswith("ragged_dot"):
        # Each row is multiplied with the matrix of its own group only.
        columns = shaped(eqn.outvars[0]).shape[-1]
        return runs * 2.0 * math.prod(shaped(eqn.invars[0]).shape) * columns
    if name == "conv_general_dilated":
        kernel = shaped(eqn.invars[1]).shape
        outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        depth = math.prod(kernel) // outputs
        return runs * 2.0 * depth * math.prod(shaped(eqn.outvars[0]).shape)
    if name == "pallas_call":
        return runs * _kernel(eqn)
    if name == "cond":
        times = branch_runs(runs)
        # XLA computes nothing that no result of a branch depends on.
        branches = (
            pe.dce_jaxpr(jaxpr := open_jaxpr(branch), [True] * len(jaxpr.outvars))[0]
            for branch in params["branches"]
        )
        return max(_count(branch, times, branch_runs) for branch in branches)
    devices = 1
    if params.get("name") == USUAL_CALL:
        branch_runs = every_time
    if used := re.fullmatch(rf"{SPARSE_CALL}(\d+)_of_(\d+)", str(params.get("name", ""))):
        # Its conditionals skip the unused rows.
        runs, branch_runs = runs * int(used[1]) / int(used[2]), every_time
    if name == "scan":
        runs *= params["length"]
    elif name == "shard_map":
        # Shapes inside are those of one device, along the axes that this equation makes manual.
        # Devices do not multiply the runs: `branch_runs` takes how often one device reaches a
        # conditional.
        devices = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return devices * sum(
        _count(inner, runs, branch_runs) for inner in map(open_jaxpr, inner_jaxprs(eqn))
    )


def _count(jaxpr: Jaxpr, runs: float, branch_runs: BranchRuns) -> float:
    return sum(equation_flops(eqn, runs, branch_runs) for eqn in jaxpr.eqns)


def _kernel(eqn: JaxprEqn) -> float:
    params = eqn.params
    if (estimate := params.get("cost_estimate")) is not None:
        return float(estimate.flops)
    grid = math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int))
    visited = _visited_share(eqn) if _ATTENTION in str(params.get("name")) else 1.0
    return visited * grid * _count(open_jaxpr(params["jaxpr"]), 1.0, every_time)


def _visited_share(eqn: JaxprEqn) -> float:
    """Return the share of a splash attention kernel's grid in which it computes.

    It skips blocks of queries and keys that a causal mask hides. Devices with parts of the queries
    are taken to have the average number of visible blocks.
    """
    operands = [shaped(v) for v in eqn.invars]
    mask = next((x.shape for x in operands if x.dtype == jnp.int8), ())  # [..., queries, keys]
    queries, keys = [x.shape[-2] for x in operands if jnp.issubdtype(x.dtype, jnp.floating)][:2]
    refs = [v.aval for v in eqn.params["jaxpr"].invars]  # the blocks that one visit works on
    block, key_block = [r.shape[-2] for r in refs if jnp.issubdtype(r.dtype, jnp.floating)][:2]
    rows, columns = keys // block, keys // key_block
    if tuple(mask[-2:]) != (queries // block, columns):
        return 1.0  # the grid of a window has no hidden blocks
    return sum(visible_blocks(rows, block, key_block)) / (rows * columns)


def visible_blocks(rows: int, block: int, key_block: int) -> list[int]:
    """Return how many blocks of keys each of the blocks of queries sees under a causal mask."""
    return [math.ceil((row + 1) * block / key_block) for row in range(rows)]
