"""Options that an engine does not have, or that have nothing to act on, are refused with the reason."""

from maxpipe.config.catalog import REMAT_POLICIES, SCHEDULES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import OPTIONS, get
from maxpipe.config.rules.rule import rule
from maxpipe.config.sections import Config

_REMAT_TENSORS = tuple(key for key in OPTIONS if key.startswith("pipeline.remat_tensors."))


@rule("pipeline.engine", "pipeline.overlap_slots", "pipeline.skip_idle")
def scheduled_only(c: Config) -> None:
    """The circular engine has one slot per tick and computes the idle ones; the MPMD engine has no slots."""
    asked = {"overlap_slots": c.pipeline.overlap_slots, "skip_idle": c.pipeline.skip_idle == "true"}
    if c.pipeline.engine in ("circular", "mpmd") and any(asked.values()):
        message = (
            "true is for the scheduled engine only; use it with pipeline.schedule=lockstep_1f1b"
        )
        raise ConfigError(
            *(Problem(f"pipeline.{name}", message) for name, on in asked.items() if on)
        )


@rule("pipeline.remat_policy", "pipeline.remat_tensors", "pipeline.remat_layers")
def remat(c: Config) -> None:
    """`remat_tensors` belong to one policy, and where nothing is recomputed there is nothing to choose."""
    policy = c.pipeline.remat_policy
    changed = [key for key in _REMAT_TENSORS if get(c, key) != OPTIONS[key].default]
    if changed and policy != "custom":
        message = f"needs pipeline.remat_policy=custom; {policy} decides about every tensor itself"
        raise ConfigError(*(Problem(key, message) for key in changed))
    if policy == "none" and c.pipeline.remat_layers:
        message = "true has nothing to recompute with pipeline.remat_policy=none; choose full or another policy"
        raise ConfigError(Problem("pipeline.remat_layers", message))


@rule("pipeline.engine", "pipeline.remat_policy", "pipeline.remat_tensors")
def offloading(c: Config) -> None:
    """The scheduled engine's residuals live in ring buffers that its loops update in place on the device."""
    reasons = {
        "scheduled": "it updates its residuals in place on the device, where they do not grow with the number of "
        "microbatches",
        "mpmd": "its residuals pass from one program to another on the device",
    }
    if c.pipeline.engine not in reasons:
        return
    policy, engine = c.pipeline.remat_policy, f"the {c.pipeline.engine} engine"
    reason = reasons[c.pipeline.engine]
    facts = REMAT_POLICIES[policy]
    if facts.host:
        instead = facts.on_device or "a policy that saves on the device, such as minimal"
        message = f"{policy} is not for {engine}: {reason}; use {instead}"
        raise ConfigError(Problem("pipeline.remat_policy", message))
    offloaded = [key for key in _REMAT_TENSORS if get(c, key) == "offload"]
    if offloaded:
        message = f"offload is not for {engine}: {reason}; use device or remat"
        raise ConfigError(*(Problem(key, message) for key in offloaded))


@rule("pipeline.engine", "pipeline.fsdp_gather")
def gathers_of_units(c: Config) -> None:
    """A unit of the MPMD engine keeps nothing for the next one of its chunk."""
    if c.pipeline.engine == "mpmd" and c.pipeline.fsdp_gather != "per_iteration":
        message = f"{c.pipeline.fsdp_gather} is not for the mpmd engine: every unit is a program that gathers anew"
        raise ConfigError(Problem("pipeline.fsdp_gather", f"{message}; use per_iteration"))


@rule("pipeline.engine", "pipeline.fsdp_gather", "pipeline.num_repeats")
def gathers(c: Config) -> None:
    """Forward and backward of a 1F1B tick are in different repeats, each with its own gathered weights."""
    if c.pipeline.engine != "scheduled" or c.pipeline.fsdp_gather != "per_repeat":
        return
    repeats = c.pipeline.num_repeats
    reason = f"and all {repeats} repeats are no more; use once"
    if repeats > 4:
        reason = "and fetching them ahead is not there yet; use per_iteration, or once if all repeats fit"
    needs = "per_repeat on the scheduled engine would keep 4 to 6 gathered repeats"
    message = f"{needs}, {reason}, or the circular engine"
    raise ConfigError(Problem("pipeline.fsdp_gather", message))


@rule(
    "pipeline.engine", "pipeline.scan_iterations", "pipeline.scan_repeats", "pipeline.fsdp_gather"
)
def loops(c: Config) -> None:
    """The scheduled engine loops over phases of its schedule; repeats are a loop where each is fetched as a whole."""
    p = c.pipeline
    problems = []
    if p.engine in ("scheduled", "mpmd"):
        why = {
            "scheduled": "always loops over the ticks of a phase",
            "mpmd": "dispatches units one by one",
        }[p.engine]
        message = f"false is for the circular engine only; the {p.engine} engine {why}"
        names = [name for name in ("scan_iterations", "scan_repeats") if not getattr(p, name)]
        problems = [Problem(f"pipeline.{name}", message) for name in names]
    elif p.engine == "circular" and not p.scan_repeats and p.fsdp_gather == "per_iteration":
        message = "false needs pipeline.fsdp_gather=per_repeat or once; with per_iteration all repeats are one loop"
        problems = [
            Problem("pipeline.scan_repeats", f"{message}, which scan_iterations=false unrolls")
        ]
    if problems:
        raise ConfigError(*problems)


@rule("pipeline.engine", "pipeline.delay_activation_forwarding", "compile.load")
def separate_programs(c: Config) -> None:
    """Transfers of the MPMD engine run when there is something to move, and there is no program of the whole step."""
    p = c.pipeline
    problems = []
    if p.engine == "mpmd" and p.delay_activation_forwarding:
        message = "true is for engines with ticks; transfers of the mpmd engine run beside the units anyway; use false"
        problems.append(Problem("pipeline.delay_activation_forwarding", message))
    if p.engine == "mpmd" and c.compile.load:
        message = "holds one program for all devices, and the mpmd engine has many; leave it empty"
        problems.append(Problem("compile.load", message))
    if problems:
        raise ConfigError(*problems)


@rule(
    "pipeline.engine",
    "pipeline.schedule",
    "pipeline.scan_layers_per_stage",
    "pipeline.remat_policy",
    "pipeline.remat_tensors",
    "pipeline.remat_iterations",
    "pipeline.remat_layers",
)
def split_backwards(c: Config) -> None:
    """Schedules known by name; what a CSV file has is known when it is read."""
    schedule = c.pipeline.schedule
    if schedule in SCHEDULES and SCHEDULES[schedule].splits_backward:
        check_split_backwards(c)


def check_split_backwards(c: Config) -> None:
    """A backward is split equation by equation, and in lockstep a split that computes more is of no use.

    Args:
      c: with a schedule that has units for input and weight gradients, and `pipeline.engine`
        derived.

    Raises:
      ConfigError: layers are in a loop, or matrix products would be computed twice.
    """
    p = c.pipeline
    problems = []
    if p.scan_layers_per_stage and p.engine in ("mpmd", "scheduled"):
        message = (
            f"true hides the layers in a loop, whose backward {p.schedule} cannot split; use false"
        )
        problems.append(Problem("pipeline.scan_layers_per_stage", message))
    keeps_nothing = p.remat_policy == "full" or (
        p.remat_policy == "custom" and all(get(c, key) == "remat" for key in _REMAT_TENSORS)
    )
    if p.engine == "scheduled" and keeps_nothing and (p.remat_iterations or p.remat_layers):
        message = (
            f"{p.remat_policy} keeps no result of a matrix product; input gradients would compute them all again and "
            f"stash them for {p.schedule}'s weight gradients, in more time and memory than the split saves"
        )
        remedy = "use minimal, save_out_proj, save_qkv_proj, save_dot_except_mlp, none or custom"
        if p.remat_policy == "custom":
            remedy = "give some pipeline.remat_tensors device"
        problems.append(
            Problem(
                "pipeline.remat_policy", f"{message}; {remedy}, or pipeline.schedule=lockstep_1f1b"
            )
        )
    if problems:
        raise ConfigError(*problems)


def one_process(c: Config, num_processes: int) -> None:
    """The MPMD engine's driver dispatches to all devices; no step, since processes are not configured.

    Args:
      c: with `pipeline.engine` derived.
      num_processes: that take part.

    Raises:
      ConfigError: there are several for the MPMD engine.
    """
    if c.pipeline.engine == "mpmd" and num_processes > 1:
        message = f"mpmd drives all devices from one process, and there are {num_processes}"
        remedy = "start one, or use pipeline.schedule=lockstep_1f1b with engine=auto"
        compare = f"python -m maxpipe.schedule --compare {c.pipeline.schedule} lockstep_1f1b"
        raise ConfigError(
            Problem("pipeline.engine", f"{message}; {remedy} (`{compare}` shows both bubbles)")
        )


RULES = (
    scheduled_only,
    remat,
    offloading,
    gathers_of_units,
    gathers,
    loops,
    split_backwards,
    separate_programs,
)
