"""Print a config as YAML, plain or with the sources of values; explain automatic decisions."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

import yaml

from maxpipe.config.catalog import ENGINES, LR_SCHEDULES, OPTIMIZERS, SCHEDULES
from maxpipe.config.files import COMMAND_LINE
from maxpipe.config.identity import differing_keys
from maxpipe.config.load import Loaded, derive_known
from maxpipe.config.options import OPTIONS, get, is_set
from maxpipe.config.rules.batches import data_shards, least_microbatches
from maxpipe.config.rules.stages import num_stages
from maxpipe.config.sections import Config
from maxpipe.config.sections.parallelism import DEFAULT_RULES
from maxpipe.config.values import AUTO, as_written, nearest, number

DERIVED = "  # derived"  # ends a line of config.yml
_SOURCE_COLUMN = 44
_PIPELINE_KEYS = tuple(key for key in OPTIONS if key.startswith("pipeline."))
_REASONS = {
    "model.head_dim": "model.embed_dim / model.num_query_heads",
    "data.tokenizer": "data.source=synthetic needs no text, only ids that the model has",
    "optimizer.decay_steps": "steps",
    "optimizer.warmup_steps": "a twentieth of optimizer.decay_steps",
    "eval.global_batch_size": "data.global_batch_size",
    "eval.batches_per_source": "eval.batches over the sources of data.mixture",
}


def unused_keys() -> dict[tuple[str, str | int], tuple[str, ...]]:
    """Return, for a key and a value of it, the keys that have no effect with that value."""
    unused: dict[tuple[str, str | int], tuple[str, ...]] = {
        ("optimizer.spike_window", 0): ("optimizer.spike_deviations",),
        ("eval.every", 0): ("eval.batches", "eval.batches_per_source", "eval.prompts"),
        ("model.qk_norm", False): ("model.qk_norm_scope",),
        ("model.attention_window", 0): ("model.rope_theta_local",),
    }
    for name, optimizer in OPTIMIZERS.items():
        unused["optimizer.name", name] = tuple(f"optimizer.{key}" for key in optimizer.unused)
    for name, schedule in LR_SCHEDULES.items():
        unused["optimizer.schedule", name] = tuple(f"optimizer.{key}" for key in schedule.unused)
    return unused


def to_yaml(
    config: Config, keys: Collection[str] = OPTIONS.keys(), derived: Collection[str] = ()
) -> str:
    """Return YAML text that `load` reads back to an equal config, if other `keys` have defaults.

    A comment marks the keys that were `derived`.
    """
    lines = _lines(config, keys)
    return "".join(f"{line}{DERIVED if key in derived else ''}\n" for line, key in lines)


def _differences(config: Config) -> str:
    """Return the keys that differ from their defaults, as YAML."""
    return to_yaml(config, [key for key in OPTIONS if is_set(config, key)]) or "Config()"


# What a notebook shows. `Config` itself cannot know YAML, which is written from all of its keys.
Config.__repr__ = _differences  # type: ignore[method-assign,assignment]


def print_config(loaded: Loaded) -> str:
    """Return YAML text with the source of every value as a comment, and known derived values."""
    known = derive_known(loaded.config)
    text = []
    for line, key in _lines(known):
        if key is None:
            text.append(line)
            continue
        source = loaded.sources[key]
        if key == "steps" and known.epochs:
            source = "derived from epochs when training starts"
        elif get(known, key) != get(loaded.config, key):
            source = "derived"
        elif OPTIONS[key].bounds.derived and get(known, key) in (-1, AUTO):
            source += "; derived at start"
        text.append(f"{line:<{_SOURCE_COLUMN}}  # {source}")
    return "\n".join(text) + "\n"


def notes(
    resolved: Config, loaded: Loaded | Config | None = None, *, verbose: bool = True
) -> list[str]:
    """Return automatic decisions and keys without effect, one line each with the reason.

    Args:
      resolved: the config, from `resolve`.
      loaded: the config before `resolve`; without it neither derived values nor unused pipeline
        options are listed.
      verbose: whether to list values, too, that are derived as the help of their keys says.
    """
    before = loaded.config if isinstance(loaded, Loaded) else loaded
    lines = []
    if before is not None:
        changed = differing_keys(resolved, before)
        lines = [
            f"{key}={get(resolved, key)}: {reason}"
            for key in changed
            if (verbose or not OPTIONS[key].bounds.derived) and (reason := _reason(resolved, key))
        ]
        lines += _unused_options(before, resolved)
    remarks = loaded.remarks if isinstance(loaded, Loaded) else ()
    lines = [*remarks, *lines, *_outside(resolved), *_without_effect(resolved, before or resolved)]
    if isinstance(loaded, Loaded) and loaded.sources["compile.topology"] == COMMAND_LINE:
        lines.append("compile.topology: for maxpipe.compile only; a run uses the devices there are")
    return lines


def _unused_options(before: Config, resolved: Config) -> list[str]:
    """Return a line for options of `pipeline.*` that the engine does not read."""
    name = resolved.pipeline.engine
    engine = ENGINES[name]
    unused = [
        f"{key}={_shown(key, get(before, key))}"
        for key in _PIPELINE_KEYS
        if is_set(before, key) and not engine.takes(key)
    ]
    lines = []
    if unused:
        reason = f" on the {name} engine"
        if not engine.has_stages:
            reason = ": there is one stage; mesh.ici.stage=2 or more makes a pipeline"
        verb = "has" if len(unused) == 1 else "have"
        lines.append(f"{', '.join(unused)} {verb} no effect{reason}")
    if (
        before.pipeline.memory_limit_gib
        and engine.takes("pipeline.memory_limit_gib")
        and before.pipeline.layers_per_stage != AUTO
    ):
        lines.append(
            "pipeline.memory_limit_gib has no effect without pipeline.layers_per_stage=auto"
        )
    schedule = resolved.pipeline.schedule
    if (
        before.pipeline.unit_times
        and engine.takes("pipeline.unit_times")
        and not (schedule in SCHEDULES and SCHEDULES[schedule].timed)
    ):
        timed = " and ".join(name for name, facts in SCHEDULES.items() if facts.timed)
        lines.append(
            f"pipeline.unit_times has no effect with pipeline.schedule={schedule}; "
            f"the orders of {timed} follow it"
        )
    return lines


def _outside(c: Config) -> list[str]:
    """Return a line for each kind of layer that runs outside the pipeline."""
    engine, place = ENGINES[c.pipeline.engine], c.pipeline.outside_layers
    outside = c.model.stacked_layers - c.pipeline.parallel_layers
    if not engine.has_stages:
        return []
    lines = []
    if first := c.model.first_dense_layers:
        lines = [f"model.first_dense_layers={first}: they run with the embedding"]
    if not outside:
        return lines
    how = "the stages as data parallelism"
    if not engine.one_program:
        how = f"the {'first' if place == 'before' else 'last'} chunk, on its stage alone"
    line = (
        f"pipeline.parallel_layers={c.pipeline.parallel_layers}: "
        f"{outside} of {c.model.stacked_layers} layers run {place} the pipeline, with {how}"
    )
    rows = c.data.global_batch_size // (c.pipeline.num_microbatches * data_shards(c))
    if engine.lockstep and rows % num_stages(c):
        line += (
            f"; a microbatch has {rows} row{'s' * (rows > 1)} on a device, which "
            f"{num_stages(c)} stages do not divide, so some compute padding"
        )
    return [*lines, line]


def _reason(c: Config, key: str) -> str:
    """Return why a derived key has its value; empty if that needs no words."""
    if key.startswith("mesh."):
        return "the devices that the other axes leave"
    if key == "model.head_dim" and c.model.is_latent:
        return "model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim"
    if key == "eval.batches_per_source" and not c.eval.batches_per_source:
        return ""
    if not key.startswith("pipeline."):
        return _REASONS.get(key, "")
    stages = num_stages(c)
    if not ENGINES[c.pipeline.engine].has_stages:
        return {
            "pipeline.engine": "there is one stage" if stages == 1 else "",
            "pipeline.num_microbatches": "the whole batch at once",
        }.get(key, "")
    chunks = f"{c.pipeline.parallel_layers} layers over {stages} stages"
    repeats = f"{chunks} x {c.pipeline.num_layers_per_stage} layers per stage"
    layers = f"{chunks} x {c.pipeline.num_repeats} repeats"
    if c.pipeline.layers_per_stage:
        repeats = "the length of pipeline.layers_per_stage over the stages"
        layers = "the largest entry of pipeline.layers_per_stage"
    is_delayed = c.pipeline.delay_activation_forwarding
    microbatches = "two per stage, since forwarding is delayed" if is_delayed else "one per stage"
    return {
        "pipeline.engine": f"it runs schedule {c.pipeline.schedule}",
        "pipeline.num_microbatches": microbatches,
        "pipeline.num_repeats": repeats,
        "pipeline.num_layers_per_stage": layers,
    }.get(key, "")


def _without_effect(c: Config, before: Config) -> list[str]:
    """Return a line for every key that was set `before`, and that another leaves without effect."""
    lines = _pipeline_notes(c)
    for (switch, value), keys in unused_keys().items():
        if get(c, switch) == value:
            lines += [
                f"{key} has no effect with {switch}={as_written(value)}"
                for key in keys
                if is_set(before, key)
            ]
    lines += [*_idle_scaling(c), *_idle_axis_rules(c)]
    if c.stop_after >= c.steps:
        lines.append(f"stop_after={c.stop_after} has no effect: the run ends at steps={c.steps}")
    if not (c.checkpoint.every or c.checkpoint.every_minutes):
        if c.checkpoint.resume in ("auto", "must"):
            lines.append("this run cannot be resumed, since checkpoint.every=0 saves nothing")
        if is_set(c, "checkpoint.keep"):
            lines.append("checkpoint.keep has no effect with checkpoint.every=0")
    return lines


def _idle_scaling(c: Config) -> list[str]:
    """Return a line for each key of `model.rope_scaling` that its type does not read."""
    scaling, key = c.model.rope_scaling, "model.rope_scaling"
    reason = f"{key}.type={scaling.type}"
    if scaling.factor == 1 and scaling.type != "longrope":
        reason = f"{key}.factor=1"
    return [
        f"{name} has no effect with {reason}"
        for name in OPTIONS
        if name.startswith(f"{key}.") and is_set(c, name)
        if not scaling.reads(name.rpartition(".")[2])
    ]


def _idle_axis_rules(c: Config) -> list[str]:
    """Return a line for each rule whose logical axis no array of maxpipe's own has."""
    known = [str(axis) for axis, _ in DEFAULT_RULES]
    return [
        f"sharding.logical_axis_rules: the rule of {axis!r} has no effect, except on layers of "
        f"your own: no array of maxpipe has that logical axis{nearest(axis, known)}"
        for axis, _ in c.sharding.logical_axis_rules
        if axis not in known
    ]


def _pipeline_notes(c: Config) -> list[str]:
    """Return a line on prefetching that has no effect, or on a third repeat in memory."""
    if not ENGINES[c.pipeline.engine].has_stages:
        return []
    if c.pipeline.fsdp_prefetch == "true" and c.mesh.size("fsdp") == 1:
        return ["pipeline.fsdp_prefetch=true has no effect: with fsdp=1 weights are whole"]
    microbatches, least = c.pipeline.num_microbatches, least_microbatches(c)
    is_third_needed = c.pipeline.fsdp_gather == "per_repeat" and c.pipeline.num_repeats > 2
    if is_third_needed and microbatches == least:
        return [
            "pipeline.fsdp_gather=per_repeat: three gathered repeats are in memory, since with "
            f"num_microbatches={microbatches} there is no time for a fetch within a repeat; "
            f"{least + num_stages(c)} or more need two"
        ]
    return []


def _lines(
    config: Config, keys: Collection[str] = OPTIONS.keys()
) -> Iterator[tuple[str, str | None]]:
    """Yield lines of YAML, each with its key; None for lines that set no value."""
    opened: tuple[str, ...] = ()
    for key in (key for key in OPTIONS if key in keys):
        *path, name = key.split(".")
        for depth, section in enumerate(path):
            if opened[: depth + 1] != tuple(path[: depth + 1]):
                yield f"{'  ' * depth}{section}:", None
        opened = tuple(path)
        indent = "  " * len(path)
        value = get(config, key)
        if isinstance(value, list) and any(isinstance(item, list) for item in value):
            yield f"{indent}{name}:", key
            for item in value:
                yield f"{indent}- {_flow(item)}", None
        else:
            yield f"{indent}{name}: {_shown(key, value)}", key


def _shown(key: str, value: object) -> str:
    """Return a value as it is written in YAML."""
    return "auto" if OPTIONS[key].bounds.derived and value == AUTO else _flow(value)


def _flow(value: object) -> str:
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=2**20, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):
    """Quotes the strings in mappings that would be read back as numbers, such as a path `4k`."""

    def represent_mapping(
        self, tag: str, mapping: Mapping[str, object], flow_style: bool | None = None
    ) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for _, item in node.value:
            with suppress(ValueError):
                if item.tag == "tag:yaml.org,2002:str" and number(item.value) is not None:
                    item.style = "'"
        return node
