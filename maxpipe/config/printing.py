"""A config as YAML, plain or with the source of every value; and what was decided automatically, in words."""

from collections.abc import Iterator
from typing import Any

import yaml

from maxpipe.config.catalog import LR_SCHEDULES, OPTIMIZERS
from maxpipe.config.load import Loaded
from maxpipe.config.options import OPTIONS, get, is_set
from maxpipe.config.rules.batches import data_shards
from maxpipe.config.rules.mesh import RULES, unknown_axes
from maxpipe.config.rules.rule import apply_rules
from maxpipe.config.rules.stages import ignored_options, num_stages
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO

_SOURCE_COLUMN = 44
# Keys that nothing reads where another key has this value.
_UNUSED: dict[tuple[str, str | int], tuple[str, ...]] = {
    ("optimizer.spike_window", 0): ("optimizer.spike_deviations",),
    ("eval.every", 0): ("eval.batches",),
}


def unused_keys() -> dict[tuple[str, str | int], tuple[str, ...]]:
    """Return, for a key and a value of it, the keys that nothing reads then."""
    unused = dict(_UNUSED)
    for name, optimizer in OPTIMIZERS.items():
        unused["optimizer.name", name] = tuple(f"optimizer.{key}" for key in optimizer.unused)
    for name, schedule in LR_SCHEDULES.items():
        unused["optimizer.schedule", name] = tuple(f"optimizer.{key}" for key in schedule.unused)
    return unused


def to_yaml(config: Config) -> str:
    """YAML text that `load` reads back to an equal config."""
    return "".join(f"{line}\n" for line, _ in _lines(config))


def print_config(loaded: Loaded) -> str:
    """YAML text with the source of every value as a comment; derived values as far as they are known."""
    known, _ = apply_rules(RULES, loaded.config, unknown_axes(loaded.config))
    text = []
    for line, key in _lines(known):
        if key is None:
            text.append(line)
            continue
        source = loaded.sources[key]
        if get(known, key) != get(loaded.config, key):
            source = "derived"
        elif OPTIONS[key].bounds.derived and get(known, key) in (-1, AUTO):
            source += "; derived at start"
        text.append(f"{line:<{_SOURCE_COLUMN}}  # {source}")
    return "\n".join(text) + "\n"


def notes(resolved: Config, loaded: Loaded | Config | None = None) -> list[str]:
    """Automatic decisions and keys without effect, one line each with the reason.

    Args:
      resolved: from `resolve`.
      loaded: what it was resolved from; without it neither derived values nor ignored pipeline
        options are listed.
    """
    before = loaded.config if isinstance(loaded, Loaded) else loaded
    lines = []
    if before is not None:
        changed = [key for key in OPTIONS if get(resolved, key) != get(before, key)]
        lines = [
            f"{key}={get(resolved, key)}: {reason}"
            for key in changed
            if (reason := _reason(resolved, key))
        ]
        lines += ignored_options(before, resolved)
        if (
            before.pipeline.memory_limit_gib
            and before.pipeline.layers_per_stage != AUTO
            and num_stages(resolved) > 1
        ):
            lines.append(
                "pipeline.memory_limit_gib has no effect without pipeline.layers_per_stage=auto"
            )
    return [*lines, *_outside(resolved), *_without_effect(resolved)]


def _outside(c: Config) -> list[str]:
    outside = c.model.num_layers - c.pipeline.parallel_layers
    if c.pipeline.engine == "sequential" or not outside:
        return []
    where = f"{outside} of {c.model.num_layers} layers run {c.pipeline.outside_layers} the pipeline"
    return [
        f"pipeline.parallel_layers={c.pipeline.parallel_layers}: {where}, with the stages as data parallelism"
    ]


def _reason(c: Config, key: str) -> str:
    stages = num_stages(c)
    if c.pipeline.engine == "sequential":
        pipeline = {
            "pipeline.engine": "there is one stage" if stages == 1 else "",
            "pipeline.num_microbatches": "the whole batch at once",
        }
    else:
        delayed = c.pipeline.delay_activation_forwarding
        count = "two per stage, since forwarding is delayed" if delayed else "one per stage"
        chunks = f"{c.pipeline.parallel_layers} layers over {stages} stages"
        pipeline = {
            "pipeline.engine": f"it runs schedule {c.pipeline.schedule}",
            "pipeline.num_microbatches": count,
            "pipeline.num_repeats": f"{chunks} x {c.pipeline.num_layers_per_stage} layers per stage",
            "pipeline.num_layers_per_stage": f"{chunks} x {c.pipeline.num_repeats} repeats",
        }
        if c.pipeline.layers_per_stage:
            pipeline["pipeline.num_repeats"] = (
                "the length of pipeline.layers_per_stage over the stages"
            )
            pipeline["pipeline.num_layers_per_stage"] = (
                "the largest entry of pipeline.layers_per_stage"
            )
    if key.startswith("mesh."):
        return "the devices that the other axes leave"
    return pipeline.get(key, _REASONS.get(key, ""))


_REASONS = {
    "model.head_dim": "model.embed_dim / model.num_query_heads",
    "optimizer.decay_steps": "steps",
    "optimizer.warmup_steps": "a twentieth of optimizer.decay_steps",
    "eval.global_batch_size": "data.global_batch_size",
}


def _without_effect(c: Config) -> list[str]:
    lines = []
    if c.pipeline.engine == "sequential":
        rows = c.data.global_batch_size // (c.pipeline.num_microbatches * data_shards(c))
        lines.append(
            "the sequential engine has no pipeline: schedule, repeats, layers per stage, delayed forwarding, "
            "overlap, idle slots and FSDP gathers do not apply; remat_policy acts on each layer; gradients add up "
            f"over microbatches of {rows} rows a device"
        )
    elif c.pipeline.fsdp_gather == "per_repeat" and c.pipeline.num_repeats > 2:
        microbatches, stages = c.pipeline.num_microbatches, num_stages(c)
        least = stages * (2 if c.pipeline.delay_activation_forwarding else 1)
        if microbatches == least:
            lines.append(
                "pipeline.fsdp_gather=per_repeat: three gathered repeats, since with "
                f"num_microbatches={microbatches} a fetch has no time within a repeat; "
                f"{least + stages} or more need two"
            )
    for (switch, value), keys in unused_keys().items():
        if get(c, switch) == value:
            lines += [
                f"{key} has no effect with {switch}={value}" for key in keys if is_set(c, key)
            ]
    if c.stop_after >= c.steps:
        lines.append(f"stop_after={c.stop_after} has no effect: the run ends at steps={c.steps}")
    if c.compile.topology:
        asked = f"compile.topology={c.compile.topology}"
        if c.compile.num_slices > 1:
            asked += f" compile.num_slices={c.compile.num_slices}"
        lines.append(f"{asked}: for maxpipe.compile only; a run takes the devices that there are")
    if not (c.checkpoint.every or c.checkpoint.every_minutes):
        if c.checkpoint.resume in ("auto", "must"):
            lines.append("checkpoint.every=0: this run cannot be resumed")
        if is_set(c, "checkpoint.keep"):
            lines.append("checkpoint.keep has no effect with checkpoint.every=0")
    return lines


def _lines(config: Config) -> Iterator[tuple[str, str | None]]:
    """Lines of YAML, each with its key (None for lines that set no value)."""
    opened: tuple[str, ...] = ()
    for key in OPTIONS:
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
            is_auto = OPTIONS[key].bounds.derived and value == AUTO
            yield f"{indent}{name}: {'auto' if is_auto else _flow(value)}", key


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=2**20, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
