"""Options that an engine does not have, or that have nothing to act on, are refused with the reason."""

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.schema import OPTIONS, get
from maxpipe.config.sections import Config
from maxpipe.config.steps import step

# Schedules of the MPMD engine with units for input and weight gradients.
SPLIT_BACKWARD = ("zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v")

_REMAT_TENSORS = tuple(key for key in OPTIONS if key.startswith("pipeline.remat_tensors."))


@step("pipeline.engine", "pipeline.overlap_slots", "pipeline.skip_idle")
def scheduled_only(c: Config) -> None:
    """The circular engine has one slot per tick and computes the idle ones; the MPMD engine has no slots."""
    asked = {"overlap_slots": c.pipeline.overlap_slots, "skip_idle": c.pipeline.skip_idle == "true"}
    if c.pipeline.engine in ("circular", "mpmd") and any(asked.values()):
        message = "true is for the scheduled engine only; use it with pipeline.schedule=lockstep_1f1b"
        raise ConfigError(*(Problem(f"pipeline.{name}", message) for name, on in asked.items() if on))


@step("pipeline.remat_policy", "pipeline.remat_tensors", "pipeline.remat_layers")
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


@step("pipeline.engine", "pipeline.remat_policy", "pipeline.remat_tensors")
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
    if policy.endswith("_offloaded"):
        near = {"minimal_offloaded": "minimal", "qkv_proj_offloaded": "save_qkv_proj"}[policy]
        message = f"{policy} is not for {engine}: {reason}; use {near}"
        raise ConfigError(Problem("pipeline.remat_policy", message))
    offloaded = [key for key in _REMAT_TENSORS if get(c, key) == "offload"]
    if offloaded:
        message = f"offload is not for {engine}: {reason}; use device or remat"
        raise ConfigError(*(Problem(key, message) for key in offloaded))


@step("pipeline.engine", "pipeline.fsdp_gather")
def gathers_of_units(c: Config) -> None:
    """A unit of the MPMD engine keeps nothing for the next one of its chunk."""
    if c.pipeline.engine == "mpmd" and c.pipeline.fsdp_gather != "per_iteration":
        message = f"{c.pipeline.fsdp_gather} is not for the mpmd engine: every unit is a program that gathers anew"
        raise ConfigError(Problem("pipeline.fsdp_gather", f"{message}; use per_iteration"))


@step("pipeline.engine", "pipeline.fsdp_gather", "pipeline.num_repeats")
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


@step("pipeline.engine", "pipeline.scan_iterations", "pipeline.scan_repeats", "pipeline.fsdp_gather")
def loops(c: Config) -> None:
    """The scheduled engine loops over phases of its schedule; repeats are a loop where each is fetched as a whole."""
    p = c.pipeline
    problems = []
    if p.engine in ("scheduled", "mpmd"):
        why = {"scheduled": "always loops over the ticks of a phase", "mpmd": "dispatches units one by one"}[p.engine]
        message = f"false is for the circular engine only; the {p.engine} engine {why}"
        names = [name for name in ("scan_iterations", "scan_repeats") if not getattr(p, name)]
        problems = [Problem(f"pipeline.{name}", message) for name in names]
    elif p.engine == "circular" and not p.scan_repeats and p.fsdp_gather == "per_iteration":
        message = "false needs pipeline.fsdp_gather=per_repeat or once; with per_iteration all repeats are one loop"
        problems = [Problem("pipeline.scan_repeats", f"{message}, which scan_iterations=false unrolls")]
    if problems:
        raise ConfigError(*problems)


@step(
    "pipeline.engine", "pipeline.schedule", "pipeline.scan_layers_per_stage", "pipeline.delay_activation_forwarding",
    "compile.load",
)  # fmt: skip
def separate_programs(c: Config) -> None:
    """The MPMD engine splits a backward equation by equation, and its transfers run when there is something to move."""
    p = c.pipeline
    problems = []
    if p.engine == "mpmd" and p.scan_layers_per_stage and p.schedule in SPLIT_BACKWARD:
        problems.append(looped_layers(p.schedule))
    if p.engine == "mpmd" and p.delay_activation_forwarding:
        message = "true is for engines with ticks; transfers of the mpmd engine run beside the units anyway; use false"
        problems.append(Problem("pipeline.delay_activation_forwarding", message))
    if p.engine == "mpmd" and c.compile.load:
        message = "holds one program for all devices, and the mpmd engine has many; leave it empty"
        problems.append(Problem("compile.load", message))
    if problems:
        raise ConfigError(*problems)


def looped_layers(schedule: str) -> Problem:
    """That a schedule splits backwards and layers are in a loop; what a CSV file has is known when it is read."""
    message = f"true hides the layers in a loop, whose backward {schedule} cannot split; use false"
    return Problem("pipeline.scan_layers_per_stage", message)


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
        raise ConfigError(Problem("pipeline.engine", f"{message}; {remedy} (`{compare}` shows both bubbles)"))


STEPS = (scheduled_only, remat, offloading, gathers_of_units, gathers, loops, separate_programs)
