"""Print a config as YAML, plain or with the sources of values; explain automatic decisions."""

from collections.abc import Collection, Iterator

import yaml

from maxpipe.config.catalog import ENGINES
from maxpipe.config.identity import differing_keys
from maxpipe.config.load import Loaded, derive_known
from maxpipe.config.options import OPTIONS, get, is_set
from maxpipe.config.rules.engines import idle_notes
from maxpipe.config.rules.layout import data_shards, num_stages
from maxpipe.config.sections import Config
from maxpipe.config.sections.parallelism import DEFAULT_RULES
from maxpipe.config.values import AUTO, nearest

DERIVED = "  # derived"  # ends a line of config.yml
_SOURCE_COLUMN = 44


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
    """Return why a key has its value; of a number that was -1, what its help says."""
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
