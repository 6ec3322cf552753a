"""Say in lines what the seconds of a plan leave out, and what makes them long."""

from maxpipe.model.kernels.choose import EVERYWHERE, choose_kernel
from maxpipe.pipeline.chunk import offloaded_names
from maxpipe.plan.search.best import Plan
from maxpipe.plan.search.candidate import Row
from maxpipe.plan.search.machine import platform_of


def omission_lines(plan: Plan) -> list[str]:
    """Return the lines that apply to a plan."""
    of_plan = [*_kernel_lines(plan), *_network_lines(plan), *_host_lines(plan)]
    return [*of_plan, *_closed_form_lines(plan)]


def _kernel_lines(plan: Plan) -> list[str]:
    """Return why the chosen row's attention holds all scores in memory, if it does."""
    if plan.winner is None:
        return []
    config = plan.winner.config
    lines: list[str] = []
    kernel = choose_kernel(config, platform_of(config), lines.append)
    if kernel != EVERYWHERE:
        return []
    reason = "".join(lines) or f"model.attention={kernel}"
    return [f"attention holds all scores, which takes memory and time: {reason}"]


def _network_lines(plan: Plan) -> list[str]:
    machine = plan.request.machine
    if machine.slices == 1 or machine.chip.dcn_bandwidth is not None:
        return []
    return [
        f"transfers between slices are priced as fast as one link within a slice, since the "
        f"network of {machine.chip.name} is unknown: they take longer"
    ]


def _host_lines(plan: Plan) -> list[str]:
    own = [plan.own] if isinstance(plan.own, Row) else []
    shown = [*plan.shown, *plan.misfits, *own]
    if not any(offloaded_names(row.config.pipeline) for row in shown):
        return []
    return ["transfers to the host's memory are not in these seconds"]


def _closed_form_lines(plan: Plan) -> list[str]:
    """Return what closed forms do not price; a compiled step of one program includes it."""
    config, lines = plan.request.config, []
    if config.optimizer.name == "muon":
        lines.append("closed forms leave out the products of Muon's update: a step takes longer")
    if (kind := config.model.quantisation) != "none":
        lines.append(
            f"closed forms price products in {kind} (model.quantisation) as those in "
            f"{config.model.dtype}: a step may be shorter"
        )
    return lines
