"""YAML and overrides -> a checked Config with the source of every value -> a Config for real devices."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import Setting, follow_references, read_files, read_overrides
from maxpipe.config.nearest import unknown_key
from maxpipe.config.options import OPTIONS, SECTIONS, update
from maxpipe.config.rules.mesh import RULES, fit_mesh, one_unknown, unknown_axes
from maxpipe.config.rules.rule import apply_rules
from maxpipe.config.sections import Config
from maxpipe.config.values import check_bounds, check_type, convert

DEFAULT = "default"


@dataclass(frozen=True)
class Loaded:
    """A config as written, -1 for what is derived later, and for every key the place its value came from."""

    config: Config
    sources: Mapping[str, str]


def load(path: str, overrides: Sequence[str] = ()) -> Loaded:
    """Reads a YAML file, the files it inherits from and `key=value` words; checks all that needs no device.

    Precedence, weakest first: defaults, the furthest `base:`, ..., the file, the overrides in their
    order.

    Raises:
      ConfigError: with every problem found.
    """
    settings, problems = read_files(str(path))
    words, word_problems = read_overrides(overrides)
    problems += word_problems
    chosen: dict[str, Setting] = {}
    for setting in [*settings, *words]:
        if setting.key in OPTIONS:
            chosen[setting.key] = setting
        elif setting.key in SECTIONS:
            inner = ", ".join(f.name for f in dataclasses.fields(SECTIONS[setting.key]))
            problems.append(
                Problem(setting.key, f"is a section; its keys are {inner}", setting.source)
            )
        else:
            message = unknown_key(setting.key, is_section=isinstance(setting.raw, dict))
            problems.append(Problem(setting.key, message, setting.source))
    chosen, reference_problems = follow_references(chosen)
    values, value_problems = _values(chosen)
    problems += reference_problems + value_problems
    config = update(Config(), values)
    sources = {key: chosen[key].source if key in chosen else DEFAULT for key in OPTIONS}
    broken = {problem.key for problem in problems} | set(unknown_axes(config))
    problems += _sourced(apply_rules((one_unknown, *RULES), config, broken)[1], sources)
    if problems:
        raise ConfigError(*problems)
    return Loaded(config, sources)


def resolve(loaded: Loaded | Config, num_devices: int, num_slices: int = 1) -> Config:
    """Fills every -1 and checks what depends on the number of devices.

    `pipeline.layers_per_stage: auto` stays; `pipeline.auto_stages.plan.choose_stages` decides it.

    Args:
      loaded: from `load`, or a config made in code.
      num_devices: devices over all slices and processes.
      num_slices: slices joined by DCN.

    Raises:
      ConfigError: with every problem found.
    """
    config, sources = (
        (loaded.config, loaded.sources) if isinstance(loaded, Loaded) else (loaded, {})
    )
    problems = apply_rules((one_unknown,), config, ())[1]
    if not problems:
        try:
            config = fit_mesh(config, num_devices, num_slices)
        except ConfigError as error:
            problems += error.problems
    resolved, more = apply_rules(
        RULES, config, {p.key for p in problems} | set(unknown_axes(config))
    )
    if problems + more:
        raise ConfigError(*_sourced(problems + more, sources))
    return resolved


def from_record(saved: Mapping[str, Any]) -> Config:
    """The config that a checkpoint holds as nested mappings.

    Keys that this version does not know are left out, and those that it has since got keep their
    defaults.
    """
    values: dict[str, Any] = {}
    for key in OPTIONS:
        *sections, name = key.split(".")
        section: Any = saved
        for inner in sections:
            section = section.get(inner, {}) if isinstance(section, Mapping) else {}
        if isinstance(section, Mapping) and name in section:
            values[key] = section[name]
    return update(Config(), values)


def replace(config: Config, **values: Any) -> Config:
    """A copy with some keys changed: `replace(config, **{"mesh.ici.stage": 2})`.

    Raises:
      ConfigError: a key does not exist, or a value breaks the rule of its key. Rules across keys
        are left to `resolve`.
    """
    problems = []
    for key, value in values.items():
        if key not in OPTIONS:
            problems.append(Problem(key, unknown_key(key)))
            continue
        try:
            check_type(OPTIONS[key], value)
            check_bounds(OPTIONS[key], value)
        except ValueError as error:
            problems.append(Problem(key, str(error)))
    if problems:
        raise ConfigError(*problems)
    return update(config, values)


def _values(chosen: Mapping[str, Setting]) -> tuple[dict[str, Any], list[Problem]]:
    values: dict[str, Any] = {}
    problems = []
    for key, setting in chosen.items():
        try:
            value = convert(OPTIONS[key], setting.raw)
            check_bounds(OPTIONS[key], value)
            values[key] = value
        except ValueError as error:
            problems.append(Problem(key, str(error), setting.source))
    return values, problems


def _sourced(problems: Iterable[Problem], sources: Mapping[str, str]) -> list[Problem]:
    return [dataclasses.replace(p, source=p.source or sources.get(p.key, "")) for p in problems]
