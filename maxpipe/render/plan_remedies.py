"""Say in lines why nothing fits, and what would."""

import math

from maxpipe.config.slices import num_chips, slices_of
from maxpipe.devices.chips import GIB
from maxpipe.plan.search.best import Plan
from maxpipe.plan.search.request import TOPOLOGY

_CLOSED = " by closed forms"
_NO_OTHER = f"no other mesh and schedule fits{_CLOSED}"


def nothing_fits_lines(plan: Plan) -> list[str]:
    """Return why nothing fits, and what would; no lines if something fits."""
    if plan.winner is not None:
        return []
    if compiled := sum(row.proof is not None for row in plan.misfits):
        lines, by = [f"{_none_of(compiled)}; {_others(plan, compiled)}"], _CLOSED
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


def _none_of(count: int) -> str:
    if count == 1:
        return "the one that was compiled does not fit"
    return f"none of the {count} that were compiled fits"


def _others(plan: Plan, compiled: int) -> str:
    """Return what fits by closed forms but was not compiled."""
    if left := plan.uncompiled:
        others = "1 other was" if left == 1 else f"{left} others were"
        return f"{others} not compiled: --compile {2 * compiled}"
    if len(plan.outcome.fitting) <= compiled:
        return _NO_OTHER
    these = "it" if compiled == 1 else "these"
    return f"{_NO_OTHER}; other options of {these} were not compiled"


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
