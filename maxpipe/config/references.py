"""`${other.key}` inside a value. Nothing else may be named: configs are written to disk, secrets are not."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from maxpipe.config.errors import Problem
from maxpipe.config.files import Setting
from maxpipe.config.schema import OPTIONS
from maxpipe.config.values import Raw, Scalar

_REFERENCE = re.compile(r"\$\{[A-Za-z_]\w*(\.\w+)*\}")


def follow_references(chosen: Mapping[str, Setting]) -> tuple[dict[str, Setting], list[Problem]]:
    """Replaces references by the values of the keys they name.

    Returns:
      The settings without those whose references are refused or lead nowhere, and a problem for each.
    """
    settings = dict(chosen)
    problems: list[Problem] = []
    for key, setting in chosen.items():
        if any("${" in _REFERENCE.sub("", text) for text in _texts(setting.raw)):
            problems.append(Problem(key, _refusal(setting.raw), setting.source))
            del settings[key]
    if any("${" in text for setting in settings.values() for text in _texts(setting.raw)):
        problems += _resolve(settings)
    return settings, problems


def _resolve(settings: dict[str, Setting]) -> list[Problem]:
    from omegaconf import OmegaConf  # 0.1 s that most configs need not pay
    from omegaconf.errors import OmegaConfBaseException

    tree = OmegaConf.create({})
    for key, option in OPTIONS.items():
        value = _plain(settings[key].raw) if key in settings else option.default
        OmegaConf.update(tree, key, value, force_add=True)
    problems = []
    for key, setting in list(settings.items()):
        if not any("${" in text for text in _texts(setting.raw)):
            continue
        try:
            value = OmegaConf.select(tree, key, throw_on_missing=True, throw_on_resolution_failure=True)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            settings[key] = replace(setting, raw=_raw_value(value))
        except (OmegaConfBaseException, RecursionError) as error:
            reason = (
                "references go in a circle"
                if isinstance(error, RecursionError)
                else str(error).splitlines()[0]
            )
            problems.append(Problem(key, f"cannot follow the reference: {reason}", setting.source))
            del settings[key]
    return problems


def _refusal(raw: Raw) -> str:
    if any("env" in text for text in _texts(raw)):
        return (
            "values from the environment are refused: the config is written to disk, and secrets must not be"
        )
    return "a reference has the form ${section.key}; nothing else is understood between the braces"


def _texts(raw: Raw) -> Iterator[str]:
    if isinstance(raw, Scalar):
        yield raw.text
    else:
        for item in raw if isinstance(raw, list) else raw.values():
            yield from _texts(item)


def _plain(raw: Raw) -> Any:
    if isinstance(raw, Scalar):
        return raw.text
    if isinstance(raw, list):
        return [_plain(item) for item in raw]
    return {key: _plain(value) for key, value in raw.items()}


def _raw_value(value: Any) -> Raw:
    if isinstance(value, list):
        return [_raw_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _raw_value(item) for key, item in value.items()}
    return Scalar("" if value is None else str(value))
