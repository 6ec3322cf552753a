"""Check options of the engine against each other, and against processes and devices."""

from maxpipe.config.catalog import ENGINES, REMAT_POLICIES, SCHEDULES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import get
from maxpipe.config.rules.effects import REFUSAL_RULES, REMAT_TENSORS, offloading
from maxpipe.config.rules.rule import Wrong, check, rules_in
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO


@check
def check_prefetch(c: Config) -> Wrong:
    """Check that each iteration gathers the weights of its layers, all at once."""
    p, key = c.pipeline, "pipeline.fsdp_prefetch"
    if p.fsdp_prefetch != "true" or not ENGINES[p.engine].takes(key):
        return
    if p.gathers_whole:
        reason = f"with {p.fsdp_gather} weights are gathered before all iterations"
        yield key, f"true needs pipeline.fsdp_gather=per_iteration; {reason}"
    if p.scan_layers_per_stage:
        yield key, "true needs pipeline.scan_layers_per_stage=false; a loop gathers layer by layer"


@check
def check_known_split_backwards(c: Config) -> Wrong:
    """Check schedules of the catalogue; a CSV file is checked when it is read."""
    schedule = c.pipeline.schedule
    if schedule in SCHEDULES and SCHEDULES[schedule].splits_backward:
        yield from _split_backwards(c)


@check
def check_unit_times(c: Config) -> Wrong:
    """Check that there are times of F, I and W, and optionally of a transfer and of the head."""
    times = c.pipeline.unit_times
    if times in ([], AUTO) or (3 <= len(times) <= 5 and min(times) >= 0 and min(times[:3]) > 0):
        return
    yield (
        "pipeline.unit_times",
        f"{times} must be the times of a layer's forward, input gradient and weight gradient, "
        "greater than 0, and then, where there are any, of a transfer and of the head; "
        "such as [1, 1.4, 0.9, 0.1], or auto",
    )


def check_split_backwards(c: Config) -> None:
    """Check that the backward of a layer can be split, and that splitting it saves work.

    Args:
      c: a config whose schedule has units for input and weight gradients, with `pipeline.engine`
        derived.

    Raises:
      ConfigError: layers are in a loop, which cannot be split equation by equation, or matrix
        products would be computed twice.
    """
    if problems := [Problem(*wrong) for wrong in _split_backwards(c)]:
        raise ConfigError(*problems)


def _split_backwards(c: Config) -> Wrong:
    p = c.pipeline
    if p.scan_layers_per_stage and ENGINES[p.engine].has_stages:
        reason = f"true hides the layers in a loop, whose backward {p.schedule} cannot split"
        yield "pipeline.scan_layers_per_stage", f"{reason}; use false"
    # Recomputing in both halves costs the mpmd engine time, which it may gain in the bubble; in
    # lockstep it only costs.
    recomputes = p.remat_iterations or p.remat_layers
    if ENGINES[p.engine].lockstep and recomputes and _saves_nothing(c):
        yield (
            "pipeline.remat_policy",
            f"{p.remat_policy} keeps no result of a matrix product, which does not pay with "
            f"{p.schedule}: both gradients would compute them all again; {_propose_policies(c)}, "
            "or pipeline.schedule=lockstep_1f1b",
        )


def _saves_nothing(c: Config) -> bool:
    """Return whether the backward of a layer starts from nothing but the layer's input."""
    policy = REMAT_POLICIES[c.pipeline.remat_policy]
    tensors = [get(c, key) for key in REMAT_TENSORS]
    return policy.saves_nothing or (policy.by_tensor and set(tensors) == {"remat"})


def _propose_policies(c: Config) -> str:
    if REMAT_POLICIES[c.pipeline.remat_policy].by_tensor:
        return "give some pipeline.remat_tensors device"
    saving = [name for name, policy in REMAT_POLICIES.items() if policy.device or policy.everything]
    return f"use {', '.join(saving)} or custom"


def check_processes(c: Config, num_processes: int) -> None:
    """Check that stages can be whole processes; not a rule, as no key says how many there are.

    Args:
      c: the config, with `pipeline.engine` derived.
      num_processes: number of processes that take part.

    Raises:
      ConfigError: the engine has a program per stage, and a process would have a part of a stage.
    """
    engine, stages = c.pipeline.engine, c.mesh.ici.stage * c.mesh.dcn.stage
    if engine not in ENGINES or ENGINES[engine].one_program or min(stages, num_processes) < 2:
        return
    if stages % num_processes and num_processes % stages:
        message = (
            f"{stages} stages do not fit {num_processes} processes: on the {engine} engine each "
            "process has whole stages, or each stage whole processes; use a multiple or a divisor "
            f"of {num_processes}, or pipeline.schedule=lockstep_1f1b with engine=auto"
        )
        raise ConfigError(Problem("mesh.ici.stage", message))


def check_offloading(c: Config, devices: str) -> None:
    """Refuse to save tensors in the host's memory; not a rule, as no key says what devices are.

    Args:
      c: the config to check.
      devices: the kind of the devices, which cannot access the host's memory.

    Raises:
      ConfigError: a tensor would be saved there.
    """
    reason = f"{devices} devices have no memory of the host (pinned_host)"
    problems = [
        Problem(key, f"{refusal.values[0]} cannot run: {refusal.reason}; {refusal.remedy}")
        for key in ("pipeline.remat_policy", *REMAT_TENSORS)
        for refusal in offloading(key, reason)
        if get(c, key) in refusal.values
    ]
    if problems:
        raise ConfigError(*problems)


ENGINE_RULES = (*REFUSAL_RULES, *rules_in(globals()))
