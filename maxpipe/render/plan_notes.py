"""Say in lines what the figures of a plan rest on, what they leave out, and what would fit."""

import math
import os
from collections.abc import Iterator

from maxpipe.config.slices import num_chips, slices_of
from maxpipe.devices.chips import GIB
from maxpipe.devices.host_memory import free_memory
from maxpipe.model.kernels.choose import EVERYWHERE, choose_kernel
from maxpipe.pipeline.chunk import offloaded_names
from maxpipe.plan.search.best import Plan
from maxpipe.plan.search.machine import platform_of
from maxpipe.plan.search.request import TOPOLOGY
from maxpipe.render.plan_table import table_rows

_MORE = 3  # rows that a note proposes to compile in addition, for each takes minutes


def basis_lines(plan: Plan) -> list[str]:
    """Return what the figures rest on, and what they leave out."""
    lines = [*_bases(plan), *_uncompiled_lines(plan), *_simulated_lines(plan)]
    return [*lines, *_batch_lines(plan), *_omissions(plan)]


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


def _omissions(plan: Plan) -> Iterator[str]:
    """Yield what the seconds of a plan leave out, and what makes them long."""
    machine, config = plan.request.machine, plan.request.config
    if plan.winner:
        reasons: list[str] = []
        kernel = choose_kernel(plan.winner.config, platform_of(plan.winner.config), reasons.append)
        if kernel == EVERYWHERE:
            reason = "".join(reasons) or f"model.attention={kernel}"
            yield f"attention holds all scores, which takes memory and time: {reason}"
    if machine.slices > 1 and machine.chip.dcn_bandwidth is None:
        yield (
            f"transfers between slices are priced as fast as one link within a slice, since the "
            f"network of {machine.chip.name} is unknown: they take longer"
        )
    if any(offloaded_names(row.config.pipeline) for row in table_rows(plan)):
        yield "transfers to the host's memory are not in these seconds"
    # A compiled step of one program includes what follows.
    if config.optimizer.name == "muon":
        yield "closed forms leave out the products of Muon's update: a step takes longer"
    if (kind := config.model.quantisation) != "none":
        yield (
            f"closed forms price products in {kind} (model.quantisation) as those in "
            f"{config.model.dtype}: a step may be shorter"
        )


def nothing_fits_lines(plan: Plan) -> list[str]:
    """Return why nothing fits, and what would; no lines if something fits."""
    if plan.winner is not None:
        return []
    if compiled := sum(row.proof is not None for row in plan.misfits):
        line = f"none of the {compiled} that were compiled fits"
        if compiled == 1:
            line = "the one that was compiled does not fit"
        lines, by = [f"{line}; {_others(plan, compiled)}"], " by closed forms"
    else:
        least = plan.outcome.least
        assert least is not None, "where nothing is legal there is no plan to show"
        needed, limit = f"{least.memory / GIB:.3g} GiB a device", plan.request.limit
        usable = f", and {limit / GIB:.3g} may be used" if limit else ""
        what = f"{least.mesh_text()}, {least.schedule_text()}"
        lines, by = [f"nothing fits: by closed forms the least is {needed}{usable}: {what}"], ""
    lines += _state_lines(plan)
    would_fit, vain, unfinished = plan.remedies
    if would_fit:
        lines += [f"what would fit{by}:", *(f"  {remedy}" for remedy in would_fit)]
    if vain:
        lines.append(f"none of these helps by itself: {', '.join(vain)}")
    if unfinished:
        lines.append(f"not tried to the end, for lack of time: {', '.join(unfinished)}")
    return lines


def _others(plan: Plan, compiled: int) -> str:
    """Return what fits by closed forms but was not compiled."""
    if left := plan.uncompiled:
        others = "1 other was" if left == 1 else f"{left} others were"
        return f"{others} not compiled: --compile {2 * compiled}"
    line = "no other mesh and schedule fits by closed forms"
    if len(plan.outcome.fitting) > compiled:
        line += f"; other options of {'it' if compiled == 1 else 'these'} were not compiled"
    return line


def _state_lines(plan: Plan) -> list[str]:
    """Return how many chips hold what cannot be made smaller, if the machine has fewer."""
    machine, limit = plan.request.machine, plan.request.limit
    state = plan.facts.least_state_bytes()
    if limit is None or state <= machine.devices * limit:
        return []
    what = "parameters, optimizer state and gradients alone"
    chip, chips = machine.chip.name, math.ceil(state / limit * machine.num_chips / machine.devices)
    line = f"{what} need {state / GIB:,.0f} GiB, at least {chips} {chip}"
    if not machine.is_compilable:
        return [line]
    *_, largest = slices_of(chip)
    if chips > machine.slices * num_chips(largest):
        return [f"{line}: {math.ceil(chips / num_chips(largest))} slices of {largest} or more"]
    is_vain = "more chips" in plan.remedies.vain
    return [line if is_vain else f"{line}: {TOPOLOGY} {chip} --smallest"]
