"""Show a plan as lines of text, and as JSON."""

import math
import textwrap
from collections.abc import Sequence

from maxpipe.config.catalog import ENGINES
from maxpipe.devices.chips import GIB
from maxpipe.plan.search.best import Plan, SliceCost
from maxpipe.plan.search.candidate import Row, relative_time
from maxpipe.plan.search.seconds import Seconds
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
    """Return the header of the table and its rows, the chosen one first."""
    header = list(HEADER)
    if not plan.request.machine.is_timed:
        header[HEADER.index("seconds")] = "x fastest"
    rows = table_rows(plan)
    return [header, *(_cells(plan, row, number == 0) for number, row in enumerate(rows))]


def table_rows(plan: Plan) -> list[Row]:
    """Return the rows of the table: the best, those that do not fit, the user's own."""
    own = [plan.own] if isinstance(plan.own, Row) else []
    return [*plan.shown, *plan.misfits, *own]


def _cells(plan: Plan, row: Row, is_first: bool) -> list[str]:
    candidate, machine = row.candidate, plan.request.machine
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
        reason = f"{row.name}{'; ' if reason else ''}{reason}"
    elif is_first and plan.rows:
        reason = reason or "chosen"
    return [
        candidate.mesh_text() + batch_text(plan, row),
        candidate.schedule_text(),
        str(candidate.microbatches),
        _repeats(row),
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


def _repeats(row: Row) -> str:
    """Return the repeats of a pipeline, with the layers that run outside it: "5 +6"."""
    candidate, config = row.candidate, row.config
    if not candidate.has_stages:
        return ""
    layers, inside = config.model.stacked_layers, config.pipeline.parallel_layers
    is_outside = ENGINES[candidate.engine].one_program and 0 <= inside < layers
    return f"{candidate.repeats}{f' +{layers - inside}' * is_outside}"


def reason_text(plan: Plan, row: Row) -> str:
    """Return why a row is not chosen, and if it was not compiled although others were."""
    if row.proof is not None or not any(row is other for other in [*plan.rows, *plan.misfits]):
        return row.reason
    if any(ranked.proof for ranked in plan.rows):
        return f"not compiled; by closed forms {row.reason}"
    return row.reason


def batch_text(plan: Plan, row: Row) -> str:
    """Return the batch of a row where rows differ in it; else ""."""
    batches = {*plan.request.batches}
    if isinstance(plan.own, Row):
        batches.add(plan.own.candidate.batch)
    return f" batch={row.candidate.batch}" if len(batches) > 1 else ""


def fastest(plan: Plan) -> float:
    """Return the seconds of a sequence of the fastest row; the user's own counts if it is alone."""
    own = [plan.own] if isinstance(plan.own, Row) else []
    return min(row.per_sequence for row in [*plan.rows, *plan.misfits] or own)


def summary_lines(plan: Plan) -> list[str]:
    """Return what was searched and why candidates are left out."""
    request, outcome = plan.request, plan.outcome
    machine = request.machine
    margin = ""
    if machine.capacity:
        margin = (
            f", {machine.capacity / GIB:.3g} GiB each, of which {request.margin:.0%} stays free"
        )
    fitting = outcome.tried - outcome.fallen.total()
    sequences = ", ".join(map(str, request.batches))
    length = request.config.data.sequence_length
    lines = [
        f"devices     {machine.devices} x {machine.chip.name}{_place(plan)}{margin}",
        f"batch       {sequences} sequence{'s' * (sequences != '1')} of {length} tokens a step",
        f"searched    {outcome.tried:,} candidates in {outcome.priced_seconds:.1f} s, "
        f"{fitting:,} fit",
    ]
    common = outcome.fallen.most_common()
    for reason, count in common[:_REASONS_SHOWN]:
        lines.append(f"            {count:>11,} left out: {reason}")
    if others := sum(count for _, count in common[_REASONS_SHOWN:]):
        lines.append(f"            {others:>11,} left out for other reasons")
    return lines


def _place(plan: Plan) -> str:
    """Return the shape of the slice, since users often name a slice by a number."""
    machine = plan.request.machine
    if machine.chip.torus is None:
        return ""
    return f" ({machine.topology}{f', {machine.slices} slices' * (machine.slices > 1)})"


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
    """Return a table of slices, with what each costs."""
    cells = [["slice", "chips", "batch", "s a step", "chip-seconds for 10^9 tokens"]]
    for cost in costs:
        name = f"{cost.slices} x {cost.topology}" if cost.slices > 1 else cost.topology
        figures = (f"{cost.seconds:.4g}", f"{cost.chip_seconds:,.0f}")
        cells.append([name, str(cost.chips), str(cost.batch), *figures])
    return columns(cells)
