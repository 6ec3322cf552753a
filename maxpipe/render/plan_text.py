"""Show a plan as JSON and as lines: a table, what its figures rest on, why nothing fits."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress

from maxpipe.config.catalog import ENGINES
from maxpipe.devices.chips import GIB
from maxpipe.devices.host_memory import free_memory
from maxpipe.model.kernels.choose import EVERYWHERE, choose_kernel
from maxpipe.pipeline.chunk import offloaded_names
from maxpipe.plan.number import Seconds
from maxpipe.plan.search.best import Plan, SliceCost
from maxpipe.plan.search.candidate import Row, relative_time
from maxpipe.plan.search.machine import platform_of
from maxpipe.plan.search.space import unpriced
from maxpipe.plan.search.written import versions
from maxpipe.render.columns import columns

HEADER = (
    "mesh", "schedule", "M", "V", "remat", "gather", "tiles", "GiB", "seconds", "by", "= comp",
    "+ comm", "+ bubble", "MFU", "why not chosen",
)  # fmt: skip
LEFT = {0, 1, 4, 5, HEADER.index("by"), len(HEADER) - 1}
_FIRST = (0, 8, 13, 14)  # the columns of a row's first line where a terminal is narrow
_SECOND = (*range(1, 8), 9)
_REASONS_SHOWN = 8
_MORE = 3  # rows that a note proposes to compile in addition, for each takes minutes


def table_lines(plan: Plan, width: int | None = None) -> list[str]:
    """Return the table, the chosen row first; of two lines a row where one exceeds the width."""
    cells = table_cells(plan)
    lines = columns(cells, LEFT) if len(cells) > 1 else []
    if width and max(map(len, lines), default=0) > width:
        lines = _narrow_lines(cells, width)
    if isinstance(plan.own, str) and plan.own:
        lines.append(plan.own)
    return lines


def _narrow_lines(cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return two lines for each row, without the parts of its seconds; reasons are wrapped."""
    firsts, seconds = (
        columns(
            [[row[n] for n in shown] for row in cells], [shown.index(n) for n in LEFT & {*shown}]
        )
        for shown in (_FIRST, _SECOND)
    )
    indent = " " * firsts[0].index(HEADER[-1])
    lines = []
    for first, second in zip(firsts, seconds, strict=True):
        lines += textwrap.wrap(first, width, subsequent_indent=indent, break_on_hyphens=False)
        lines.append(f"  {second}")
    return lines


def table_cells(plan: Plan) -> list[list[str]]:
    header = list(HEADER)
    if not plan.request.machine.is_timed:
        header[HEADER.index("seconds")] = "x fastest"
    rows = table_rows(plan)
    return [header, *(_cells(plan, row, number == 0) for number, row in enumerate(rows))]


def table_rows(plan: Plan) -> list[Row]:
    own = [plan.own] if isinstance(plan.own, Row) else []
    return [*plan.shown, *plan.misfits, *own]


def _cells(plan: Plan, row: Row, is_first: bool) -> list[str]:
    candidate, machine = row.candidate, plan.request.machine
    batches = {*plan.request.batches, *(r.candidate.batch for r in table_rows(plan))}
    gib = row.memory / GIB
    memory = f"{gib:.1f}" if gib >= 1 else f"{gib:#.2g}"
    if machine.capacity:
        memory += f" of {machine.capacity / GIB:.0f}"
    unit = 1.0 if machine.is_timed else fastest(plan) * candidate.batch
    # As many decimals as give the fastest four digits, so that parts add up.
    places = max(3 - math.floor(math.log10(fastest(plan) * candidate.batch / unit)), 0)
    figures = [f"{float(value) / unit:.{places}f}" for value in (row.seconds, *row.parts)]
    reason = reason_text(plan, row)
    if row.name:
        reason = "; ".join(filter(None, (row.name, reason)))
    elif is_first and plan.rows:
        reason = reason or "chosen"
    pipeline = row.config.pipeline
    outside = row.config.model.stacked_layers - pipeline.parallel_layers
    shows_outside = ENGINES[candidate.engine].one_program and pipeline.parallel_layers >= 0
    repeats = f"{candidate.repeats}{f' +{outside}' * (shows_outside and outside > 0)}"
    return [
        candidate.mesh_text() + f" batch={candidate.batch}" * (len(batches) > 1),
        candidate.schedule_text(),
        str(candidate.microbatches),
        repeats if candidate.has_stages else "",
        candidate.policy,
        candidate.gather if candidate.has_stages else "",
        str(candidate.tiles),
        memory,
        figures[0],
        row.basis,
        *figures[1:],
        f"{100 * plan.mfu(row):.1f} %" if machine.is_timed else "",
        reason,
    ]


def reason_text(plan: Plan, row: Row) -> str:
    """Return why a row is not chosen, and if it was not compiled although others were."""
    is_ranked = any(row is other for other in [*plan.rows, *plan.misfits])
    if row.proof is None and is_ranked and any(ranked.proof for ranked in plan.rows):
        return f"not compiled; by closed forms {row.reason}"
    return row.reason


def fastest(plan: Plan) -> float:
    """Return the seconds of a sequence of the fastest row; the user's own counts if it is alone."""
    own = [plan.own] if isinstance(plan.own, Row) else []
    return min(row.per_sequence for row in [*plan.rows, *plan.misfits] or own)


def summary_lines(plan: Plan) -> list[str]:
    request, outcome = plan.request, plan.outcome
    machine = request.machine
    place, margin = "", ""
    if machine.chip.torus is not None:  # users often name a slice by a number
        place = f" ({machine.topology}{f', {machine.slices} slices' * (machine.slices > 1)})"
    if machine.capacity:
        margin = (
            f", {machine.capacity / GIB:.3g} GiB each, of which {request.margin:.0%} stays free"
        )
    sequences = ", ".join(map(str, request.batches))
    lines = [
        f"devices     {machine.devices} x {machine.chip.name}{place}{margin}",
        f"batch       {sequences} sequence{'s' * (sequences != '1')} of "
        f"{request.config.data.sequence_length} tokens a step",
        f"searched    {outcome.tried:,} candidates in {outcome.priced_seconds:.1f} s, "
        f"{outcome.tried - outcome.fallen.total():,} fit",
    ]
    common = outcome.fallen.most_common()
    shown = [(f"left out: {reason}", count) for reason, count in common[:_REASONS_SHOWN]]
    shown.append(("left out for other reasons", sum(n for _, n in common[_REASONS_SHOWN:])))
    lines += [f"            {count:>11,} {text}" for text, count in shown if count]
    untried = (unpriced(engine, machine.hosts) for engine in ENGINES)
    return lines + [f"not tried   {reason}" for reason in untried if reason]


def as_json(plan: Plan) -> dict[str, object]:
    """Return plain data: sizes in bytes, times in seconds, null for what is unknown."""
    request = plan.request
    machine = request.machine
    winner = plan.winner
    timed = winner if machine.is_timed else None
    return {
        "topology": machine.topology,
        "devices": machine.devices,
        "slices": machine.slices,
        "capacity_bytes": machine.capacity,
        "memory_margin": request.margin,
        "versions": versions(),
        "tried": plan.outcome.tried,
        "search_seconds": plan.outcome.priced_seconds,
        "fallen": dict(plan.outcome.fallen.most_common()),
        "predicted_step_seconds": timed.seconds if timed else None,
        "rows": [_row_json(plan, row) for row in plan.rows],
        "misfits": [_row_json(plan, row) for row in plan.misfits],
        "own": _row_json(plan, plan.own) if isinstance(plan.own, Row) else plan.own or None,
        "remedies": list(plan.remedies.lines),
        "remedies_in_vain": list(plan.remedies.vain),
        "remedies_unfinished": list(plan.remedies.unfinished),
        "slice_costs": [cost._asdict() for cost in plan.slices],
    }


def _row_json(plan: Plan, row: Row) -> dict[str, object]:
    candidate, is_timed = row.candidate, plan.request.machine.is_timed
    return {
        "keys": candidate.updates(),
        "memory_bytes": row.memory,
        "basis": row.basis,
        "closed_form_memory_bytes": candidate.memory,
        "predicted_step_seconds": row.seconds if is_timed else None,
        "closed_form_seconds": float(candidate.seconds.step) if is_timed else None,
        "closed_form_parts": _parts_json(candidate.seconds) if is_timed else None,
        "relative_time": relative_time(row, plan.rows[0]) if plan.rows else None,
        "mfu": plan.mfu(row) if is_timed else None,
        "reason": reason_text(plan, row),
        "proof": row.proof and row.proof._asdict() | {"parts": _parts_json(row.proof.parts)},
    }


def _parts_json(seconds: Seconds | None) -> dict[str, float] | None:
    return seconds and {name: float(part) for name, part in seconds._asdict().items()}


def slice_lines(costs: Sequence[SliceCost]) -> list[str]:
    cells = [["slice", "chips", "batch", "s a step", "chip-seconds for 10^9 tokens"]]
    for cost in costs:
        name = f"{cost.slices} x {cost.topology}" if cost.slices > 1 else cost.topology
        figures = (f"{cost.seconds:.4g}", f"{cost.chip_seconds:,.0f}")
        cells.append([name, str(cost.chips), str(cost.batch), *figures])
    return columns(cells)


def basis_lines(plan: Plan) -> list[str]:
    """Return what the figures rest on, and what they leave out."""
    machine = plan.request.machine
    proofs = [row.proof for row in [*plan.rows, *plan.misfits] if row.proof]
    if not machine.is_timed:
        lines = [
            "closed forms alone, and no seconds: simulated devices share a machine of unknown "
            "speed. Times are multiples of the fastest row's."
        ]
    elif not proofs:
        hint = ": --compile 3 would prove the best by compiling them"
        lines = [f"closed forms alone{hint * (machine.is_compilable and len(plan.rows) > 0)}"]
    elif any(proof.seconds for proof in proofs):
        lines = ["by compiled: seconds, their parts and GiB are the compiler's"]
        lines.append("by closed: closed forms")
    else:
        # A step that is too large has no estimate of time on any chip.
        no_time = "no compiler's estimate of time for this chip; "
        line = "memory of what was compiled is the compiler's, seconds are closed forms"
        lines = [no_time * any(proof.fits for proof in proofs) + line]
    return [*lines, *_winner_lines(plan), *_omissions(plan)]


def _winner_lines(plan: Plan) -> Iterator[str]:
    """Yield what may be better than the chosen row, and what it asks of the run and this machine.

    Free memory does not limit the search: a plan should not differ from machine to machine.
    """
    machine, written, chosen = plan.request.machine, plan.request.written, plan.winner
    if chosen is None:
        return
    faster = sum(row.proof is None and row.per_sequence < chosen.per_sequence for row in plan.rows)
    if chosen.basis == "compiled" and faster:
        compiled = sum(row.proof is not None for row in plan.rows)
        excess = chosen.per_sequence / chosen.candidate.per_sequence - 1
        yield (
            f"by the compiler the chosen row takes {chosen.seconds:.4g} s, {excess:+.0%} against "
            f"closed forms; rows that were not compiled may be faster: --compile "
            f"{compiled + min(faster, _MORE)} compares them"
        )
    free = math.inf
    with suppress(OSError):  # only Linux has such a file
        free = free_memory()
    if not machine.is_timed and (needed := machine.devices * chosen.memory) > free:
        yield (
            f"warning: the devices share this machine's memory: {machine.devices} x "
            f"{chosen.memory / GIB:.3g} = {needed / GIB:.3g} GiB, and {free / GIB:.3g} are free; a "
            "shorter data.sequence_length, fewer --tokens-per-step or a smaller model need less"
        )
    batch, before = chosen.candidate.batch, written.data.global_batch_size
    if batch != before:
        yield (
            f"{batch} sequences a step are {batch / before:.3g} times the file's {before}, so a "
            f"run of steps={written.steps} reads as much more; steps changes that"
        )


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
    # Compiled steps include what follows.
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
        line = f"none of the {compiled} compiled fits"
        if plan.uncompiled:
            line += f"; {plan.uncompiled} not compiled: --compile {2 * compiled}"
        lines, by = [line], " by closed forms"
    else:
        least, limit = plan.outcome.least, plan.request.limit
        assert least is not None, "where nothing is legal there is no plan to show"
        usable = f", and {limit / GIB:.3g} may be used" if limit else ""
        needed = f"{least.memory / GIB:.3g} GiB a device{usable}"
        what = f"{least.mesh_text()}, {least.schedule_text()}"
        lines, by = [f"nothing fits: by closed forms the least is {needed}: {what}"], ""
    would_fit, vain, unfinished = plan.remedies
    if would_fit:
        lines += [f"what would fit{by}:", *(f"  {remedy}" for remedy in would_fit)]
    others = {"none of these helps by itself": vain}
    others["not tried to the end, for lack of time"] = unfinished
    return lines + [f"{what}: {', '.join(names)}" for what, names in others.items() if names]
