"""Compare a model with what its config.json means, so that no option is lost on the way out."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from maxpipe.config.rules.engines import idleness
from maxpipe.config.sections import Config, ModelConfig


def check_expressed(m: ModelConfig, meaning: Mapping[str, object], model_type: str) -> None:
    """Compare every key of the model's shape.

    Args:
      m: the resolved model configuration.
      meaning: values that the written config.json is read as, by key without `model.`.
      model_type: model type of the config.json.

    Raises:
      ValueError: the type cannot express an option of the model; the message names it.
    """
    config = replace(Config(), model=m)
    for key, value in meaning.items():
        actual: Any = m
        for name in key.split("."):
            actual = getattr(actual, name)
        if key.startswith("rope_scaling.") and idleness(config, f"model.{key}"):
            continue
        if key == "mlp_dim" and m.moe.experts and not m.first_dense_layers:
            continue  # no layer has a dense MLP
        if key == "moe.selection_bias":
            actual = m.moe.has_bias
        if key == "moe.mlp_dim":
            actual, value = m.expert_dim, value or meaning["mlp_dim"]
        if key == "layer_pattern":
            actual, value = m.layer_kinds, _kinds_of(meaning)
        elif key == "query_scale":
            actual, value = (scale or m.head_dim**-0.5 for scale in (actual, value))
        is_same = actual == value
        if isinstance(value, float):
            is_same = math.isclose(actual, value, rel_tol=1e-9)
        if not is_same:
            raise ValueError(f"{model_type} has no model.{key}={actual}")


def _kinds_of(values: Mapping[str, object]) -> tuple[str, ...]:
    names = {field.name for field in fields(ModelConfig)}
    plain = {key: value for key, value in values.items() if key in names}
    return ModelConfig(**plain).layer_kinds  # type: ignore[arg-type]
