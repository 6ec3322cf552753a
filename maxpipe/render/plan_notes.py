"""Say in lines what the figures of a plan rest on, and what they leave out."""

import os

from maxpipe.devices.chips import GIB
from maxpipe.devices.host_memory import free_memory
from maxpipe.plan.search.best import Plan
from maxpipe.render.plan_omissions import omission_lines

_MORE = 3  # rows that a note proposes to compile in addition, for each takes minutes


def basis_lines(plan: Plan) -> list[str]:
    """Return what the figures rest on, and what they leave out."""
    lines = [*_bases(plan), *_uncompiled_lines(plan), *_simulated_lines(plan)]
    return [*lines, *_batch_lines(plan), *omission_lines(plan)]


def _bases(plan: Plan) -> list[str]:
    machine = plan.request.machine
    if not machine.is_timed:
        return [
            "closed forms alone, and no seconds: simulated devices share a machine of unknown "
            "speed. Times are multiples of the fastest row's."
        ]
    if not machine.is_compilable:
        return ["closed forms alone: no compiler's estimates are at hand for GPUs"]
    proofs = [row.proof for row in [*plan.rows, *plan.misfits] if row.proof]
    if proofs and not any(proof.seconds for proof in proofs):
        line = "memory of what was compiled is the compiler's, seconds are closed forms"
        # A step that is too large has no estimate of time on any chip.
        if any(proof.fits for proof in proofs):
            line = f"no compiler's estimate of time for this chip; {line}"
        return [line]
    if proofs:
        compiled = "by compiled: seconds, their parts and GiB are the compiler's"
        return [compiled, "by closed: closed forms"]
    if not plan.rows:
        return ["closed forms alone"]
    return ["closed forms alone: --compile 3 would prove the best by compiling them"]


def _uncompiled_lines(plan: Plan) -> list[str]:
    """Return a line if rows that were not compiled are predicted faster than the chosen row."""
    chosen = plan.winner
    if chosen is None or chosen.basis != "compiled":
        return []
    compiled = sum(row.proof is not None for row in plan.rows)
    faster = sum(row.proof is None and row.per_sequence < chosen.per_sequence for row in plan.rows)
    if not faster:
        return []
    excess = chosen.per_sequence / chosen.candidate.per_sequence - 1
    rows = "1 row that was" if faster == 1 else f"{faster} rows that were"
    return [
        f"by the compiler the chosen row takes {chosen.seconds:.4g} s, {abs(excess):.0%} "
        f"{'more' if excess >= 0 else 'less'} than by closed forms; {rows} not compiled may be "
        f"faster: --compile {compiled + min(faster, _MORE)} compares them"
    ]


def _batch_lines(plan: Plan) -> list[str]:
    """Return a line if the run would see more or fewer tokens than the file's batch implies."""
    written, chosen = plan.request.written, plan.winner
    if chosen is None or chosen.candidate.batch == written.data.global_batch_size:
        return []
    batch, before = chosen.candidate.batch, written.data.global_batch_size
    times = f"{batch / before:.3g}"
    return [
        f"{batch} sequences a step are {times} times the file's {before}, so with "
        f"steps={written.steps} a run reads {times} times as many tokens; steps changes that"
    ]


def _simulated_lines(plan: Plan) -> list[str]:
    """Return a warning if simulated devices need more memory together than this machine has free.

    Free memory does not limit the search: a plan should not differ from machine to machine.
    """
    machine, chosen = plan.request.machine, plan.winner
    if chosen is None or not machine.is_simulated:
        return []
    try:
        free = free_memory()
    except OSError:  # only Linux has such a file
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = machine.devices * chosen.memory
    if needed <= free:
        return []
    return [
        f"warning: the devices share this machine's memory: {machine.devices} x "
        f"{chosen.memory / GIB:.3g} = {needed / GIB:.3g} GiB, and {free / GIB:.3g} are free. "
        "Training would be killed here; a shorter data.sequence_length, fewer --tokens-per-step or "
        "a smaller model need less"
    ]
