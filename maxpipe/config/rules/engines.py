"""Find keys that are set without effect, and values that the engine refuses.

Each is declared once: with an option (`needs`, `acts_with`; see `sections.fields`), with a variant
of the catalogue (`unused`, `refused`: keys of its section), or with an engine (`reads`, `unused`,
`refusals`). Errors, notes, `--help` and docs/configuration.md are made from that.
"""

from collections.abc import Iterator, Mapping

from maxpipe.config.catalog import ENGINES, KERNELS, REMAT_POLICIES, SCHEDULES, Refusal
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import OPTIONS, get, is_set
from maxpipe.config.rules.rule import Rule, Wrong, check, rules_in
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO, as_written

_REMAT_TENSORS = tuple(key for key in OPTIONS if key.startswith("pipeline.remat_tensors."))
_ENGINE = "pipeline.engine"
CONTEXT_STRATEGY = "sharding.context_strategy"
# Tables of variants by the key that names one; they may say which keys are without effect.
_TABLES: Mapping[str, Mapping[str, object]] = {
    "pipeline.schedule": SCHEDULES,
    **{
        key: option.bounds.variants
        for key, option in OPTIONS.items()
        if option.bounds.variants is not None and key != _ENGINE
    },
}


def idleness(c: Config, key: str, before: Config | None = None) -> tuple[str, str] | None:
    """Return why a key has no effect, whatever its value; None if it has one.

    What the config says `before` values were derived counts, too.

    Returns:
      (reason, refusal): such as "without eval.every"; the refusal is empty if a note is enough.
    """
    engine = ENGINES.get(c.pipeline.engine)
    if engine and not engine.takes(key):
        where = f"on the {c.pipeline.engine} engine"
        return where if engine.has_stages else "without mesh.ici.stage>1", ""
    bounds = OPTIONS[key].bounds
    for needs, is_refused in ((bounds.needs, True), (bounds.acts_with, False)):
        for condition in needs.split(" and ") if needs else ():
            alternatives = condition.split(" or ")
            if not any(_is_met(config, a) for config in (c, before or c) for a in alternatives):
                shown = _shown(condition)
                return f"without {shown}", f"needs {shown}" if is_refused else ""
    for switch, table, able in _tables_of(key):
        named = _sources_for(c, key) if switch == "data.source" else [get(c, switch)]
        if all(fact := _leaves_out(switch, table.get(name), key) for name in named):
            reason = f"with {switch}={', '.join(named)}, only with {', '.join(able)}"
            return reason, f"has no effect {reason}" if fact == "refused" else ""
    return None


def _sources_for(c: Config, key: str) -> list[str]:
    if key == "data.eval_path":  # which is read with data.source, next to a mixture as well
        return [c.data.source]
    is_evaluated = key in ("data.column", "data.stream") and c.data.eval_path
    return [*c.data.sources, *[c.data.source] * bool(is_evaluated)]


def conditions_of(key: str) -> list[str]:
    """Return what leaves a key without effect, for `--help`; engines are not included."""
    bounds = OPTIONS[key].bounds
    conditions = [f"without {_shown(needs)}" for needs in (bounds.needs, bounds.acts_with) if needs]
    for switch, table, able in _tables_of(key):
        idle = [name for name in table if name not in able]
        condition = f"with {switch}={', '.join(idle)}"
        if len(able) < len(idle):
            condition = f"without {switch}={' or '.join(able)}"
        conditions.append(condition)
    return conditions


def idle_notes(c: Config, before: Config | None) -> list[str]:
    """Return a line for each reason why keys that are set have no effect.

    Without the config `before` `resolve`, keys that can be derived are not looked at.
    """
    keys_of: dict[str, list[str]] = {}
    for key, option in OPTIONS.items():
        if option.bounds.derived and before is None:
            continue
        if is_set(before or c, key) and (idle := idleness(c, key, before)):
            keys_of.setdefault(idle[0], []).append(key)
    return [
        f"{', '.join(keys)} {'have' if len(keys) > 1 else 'has'} no effect {reason}"
        for reason, keys in keys_of.items()
    ]


def refusals_of(engine: str, key: str) -> list[Refusal]:
    """Return the values of a key that an engine refuses, offloading policies included."""
    facts = ENGINES[engine]
    refusals = [refusal for refusal in facts.refusals if refusal.key == key]
    if facts.no_offloading:
        elsewhere = ", or pipeline.schedule=circular or 1f1b, whose engines offload"
        refusals += _offloading(key, facts.no_offloading, elsewhere)
    return refusals


def _offloading(key: str, reason: str, elsewhere: str = "") -> list[Refusal]:
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


def _rule_of(key: str) -> Rule:

    def run(c: Config) -> Wrong:
        value = get(c, key)
        written = " ".join(as_written(value).split())
        for refusal in refusals_of(c.pipeline.engine, key) if key in _REFUSABLE else ():
            if value in refusal.values or (not refusal.values and is_set(c, key)):
                message = f"is not for the {c.pipeline.engine} engine: {refusal.reason}"
                yield key, f"{written} {message}; {refusal.remedy}"
                return
        idle = idleness(c, key) if is_set(c, key) else None
        if idle and idle[1]:
            yield key, f"{written} {idle[1]}"

    return check(run)


def _tables_of(key: str) -> Iterator[tuple[str, Mapping[str, object], list[str]]]:
    """Yield keys with variants that leave a key without effect, their tables, and the others."""
    for switch, table in _TABLES.items():
        able = [name for name, entry in table.items() if not _leaves_out(switch, entry, key)]
        if len(able) < len(table):
            yield switch, table, able


def _leaves_out(switch: str, variant: object, key: str) -> str:
    """Return which fact of a variant lists a key or its section; empty if none does."""
    section = switch.rpartition(".")[0]
    for fact in ("refused", "unused"):
        names = getattr(variant, fact, ())
        if any(f"{key}.".startswith(f"{section}.{name}.") for name in names):
            return fact
    return ""


def _is_met(c: Config, alternative: str) -> bool:
    key, _, least = alternative.partition(">")
    if least:
        return bool(get(c, key) > float(least))
    key, _, values = alternative.partition("=")
    value = get(c, key)
    written = "auto" if value == AUTO else as_written(value)
    return written in values.split("|") if values else bool(value)


def _shown(condition: str) -> str:
    return condition.replace("|", " or ")


_REFUSABLE = [key for key in OPTIONS if key.startswith("pipeline.") and key != _ENGINE]
_REFUSABLE.append("compile.load")
EFFECT_RULES = tuple(
    _rule_of(key)
    for key, option in OPTIONS.items()
    if key not in _REFUSABLE and (option.bounds.needs or [*_tables_of(key)])
)


@check
def check_prefetch(c: Config) -> Wrong:
    """Each iteration must gather the weights of its layers, all at once."""
    p, key = c.pipeline, "pipeline.fsdp_prefetch"
    if p.fsdp_prefetch == "true" and ENGINES[p.engine].takes(key):
        if p.gathers_whole:
            yield key, f"true needs pipeline.fsdp_gather=per_iteration, not {p.fsdp_gather}"
        if p.scan_layers_per_stage:
            yield key, "true needs pipeline.scan_layers_per_stage=false; loops gather by layer"


@check
def check_known_split_backwards(c: Config) -> Wrong:
    """Check schedules of the catalogue; a CSV file is checked when it is read."""
    schedule = c.pipeline.schedule
    if schedule in SCHEDULES and SCHEDULES[schedule].splits_backward:
        yield from _split_backwards(c)


@check
def check_unit_times(c: Config) -> Wrong:
    times = c.pipeline.unit_times
    if times in ([], AUTO) or (3 <= len(times) <= 5 and min(times) >= 0 and min(times[:3]) > 0):
        return
    yield (
        "pipeline.unit_times",
        f"{times} must be auto, or times above 0 of a layer's forward, input gradient and weight "
        "gradient, then optionally of a transfer and of the head, such as [1, 1.4, 0.9, 0.1]",
    )


def check_split_backwards(c: Config) -> None:
    """Raise ConfigError if layers are in a loop, which cannot be split, or it would not pay."""
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
    policy = REMAT_POLICIES[p.remat_policy]
    is_all_remat = policy.by_tensor and {get(c, key) for key in _REMAT_TENSORS} == {"remat"}
    if ENGINES[p.engine].lockstep and recomputes and (policy.saves_nothing or is_all_remat):
        yield (
            "pipeline.remat_policy",
            f"{p.remat_policy} keeps no result of a matrix product, which both gradients of "
            f"{p.schedule} would compute again; use minimal, or custom with tensors on the device, "
            "or pipeline.schedule=lockstep_1f1b",
        )


@check
def check_context_strategy(c: Config) -> Wrong:
    is_ring = c.mesh.size("context") > 1 and c.sharding.context_strategy == "ring"
    if is_ring and (obstacle := ring_obstacle(c, c.pipeline.engine)):
        yield CONTEXT_STRATEGY, f"ring does not go with {obstacle}; use gather"


def ring_obstacle(c: Config, engine: str) -> str:
    """Return the key with which keys and values cannot go around a ring; "" if they can."""
    names = ("attention_window", "attention_sinks", "attention_soft_cap")
    kernel = KERNELS.get(c.model.attention)
    # Transfers around a ring, unlike gathers, involve all devices, those of idle stages, too.
    skips = ENGINES[engine].lockstep and c.pipeline.skip_idle == "true"
    found = [f"model.{name}" for name in names if getattr(c.model, name)]
    found += [f"model.attention={c.model.attention}"] * (kernel is not None and not kernel.in_ring)
    return next(iter(found), "pipeline.skip_idle=true" if skips else "")


def check_processes(c: Config, num_processes: int) -> None:
    """Raise ConfigError if a stage with a program of its own were on parts of processes.

    Not a rule, as no key says how many processes there are.
    """
    engine, stages = c.pipeline.engine, c.mesh.ici.stage * c.mesh.dcn.stage
    if engine not in ENGINES or ENGINES[engine].one_program or min(stages, num_processes) < 2:
        return
    if stages % num_processes and num_processes % stages:
        message = f"{stages} stages do not fit {num_processes} processes on the {engine} engine"
        remedy = f"use a multiple or a divisor of {num_processes}, or schedule=lockstep_1f1b"
        raise ConfigError(Problem("mesh.ici.stage", f"{message}; {remedy}"))


def check_offloading(c: Config, devices: str) -> None:
    """Raise ConfigError if tensors are saved in host memory, which these devices cannot access."""
    reason = f"{devices} devices have no memory of the host (pinned_host)"
    problems = [
        Problem(key, f"{refusal.values[0]} cannot run: {refusal.reason}; {refusal.remedy}")
        for key in ("pipeline.remat_policy", *_REMAT_TENSORS)
        for refusal in _offloading(key, reason)
        if get(c, key) in refusal.values
    ]
    if problems:
        raise ConfigError(*problems)


ENGINE_RULES = (*map(_rule_of, _REFUSABLE), *rules_in(globals()))
