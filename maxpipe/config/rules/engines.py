"""Refuse options that an engine lacks or that have nothing to act on, and give the reason."""

from maxpipe.config.catalog import ENGINES, REMAT_POLICIES, SCHEDULES, Refusal
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import OPTIONS, get, is_set
from maxpipe.config.rules.rule import Rule, rule
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO, as_written

_REMAT_TENSORS = tuple(key for key in OPTIONS if key.startswith("pipeline.remat_tensors."))


def refusals_of(engine: str, key: str) -> list[Refusal]:
    """Return the values of a key that an engine refuses, offloading policies included."""
    facts = ENGINES[engine]
    refusals = [refusal for refusal in facts.refusals if refusal.key == key]
    if facts.no_offloading:
        elsewhere = ", or pipeline.schedule=circular or 1f1b, whose engines offload"
        refusals += _offloading(key, facts.no_offloading, elsewhere)
    return refusals


def _offloading(key: str, reason: str, elsewhere: str = "") -> list[Refusal]:
    """Return refusals of the values of a key that save tensors in the host's memory.

    Args:
      key: full key of an option.
      reason: the reason that the refusals give.
      elsewhere: remedies other than saving on the device, as a text to append.
    """
    if key in _REMAT_TENSORS:
        return [Refusal(key, ("offload",), reason, f"use device or remat{elsewhere}")]
    if key != "pipeline.remat_policy":
        return []
    any_other = "a policy that saves on the device, such as minimal"
    return [
        Refusal(key, (name,), reason, f"use {policy.on_device or any_other}{elsewhere}")
        for name, policy in REMAT_POLICIES.items()
        if policy.host
    ]


def _refuse_values(key: str) -> Rule:
    """Return the rule that refuses the values of a key that the engine does not take.

    Each key has a rule of its own, so that a broken key leaves the others' refusals in place.
    """

    @rule("pipeline.engine", key)
    def refuse(c: Config) -> None:
        value = get(c, key)
        for refusal in refusals_of(c.pipeline.engine, key):
            if value in refusal.values or (not refusal.values and is_set(c, key)):
                message = (
                    f"{as_written(value)} is not for the {c.pipeline.engine} engine: "
                    f"{refusal.reason}; {refusal.remedy}"
                )
                raise ConfigError(Problem(key, message))

    return refuse


@rule("pipeline.remat_policy", "pipeline.remat_tensors", "pipeline.remat_layers")
def check_remat(c: Config) -> None:
    """Check `remat_tensors` and `remat_layers` against the policy."""
    name = c.pipeline.remat_policy
    policy = REMAT_POLICIES[name]
    problems = []
    changed = [key for key in _REMAT_TENSORS if is_set(c, key)]
    if changed and not policy.by_tensor:
        message = f"needs pipeline.remat_policy=custom; {name} decides about every tensor itself"
        problems += [Problem(key, message) for key in changed]
    if policy.everything and c.pipeline.remat_layers:
        message = (
            f"true has nothing to recompute with pipeline.remat_policy={name}; "
            "choose full or another policy"
        )
        problems.append(Problem("pipeline.remat_layers", message))
    if problems:
        raise ConfigError(*problems)


@rule("pipeline.engine", "pipeline.scan_repeats", "pipeline.fsdp_gather")
def check_scan_repeats(c: Config) -> None:
    """Check that repeats have loops: with gathers per iteration all repeats are one loop."""
    p = c.pipeline
    has_loops = ENGINES[p.engine].takes("pipeline.scan_repeats")
    if has_loops and not p.scan_repeats and not p.gathers_whole:
        message = (
            "false needs pipeline.fsdp_gather=per_repeat or once; with per_iteration "
            "all repeats are one loop, which scan_iterations=false unrolls"
        )
        raise ConfigError(Problem("pipeline.scan_repeats", message))


@rule(
    "pipeline.engine",
    "pipeline.fsdp_prefetch",
    "pipeline.fsdp_gather",
    "pipeline.scan_layers_per_stage",
)
def check_prefetch(c: Config) -> None:
    """Check that each iteration gathers the weights of its layers, all at once."""
    p = c.pipeline
    if not ENGINES[p.engine].takes("pipeline.fsdp_prefetch") or p.fsdp_prefetch != "true":
        return
    problems = []
    if p.gathers_whole:
        message = (
            f"true needs pipeline.fsdp_gather=per_iteration; with {p.fsdp_gather} weights are "
            "gathered before all iterations"
        )
        problems.append(Problem("pipeline.fsdp_prefetch", message))
    if p.scan_layers_per_stage:
        message = "true needs pipeline.scan_layers_per_stage=false; a loop gathers layer by layer"
        problems.append(Problem("pipeline.fsdp_prefetch", message))
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
def check_known_split_backwards(c: Config) -> None:
    """Check schedules of the catalogue; a CSV file is checked when it is read."""
    schedule = c.pipeline.schedule
    if schedule in SCHEDULES and SCHEDULES[schedule].splits_backward:
        check_split_backwards(c)


@rule("pipeline.unit_times")
def check_unit_times(c: Config) -> None:
    """Check that there are times of F, I and W, and optionally of a transfer and of the head."""
    times = c.pipeline.unit_times
    if times in ([], AUTO) or (3 <= len(times) <= 5 and min(times) >= 0 and min(times[:3]) > 0):
        return
    message = (
        f"{times} must be the times of a layer's forward, input gradient and weight gradient, "
        "greater than 0, and then, where there are any, of a transfer and of the head; "
        "such as [1, 1.4, 0.9, 0.1], or auto"
    )
    raise ConfigError(Problem("pipeline.unit_times", message))


def check_split_backwards(c: Config) -> None:
    """Check that the backward of a layer can be split, and that splitting it saves work.

    Args:
      c: a config whose schedule has units for input and weight gradients, with `pipeline.engine`
        derived.

    Raises:
      ConfigError: layers are in a loop, which cannot be split equation by equation, or matrix
        products would be computed twice.
    """
    p = c.pipeline
    problems = []
    if p.scan_layers_per_stage and ENGINES[p.engine].has_stages:
        message = (
            f"true hides the layers in a loop, whose backward {p.schedule} cannot split; use false"
        )
        problems.append(Problem("pipeline.scan_layers_per_stage", message))
    # Recomputing in both halves costs the mpmd engine time, which it may gain in the bubble; in
    # lockstep it only costs.
    recomputes = p.remat_iterations or p.remat_layers
    if ENGINES[p.engine].lockstep and recomputes and _saves_nothing(c):
        message = (
            f"{p.remat_policy} keeps no result of a matrix product, which does not pay with "
            f"{p.schedule}; input gradients would compute them all again and stash them for weight "
            f"gradients, in more time and memory than the split saves; {_propose_policies(c)}, "
            "or pipeline.schedule=lockstep_1f1b"
        )
        problems.append(Problem("pipeline.remat_policy", message))
    if problems:
        raise ConfigError(*problems)


def _saves_nothing(c: Config) -> bool:
    """Return whether the backward of a layer starts from nothing but the layer's input."""
    policy = REMAT_POLICIES[c.pipeline.remat_policy]
    tensors = [get(c, key) for key in _REMAT_TENSORS]
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
        for key in ("pipeline.remat_policy", *_REMAT_TENSORS)
        for refusal in _offloading(key, reason)
        if get(c, key) in refusal.values
    ]
    if problems:
        raise ConfigError(*problems)


_REFUSABLE = (*(key for key in OPTIONS if key.startswith("pipeline.")), "compile.load")
ENGINE_RULES = (
    *(_refuse_values(key) for key in _REFUSABLE if key != "pipeline.engine"),
    check_remat,
    check_scan_repeats,
    check_prefetch,
    check_known_split_backwards,
    check_unit_times,
)
