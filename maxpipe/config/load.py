"""Load a configuration from YAML and overrides, and resolve it for real devices."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from maxpipe.config import base_model
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import Setting, follow_references, locate, read_files, read_overrides
from maxpipe.config.identity import lookup
from maxpipe.config.maxtext import KEYS, LIMIT_OF
from maxpipe.config.options import OPTIONS, SECTIONS, unknown_key, update
from maxpipe.config.rules.engines import ENGINE_RULES
from maxpipe.config.rules.layout import LAYOUT_RULES
from maxpipe.config.rules.mesh import axes_problems, fit_mesh, unknown_axes
from maxpipe.config.rules.model import MODEL_RULES
from maxpipe.config.rules.rule import Rule, Updates, apply_rules
from maxpipe.config.rules.run import RUN_RULES
from maxpipe.config.sections import Config
from maxpipe.config.shipped import locate_config
from maxpipe.config.values import check_bounds, check_type, convert

# Rules that derive a value come before the rules that read it; the mesh is fitted before them.
_RULES: tuple[Rule, ...] = (*RUN_RULES, *MODEL_RULES, *LAYOUT_RULES, *ENGINE_RULES)
DEFAULT = "default"
RECORD = "record of the checkpoint"


@dataclass(frozen=True)
class Loaded:
    """A config as written, with -1 for values that are derived later, and its values' sources.

    Attributes:
      sources: source of the value of every key: `file.yml:12`, `command line` or `default`.
      remarks: notes for the user on how the values were read.
      verbose: whether the start of a run lists every derived value.
    """

    config: Config
    sources: Mapping[str, str]
    remarks: tuple[str, ...] = ()
    verbose: bool = False


def load(path: str, overrides: Sequence[str] = (), undecided: Collection[str] = ()) -> Loaded:
    """Read a YAML file, the files it inherits from and `key=value` words, and check the config.

    Checks that depend on the number of devices are left to `resolve`. Precedence, weakest first:
    defaults, the furthest `base:`, ..., the file, the shape of the base model, the overrides in
    their order. Overrides may not contradict that shape.

    Args:
      path: path of the file, or the name of a shipped configuration.
      undecided: keys whose values the command chooses itself. Each must be legal by itself; rules
        that read any of them, or check how they go together, are left out.

    Raises:
      ConfigError: the files or overrides are wrong; the error lists all problems.
    """
    settings, problems = read_files(locate_config(str(path)))
    words, word_problems = read_overrides(overrides)
    chosen, unknown = _known([*settings, *words])
    theirs = {s.key for s in settings} & {*KEYS, *LIMIT_OF}
    if len(theirs) > 2:
        message = f"{len(theirs)} keys are MaxText's; maxpipe from_maxtext {path} translates them"
        unknown.append(Problem("", message, path))
    chosen, reference_problems = follow_references(chosen)
    chosen = locate(chosen)
    values, value_problems = _values(chosen)
    if values.get("epochs"):
        value_problems += _choose_length([*settings, *words], chosen, values)
    set_by = {key: setting.source for key, setting in chosen.items()}
    values, set_by, shape_problems = base_model.apply(values, set_by)
    problems += word_problems + unknown + reference_problems + value_problems + shape_problems
    config = update(Config(), values)
    sources = {key: set_by.get(key, DEFAULT) for key in OPTIONS}
    unusable = {problem.key for problem in problems} | set(undecided)
    unusable |= {"steps"} if config.epochs else set()  # known only when the documents are counted
    broken = unusable | set(unknown_axes(config))
    if not undecided:
        problems += _sourced(axes_problems(config), sources)
    rule_problems = apply_rules(_RULES, config, broken)[1]
    if problems or rule_problems:
        misfits = _misfits(config, unusable, sources)
        if misfits:  # rules that read the mesh may pass with one that fits
            broken |= {problem.key for problem in misfits}
            rule_problems = apply_rules(_RULES, config, broken)[1]
        rule_problems = [*dict.fromkeys([*rule_problems, *misfits])]
        raise ConfigError(*problems, *_sourced(rule_problems, sources))
    return Loaded(config, sources, tuple(base_model.remarks(values)))


def _known(settings: Iterable[Setting]) -> tuple[dict[str, Setting], list[Problem]]:
    chosen: dict[str, Setting] = {}
    problems = []
    for setting in settings:
        if setting.key in OPTIONS:
            chosen[setting.key] = setting
        elif setting.key in SECTIONS:
            message = f"is a section; --help {setting.key} lists its keys"
            problems.append(Problem(setting.key, message, setting.source))
        else:
            message = unknown_key(setting.key, is_section=isinstance(setting.raw, dict))
            problems.append(Problem(setting.key, message, setting.source))
    return chosen, problems


def read_words(words: Sequence[str]) -> tuple[Updates, list[Problem]]:
    """Return the values of `key=value` words, and what is wrong with single words."""
    settings, problems = read_overrides(words)
    chosen, unknown = _known(settings)
    values, value_problems = _values(chosen)
    return values, [*problems, *unknown, *value_problems]


def simulated_mesh_problems(loaded: Loaded) -> list[Problem]:
    """Return how the mesh misfits simulated devices, which `resolve` says once nothing else is."""
    return _sourced(_misfits(loaded.config, frozenset(), loaded.sources), loaded.sources)


def _misfits(config: Config, unusable: Set[str], sources: Mapping[str, str]) -> Sequence[Problem]:
    num_devices = config.mesh.simulated_devices
    has_no_mesh = any(key.startswith("mesh") for key in unusable) or axes_problems(config)
    if has_no_mesh or not num_devices or config.compile.topology not in ("", "cpu"):
        return []
    try:
        fit_mesh(config, num_devices, 1, _RULES, sources)
    except ConfigError as error:
        return error.problems
    return []


def derive_known(config: Config) -> Config:
    """Return the config with all derived values that need no device; problems are ignored."""
    return apply_rules(_RULES, config, unknown_axes(config))[0]


def resolve(loaded: Loaded | Config, num_devices: int, num_slices: int = 1) -> Config:
    """Derive every value that is -1, and check what depends on the number of devices.

    `pipeline.layers_per_stage: auto` stays; `plan.auto_stages` decides it.

    `num_devices` counts the devices of all slices, which are joined by DCN.

    Raises:
      ConfigError: the config is wrong or does not fit the devices; lists all problems.
    """
    config = loaded.config if isinstance(loaded, Loaded) else loaded
    sources = loaded.sources if isinstance(loaded, Loaded) else {}
    problems = axes_problems(config)
    if config.epochs:
        problems.append(Problem("epochs", "only training counts documents: give steps instead"))
    if not problems:
        try:
            config = fit_mesh(config, num_devices, num_slices, _RULES, sources)
        except ConfigError as error:
            problems += error.problems
    broken = {p.key for p in problems} | set(unknown_axes(config))
    resolved, rule_problems = apply_rules(_RULES, config, broken)
    if problems + rule_problems:
        raise ConfigError(*_sourced(dict.fromkeys(problems + rule_problems), sources))
    return resolved


def from_record(saved: Mapping[str, object]) -> Config:
    """Return the config that a checkpoint holds as nested mappings.

    Keys that this version does not know are left out; keys that the record does not have keep
    their defaults. Names of variants need not be known here.

    Raises:
      ConfigError: a value has another type than its key, or breaks the key's bounds or a rule of
        the model; no run could have saved it.
    """
    missing = object()
    values = {
        key: value for key in OPTIONS if (value := lookup(saved, key, missing)) is not missing
    }
    problems = [p for key, value in values.items() if (p := _problem(key, value, named=False))]
    wrong = {problem.key for problem in problems}
    config = update(Config(), {key: value for key, value in values.items() if key not in wrong})
    problems += apply_rules(MODEL_RULES, config, wrong)[1]
    if problems:
        raise ConfigError(*(dataclasses.replace(p, source=RECORD) for p in problems))
    return config


def replace(config: Config, **values: object) -> Config:
    """Return a copy with some keys changed: `replace(config, **{"mesh.ici.stage": 2})`.

    Rules across keys are left to `resolve`.

    Raises:
      ConfigError: a key does not exist, or a value has the wrong type or breaks the key's bounds.
    """
    if problems := [p for key, value in values.items() if (p := _problem(key, value))]:
        raise ConfigError(*problems)
    return update(config, values)


def _problem(key: str, value: object, *, named: bool = True) -> Problem | None:
    """Return what is wrong with a key or its value; names of variants count only if `named`."""
    if key not in OPTIONS:
        return Problem(key, unknown_key(key))
    try:
        check_type(OPTIONS[key], value)
        if named or OPTIONS[key].bounds.variants is None:
            check_bounds(OPTIONS[key], value)
    except ValueError as error:
        return Problem(key, str(error))
    return None


def _choose_length(
    settings: Sequence[Setting], chosen: dict[str, Setting], values: Updates
) -> list[Problem]:
    if not {"steps", "epochs"} <= chosen.keys():
        return []
    last = next(s.key for s in reversed(settings) if s.key in ("steps", "epochs"))
    places = {chosen[key].source.rpartition(":")[0] for key in ("steps", "epochs")}
    if len(places) == 1:
        message = f"steps={values.get('steps')} is given, too: leave out one of the two"
        return [Problem("epochs", message, chosen["epochs"].source)]
    weaker = "steps" if last == "epochs" else "epochs"
    del chosen[weaker]
    values.pop(weaker, None)
    return []


def _values(chosen: Mapping[str, Setting]) -> tuple[Updates, list[Problem]]:
    values: Updates = {}
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
