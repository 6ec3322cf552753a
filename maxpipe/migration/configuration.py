"""Translate a MaxText configuration into one that `maxpipe.train` accepts, or say why not."""

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass

from maxpipe.config import Config, replace, resolve, to_yaml
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import read_words
from maxpipe.config.maxtext import KEYS, LIMIT_OF, MODEL_LIMITS, SAME_NAMES, Key, misspelt
from maxpipe.config.values import as_written, is_finite
from maxpipe.migration.data import translate_data
from maxpipe.migration.layout import (
    translate_batch,
    translate_devices,
    translate_mesh,
    translate_pipeline,
    translate_remat,
)
from maxpipe.migration.model import block_of, translate_model
from maxpipe.migration.read import MaxTextConfig
from maxpipe.migration.training import translate_optimizer, translate_run
from maxpipe.migration.translator import Translator

NAMES_OF_FILES = ("base_config", "model_name", "override_model_config")


@dataclass(frozen=True)
class Translation:
    """maxpipe's configuration before `resolve`, the keys that are set, and what differs."""

    config: Config
    yaml: str
    notes: list[str]


def translate(theirs: MaxTextConfig, num_devices: int = 0) -> Translation:
    """Translate a MaxText configuration, for a number of devices over all slices.

    0 takes it from `compile_topology` or from a mesh without -1.

    Raises:
      ConfigError: something cannot be translated; names all of it, by MaxText's keys if possible.
    """
    t = Translator(theirs, num_devices)
    _check_keys(t)
    for step in (
        translate_run,
        translate_model,
        translate_data,
        translate_devices,
        translate_mesh,
        translate_batch,
        translate_pipeline,
        translate_remat,
        translate_optimizer,
    ):
        step(t)
    _note_unread(t)
    ours, wrong = read_words(theirs.words)  # they win over what is translated
    _replace_refused(t, ours)
    t.values |= ours
    t.origins |= dict.fromkeys(ours, ())
    t.notes = [note for note in t.notes if note.partition("=")[0] not in ours]
    # Without all files only what is written is refused, and no default.
    own = [p for p in t.problems if p.key in theirs.values or not theirs.unread]
    problems = [*theirs.unread, *theirs.problems, *wrong, *own]
    try:
        config = replace(Config(), **t.values)
        if t.num_devices % t.num_slices:
            message = f"{t.num_devices} devices do not divide into {t.num_slices} slices"
            problems.append(Problem("--devices", f"{message}; give a multiple of {t.num_slices}"))
        elif t.num_devices and not theirs.unread:  # whose values the rules would miss
            resolve(config, t.num_devices, t.num_slices)
    except ConfigError as error:
        refused = {problem.key for problem in problems}
        for problem in error.problems:
            origins = t.origins.get(problem.key, ())
            if not refused.intersection(origins):
                problems.append(_sourced(problem, t))
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return Translation(config, to_yaml(config, t.values), t.notes)


def _check_keys(t: Translator) -> None:
    """Check keys without a counterpart against their limits, and name keys that nothing reads."""
    unknown = []
    for key, value in t.theirs.values.items():
        limit = LIMIT_OF.get(key)
        if limit in MODEL_LIMITS and block_of(t) is None:
            continue
        if isinstance(value, int | float) and not is_finite(value):
            t.refuse(key, f"expected a finite number, got {value}")
        elif limit and not limit.allows(key, value):
            required = as_written(limit.values[key]) if key in limit.values else "off"
            if limit.blocks:
                t.refuse(key, f"must be {required}: {limit.advice}")
            else:
                t.note(key, limit.advice)
        elif not limit and key not in (*KEYS, *SAME_NAMES):
            if key in t.theirs.chosen and (near := misspelt(key)):
                t.refuse(key, f"is not translated; did you mean {near}?")
            elif re.fullmatch("(ici|dcn)_.+_parallelism", key) and value != 1:
                t.refuse(key, f"must be 1: {LIMIT_OF['custom_mesh_and_rule'].advice}")
            elif key in t.theirs.chosen:
                unknown.append(key)
    if unknown:
        t.notes.append(f"not translated: {' '.join(unknown)}")


def _replace_refused(t: Translator, ours: Collection[str]) -> None:
    """Turn what is refused of MaxText's keys into notes where the user sets the counterpart."""
    refused, t.problems = t.problems, []
    for problem in refused:
        limit = LIMIT_OF.get(problem.key)
        counterpart = limit.ours if limit else KEYS.get(problem.key, Key()).ours
        if counterpart in ours:
            t.note(problem.key, f"left out; {counterpart} takes its place")
        else:
            t.problems.append(problem)


def _note_unread(t: Translator) -> None:
    for key in t.theirs.chosen:
        if key in KEYS and key not in {*t.keys_read, *NAMES_OF_FILES}:
            ours, differs, _ = KEYS[key]
            reason = f"set {ours} in the file if it is needed" if ours else differs
            t.note(key, f"left out; {reason}")


def _sourced(problem: Problem, t: Translator) -> Problem:
    """Return a problem of our configuration with the MaxText keys that its value comes from."""
    origins = [
        origin
        for key, origins in t.origins.items()
        if key == problem.key or key.startswith(f"{problem.key}.")
        for origin in origins
    ]
    source = f"from MaxText's {', '.join(dict.fromkeys(origins))}" if origins else ""
    return dataclasses.replace(problem, source=source)
