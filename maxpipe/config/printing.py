"""Print a config as YAML, plain or with the sources of values; explain keys and decisions."""

from collections.abc import Collection, Iterator

import yaml

from maxpipe.config.catalog import ENGINES, SCHEDULES, RematPolicy, Schedule
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.identity import differing_keys
from maxpipe.config.imports import OWN_VARIANTS
from maxpipe.config.load import Loaded, derive_known
from maxpipe.config.options import OPTIONS, SECTIONS, Option, get, is_set, unknown_key
from maxpipe.config.rules.engines import conditions_of, idle_notes, refusals_of
from maxpipe.config.rules.layout import data_shards, num_stages, schedules_of
from maxpipe.config.sections import Config
from maxpipe.config.sections.parallelism import DEFAULT_RULES
from maxpipe.config.values import AUTO, as_written, example, nearest

DERIVED = "  # derived"  # ends a line of config.yml
_SOURCE_COLUMN = 44
_LONGEST_DEFAULT = 40  # characters of a default in the list of a section


def to_yaml(
    config: Config, keys: Collection[str] = OPTIONS.keys(), derived: Collection[str] = ()
) -> str:
    """Return YAML text that `load` reads back to an equal config, if other `keys` have defaults.

    A comment marks the keys that were `derived`.
    """
    lines = _lines(config, keys)
    return "".join(f"{line}{DERIVED if key in derived else ''}\n" for line, key in lines)


def _differences(config: Config) -> str:
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
      loaded: the config before `resolve`; without it, keys that may be derived are left out.
      verbose: whether to list values, too, that are derived as the help of their keys says.
    """
    before = loaded.config if isinstance(loaded, Loaded) else loaded
    lines = [*loaded.remarks] if isinstance(loaded, Loaded) else []
    for key in differing_keys(resolved, before) if before else ():
        if (verbose or not OPTIONS[key].bounds.derived) and (reason := _reason(resolved, key)):
            lines.append(f"{key}={get(resolved, key)}: {reason}")
    return [*lines, *_outside(resolved), *idle_notes(resolved, before), *_in_vain(resolved)]


def _outside(c: Config) -> Iterator[str]:
    engine, place = ENGINES[c.pipeline.engine], c.pipeline.outside_layers
    outside = c.model.stacked_layers - c.pipeline.parallel_layers
    if engine.has_stages and (first := c.model.first_dense_layers):
        yield f"model.first_dense_layers={first}: they run with the embedding"
    if not engine.has_stages or not outside:
        return
    how = "the stages as data parallelism"
    if not engine.one_program:
        how = f"the {'first' if place == 'before' else 'last'} chunk, on its stage alone"
    rows = c.data.global_batch_size // (c.pipeline.num_microbatches * data_shards(c))
    if engine.lockstep and rows % num_stages(c):
        how += f"; {num_stages(c)} stages do not divide {rows} rows, so some compute padding"
    yield (
        f"pipeline.parallel_layers={c.pipeline.parallel_layers}: "
        f"{outside} of {c.model.stacked_layers} layers run {place} the pipeline, with {how}"
    )


def _reason(c: Config, key: str) -> str:
    has_stages = ENGINES[c.pipeline.engine].has_stages
    if key == "pipeline.engine":
        return f"it runs schedule {c.pipeline.schedule}" if has_stages else "there is one stage"
    if key == "data.tokenizer":
        return "data.source=synthetic needs no text, only ids that the model has"
    if key.startswith("pipeline.") and not has_stages:
        return ""
    return OPTIONS[key].bounds.help.partition("-1 = ")[2].partition(";")[0]


def _in_vain(c: Config) -> Iterator[str]:
    known = [str(axis) for axis, _ in DEFAULT_RULES]
    for axis, _ in c.sharding.logical_axis_rules:
        if axis not in known:
            yield (
                f"sharding.logical_axis_rules: the rule of {axis!r} has no effect, except on "
                f"layers of your own: maxpipe has no such logical axis{nearest(axis, known)}"
            )
    is_saved = c.checkpoint.every or c.checkpoint.every_minutes
    if not is_saved and c.checkpoint.resume in ("auto", "must"):
        yield "this run cannot be resumed, since checkpoint.every=0 saves nothing"


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
            is_auto = OPTIONS[key].bounds.derived and value == AUTO
            yield f"{indent}{name}: {'auto' if is_auto else _flow(value)}", key


def _flow(value: object) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=2**20, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def describe(key: str) -> str:
    """Return help on a key, or on all keys of a section; the last word of either is enough.
    Raises ConfigError if there is no such key.
    """
    names = [*OPTIONS, *SECTIONS]
    if key not in names:
        matches = [name for name in names if name.rpartition(".")[2] == key]
        if not matches:
            raise ConfigError(Problem(key, unknown_key(key)))
        return "\n".join(describe(match) for match in matches)
    if key in SECTIONS:
        inside = [option for option in OPTIONS.values() if option.key.startswith(f"{key}.")]
        return "".join(
            f"{option.key:<40} {_facts(option)}\n    {option.bounds.help}\n" for option in inside
        )
    option = OPTIONS[key]
    titled = [*_value_lines(option), *_variant_lines(option), *_engine_lines(key)]
    titled += [("no effect", condition) for condition in conditions_of(key)]
    lines = [f"  {title:<11} {text}" for title, text in titled]
    return "\n".join([f"{key}: {option.bounds.help}", *lines]) + "\n"


def _facts(option: Option) -> str:
    facts = dict(_value_lines(option))
    if len(facts["default"]) > _LONGEST_DEFAULT:
        facts["default"] = "see --print-config"
    kind = facts["type"]
    if "choices" in facts:
        kind = f"{'list' if isinstance(option.default, list) else 'one'} of {facts['choices']}"
    legal = f", {facts['legal']}" if "legal" in facts else ""
    return f"{kind}; default {facts['default']}{legal}"


def _value_lines(option: Option) -> Iterator[tuple[str, str]]:
    bounds, kind = option.bounds, option.type
    yield "type", kind.__name__ if isinstance(kind, type) else f"list such as {example(option)}"
    yield "default", repr(option.default)
    if option.choices:
        yield "choices", ", ".join(option.choices)
    signs = [(">=", bounds.minimum), (">", bounds.above), ("<=", bounds.maximum)]
    limits = [f"{sign} {bound}" for sign, bound in signs if bound is not None]
    if limits:
        yield "legal", " and ".join(limits) + (", or -1 = derived" if bounds.derived else "")


def _variant_lines(option: Option) -> Iterator[tuple[str, str]]:
    table = SCHEDULES if option.key == "pipeline.schedule" else option.bounds.variants or {}
    width = max((len(name) for name in table), default=0)
    for name, variant in table.items():
        summary = getattr(variant, "summary", "")
        if isinstance(variant, RematPolicy):
            places = {"on the device": variant.device, "in the host's memory": variant.host}
            saved = [f"{', '.join(names)} {place}" for place, names in places.items() if names]
            summary = summary or f"saves {' and '.join(saved)}"
        if isinstance(variant, Schedule):
            summary = f"{summary} ({', '.join(variant.engines)})"
        yield "", f"{name:<{width}}  {summary}"
    if option.key == "pipeline.schedule":
        yield "", f"{'FILE.csv':<{width}}  a table of your own"
    if table and table is not ENGINES:
        yield "", OWN_VARIANTS


def _engine_lines(key: str) -> Iterator[tuple[str, str]]:
    if key == "pipeline.schedule":
        for name in ENGINES:
            if schedules := schedules_of(name):
                yield name, f"runs {', '.join(schedules)}"
    elif key.startswith("pipeline.") and key != "pipeline.engine":
        yield "engines", ", ".join(name for name, engine in ENGINES.items() if engine.takes(key))
        for name in ENGINES:
            values_by_reason: dict[str, list[str]] = {}
            for refusal in refusals_of(name, key):
                values = map(as_written, refusal.values)
                values_by_reason.setdefault(refusal.reason, []).extend(values)
            for reason, refused in values_by_reason.items():
                yield "", f"{name} refuses {', '.join(refused)}: {reason}"
