"""Translate the config.json of a model type into `model.*` and back; without JAX."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

from maxpipe.config.catalog import BLOCKS, MODEL_TYPES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.from_hf import read_config_json
from maxpipe.config.identity import SHAPE_DEFAULTS
from maxpipe.config.imports import implementation
from maxpipe.config.options import OPTIONS, get
from maxpipe.config.rules.engines import idleness
from maxpipe.config.sections import Config, ModelConfig
from maxpipe.hf.rope import Json, max_position, read_rope, write_rope

_SIZES = {
    "num_layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "num_query_heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_KINDS = {"full_attention": "global", "sliding_attention": "local"}


class Family:
    """A model type of transformers, for decoders whose layers have the same parameters.

    Attributes:
      model_type, architecture: the type's values of these keys in config.json.
      defaults: the type's values of keys that config.json leaves out, except for rotations.
      fixed: values of `model.*` that hold for every model of the type.
      theta, theta_local: default bases of the rotation; 0 if local layers have none of their own.
      windows: "none"; "all" where the layers are alike, with a window or without; "listed" where
        config.json lists the kind of each layer.
      activation_key: the key that names the MLP's activation.
      rotates_part: whether a share of a head's channels may be rotated, `partial_rotary_factor`;
        transformers' classes of other types ignore the key and rotate all of them.
      fuses_projections: whether query, key and value are one tensor, and gate and up another.
      expert_names: naming scheme of the experts' tensors, a key of `tensor_table.EXPERTS`.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    defaults: ClassVar[Json] = {}
    fixed: ClassVar[Mapping[str, object]] = {}
    theta: ClassVar[float] = 10_000.0
    theta_local: ClassVar[float] = 0.0
    windows: ClassVar[str] = "none"
    activation_key: ClassVar[str] = "hidden_act"
    rotates_part: ClassVar[bool] = False
    fuses_projections: ClassVar[bool] = False
    expert_names: ClassVar[str] = "mlp"

    def model(self, config_json: Json) -> dict[str, object]:
        """Return every key of `model.*` that defines the model's shape, without this prefix; raises
        ValueError if config.json lacks a size, or has a value for which there is no option.
        """
        c = {**self.defaults, **config_json}
        missing = [name for name in _SIZES.values() if name not in c]
        if missing:
            raise ValueError(f"has no {', '.join(missing)}")
        for ours, name in _SIZES.items():
            most = OPTIONS[f"model.{ours}"].bounds.maximum
            if type(c[name]) is not int or not 1 <= c[name] <= (most or c[name]):
                limit = f" and at most {most}" if most else ""
                raise ValueError(f"{name} is {c[name]!r:.40}, not a whole number above 0{limit}")
        heads = c["num_attention_heads"]
        activation = str(c.get(self.activation_key) or c.get("hidden_act", "silu"))
        if activation not in _ACTIVATIONS:
            raise ValueError(f"{self.activation_key} {activation!r} is no option of the MLP")
        rope = read_rope(c, theta=self.theta, theta_local=self.theta_local)
        if rope["rope_fraction"] != 1 and not self.rotates_part:
            share = rope["rope_fraction"]
            raise ValueError(f"partial_rotary_factor={share}: this type rotates all channels")
        values = {
            **SHAPE_DEFAULTS,
            **{ours: c[theirs] for ours, theirs in _SIZES.items()},
            "unpadded_vocab_size": c["vocab_size"],
            "num_kv_heads": int(c.get("num_key_value_heads") or heads),
            "head_dim": int(c.get("head_dim") or c["hidden_size"] // heads),
            "norm_eps": float(c.get("rms_norm_eps", 1e-6)),
            "tie_embeddings": bool(c.get("tie_word_embeddings", False)),
            "mlp_activation": _ACTIVATIONS[activation],
            **self.fixed,
            **rope,
            **self.read(c),
        }
        return values | self._pattern(c)

    def config(self, m: ModelConfig, sequence_length: int) -> dict[str, Any]:
        """Return config.json of a resolved model of this type, without padding of its vocabulary;
        raises ValueError, naming an option of the model that the type cannot express.
        """
        m = replace(m, vocab_size=m.num_token_ids)
        written: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{theirs: getattr(m, ours) for ours, theirs in _SIZES.items()},
            "num_key_value_heads": m.num_kv_heads,
            "head_dim": m.head_dim,
            "rms_norm_eps": m.norm_eps,
            "tie_word_embeddings": m.tie_embeddings,
            self.activation_key: {v: k for k, v in _ACTIVATIONS.items()}[m.mlp_activation],
            "max_position_embeddings": max_position(m, sequence_length),
            **self._written_windows(m),
            **write_rope(m, by_kind=bool(self.theta_local), by_part=self.rotates_part),
            **self.write(m),
        }
        _check_expressed(m, self.model(written), self.model_type)
        return written

    def read(self, c: Json) -> dict[str, object]:
        """Return `model.*` values from keys that only this type has; `c` includes its defaults."""
        return {}

    def write(self, m: ModelConfig) -> dict[str, Any]:
        """Return keys of config.json that only this type has."""
        return {}

    def window(self, c: Json) -> int:
        """Return how many tokens a sliding layer sees, 0 if config.json switches windows off."""
        return int(c.get("sliding_window") or 0) if self.windows != "none" else 0

    def kinds(self, c: Json) -> list[str]:
        """Return the kind of each layer, by the type's rule where config.json lists none."""
        assert self.windows != "listed", "the type has a rule of its own"
        return ["local" if self.windows == "all" else "global"] * int(c["num_hidden_layers"])

    def _written_windows(self, m: ModelConfig) -> dict[str, Any]:
        if self.windows == "none":
            return {}
        written: dict[str, Any] = {"sliding_window": m.attention_window or None}
        if self.windows == "listed":
            # Some classes build the window's mask even if no layer uses it.
            written["sliding_window"] = m.attention_window or self.defaults.get("sliding_window")
            names = {ours: theirs for theirs, ours in _KINDS.items()}
            written["layer_types"] = [names[k.removesuffix("_nope")] for k in m.layer_kinds]
        return written

    def _pattern(self, c: Json) -> dict[str, object]:
        """Return the keys of `model.*` about windows."""
        window = self.window(c)
        kinds = self.kinds(c)
        if not window:
            kinds = [kind.replace("local", "global") for kind in kinds]
        if len(kinds) != c["num_hidden_layers"]:
            raise ValueError(
                f"lists {len(kinds)} layers, but num_hidden_layers is {c['num_hidden_layers']}"
            )
        has_window = any(kind.startswith("local") for kind in kinds)
        pattern = shortest_pattern(kinds)
        return {
            "attention_window": window if has_window else 0,
            "layer_pattern": [] if pattern in (["local"], ["global"]) else pattern,
        }


def listed_kinds(c: Json) -> list[str] | None:
    """Return the kinds of layers that config.json lists in `layer_types`, None if it does not."""
    types = c.get("layer_types")
    if not types:
        return None
    if unknown := {*types} - _KINDS.keys():
        raise ValueError(f"layer_types has {', '.join(sorted(unknown))}, which is no option")
    return [_KINDS[kind] for kind in types]


def shortest_pattern(kinds: list[str]) -> list[str]:
    """Return the shortest list that, repeated, gives `kinds`."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[i % length] for i, kind in enumerate(kinds)):
            return kinds[:length]
    return kinds


def _check_expressed(m: ModelConfig, meaning: Mapping[str, object], model_type: str) -> None:
    """Compare every key of the model's shape with what its config.json means, so that no option is
    lost on the way out; raises ValueError naming one that the type cannot express.
    """
    config = replace(Config(), model=m)
    for key, value in meaning.items():
        actual: Any = get(config, f"model.{key}")
        if key.startswith("rope_scaling.") and idleness(config, f"model.{key}"):
            continue
        if key == "mlp_dim" and m.moe.experts and not m.first_dense_layers:
            continue  # no layer has a dense MLP
        if key == "moe.selection_bias":
            actual = m.moe.has_bias
        if key == "moe.mlp_dim":
            actual, value = m.expert_dim, value or meaning["mlp_dim"]
        if key == "layer_pattern":
            names = {field.name for field in fields(ModelConfig)}
            plain: dict[str, Any] = {key: meaning[key] for key in meaning if key in names}
            actual, value = m.layer_kinds, ModelConfig(**plain).layer_kinds
        elif key == "query_scale":
            actual, value = (scale or m.head_dim**-0.5 for scale in (actual, value))
        is_same = actual == value
        if isinstance(value, float):
            is_same = math.isclose(actual, value, rel_tol=1e-9)
        if not is_same:
            raise ValueError(f"{model_type} has no model.{key}={actual}")


def choose_family(config: Config, model_type: str, origin: Path | None) -> Family:
    """Return the type of an export: the requested one, if any, else that of the imported folder
    `origin`, else one that fits; raises ConfigError if it lacks an option of the model, or its
    block.
    """
    if model_type and model_type not in MODEL_TYPES:
        message = f"{model_type!r} is not one of {', '.join(MODEL_TYPES)}"
        raise ConfigError(Problem("--type", message))
    of_block = BLOCKS[config.model.block].model_types
    of_block = tuple(MODEL_TYPES) if of_block is None else of_block
    imported = str(read_config_json(str(origin)).get("model_type")) if origin else ""
    only = model_type or (imported if imported in MODEL_TYPES else "")
    names = [only] if only else sorted(of_block, key=lambda name: name != "llama")
    if not names or names[0] not in of_block:
        message = (
            f"{config.model.block} is no block of {only or 'transformers'}: its entry in the "
            "catalogue has other model_types or none; use --safetensors"
        )
        raise ConfigError(Problem("model.block", message))
    refusals = []
    for name in names:
        family = implementation(MODEL_TYPES[name])()
        assert isinstance(family, Family)
        try:
            family.config(config.model, config.data.sequence_length)
            return family
        except ValueError as error:
            refusals.append(str(error))
    raise ConfigError(Problem("--type", f"no type of model fits: {'; '.join(refusals)}"))
