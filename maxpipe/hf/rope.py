"""Read and write rotary embeddings of config.json in both of its dialects.

Files of the hub have `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`, for
some types one for each kind of layer. Both mean the same, but some programs read only one, so both
are written.
"""

import math
from collections.abc import Mapping
from typing import Any

from maxpipe.config.sections import ModelConfig

Json = Mapping[str, Any]

_ORIGINAL = "original_max_position_embeddings"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_rope(c: Json, *, theta: float, theta_local: float = 0.0) -> dict[str, object]:
    """Return the keys of `model.*` that describe the rotation of a config.json.

    `theta` and `theta_local` are the bases to use if it names none; `theta_local` is not 0 for
    types whose local layers have a base of their own, and `theta` for those that share `rope_theta`
    unless `rope_parameters` has one for each kind. Raises ValueError if there is no option for the
    kind of rotation.
    """
    parameters, scaling = _section(c, "rope_parameters"), _section(c, "rope_scaling")
    default_local = c.get("rope_local_base_freq", theta_local)
    local: Json | None = None
    full: Json
    if _FULL in parameters or _SLIDING in parameters:
        full = {**_section(parameters, _FULL), **scaling}
        local = _section(parameters, _SLIDING) if theta_local or _SLIDING in parameters else None
    elif parameters and not scaling:
        full = parameters
    else:
        full = {"rope_theta": c.get("rope_theta", theta), **scaling}
        if theta_local:
            # Equal defaults: the type has one base for all layers.
            shared = c.get("rope_theta", theta) if theta_local == theta else theta_local
            local = {"rope_theta": c.get("rope_local_base_freq", shared)}
    base = float(full.get("rope_theta", c.get("rope_theta", theta)))
    values: dict[str, object] = {
        "rope_theta": base,
        "rope_theta_local": 0.0,
        "rope_fraction": float(
            full.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
        ),
        **_scaling(c, full),
    }
    if local is None:
        return values
    if _scaling(c, local).get("rope_scaling.factor", 1.0) != 1:
        if dict(local) == dict(full):
            return values  # both kinds of layers are scaled alike
        raise ValueError("sliding layers have scaled rotary frequencies of their own")
    base_local = float(local.get("rope_theta", default_local))
    if base_local != base or values.get("rope_scaling.factor", 1.0) != 1:
        values["rope_theta_local"] = base_local
    return values


def write_rope(m: ModelConfig, *, by_kind: bool, by_part: bool = False) -> dict[str, object]:
    """Return both dialects of a resolved model's rotation.

    `by_kind` is whether the type has parameters for each kind of layer, `by_part` whether it has a
    key for the share of channels that is rotated.
    """
    scaling = _written_scaling(m)
    # Some types' classes read the base from `rope_parameters` only.
    fraction = (
        {} if m.rope_fraction == 1 or not by_part else {"partial_rotary_factor": m.rope_fraction}
    )
    full = {"rope_type": "default", **scaling, "rope_theta": m.rope_theta, **fraction}
    written: dict[str, object] = {
        "rope_theta": m.rope_theta,
        "rope_scaling": scaling or None,
        "rope_parameters": full,
        **fraction,
    }
    if by_kind:
        base = m.rope_theta_local
        local = {"rope_type": "default", "rope_theta": base} if base else full
        written["rope_parameters"] = {_FULL: full, _SLIDING: local}
        written["rope_local_base_freq"] = base or m.rope_theta
    if m.rope_scaling.type == "longrope":
        written[_ORIGINAL] = m.rope_scaling.original_max_position
    return written


def max_position(m: ModelConfig, length: int) -> int:
    """Return `max_position_embeddings`: the scaled context, at least the training length."""
    scaling = m.rope_scaling
    scaled = round(scaling.original_max_position * scaling.factor) if scaling.factor > 1 else 0
    return max(length, scaled)


def rope_conflicts(c: Json) -> list[str]:
    """Return a line for each place of config.json that another one overrides."""
    parameters, scaling = _section(c, "rope_parameters"), _section(c, "rope_scaling")
    full = _section(parameters, _FULL) or parameters
    lines = []
    if full and any(
        full.get(name, value) != value or name not in full for name, value in scaling.items()
    ):
        lines.append("rope_scaling counts, as in transformers, and differs from rope_parameters")
    inner, outer = (scaling or full).get(_ORIGINAL), c.get(_ORIGINAL)
    if inner and outer and inner != outer:
        place = "within the rotation" if _FULL in parameters else "outside the rotation"
        lines.append(
            f"{_ORIGINAL} {place} counts, as in transformers, of {inner} within, {outer} outside"
        )
    return lines


def _section(c: Json, name: str) -> Json:
    """Return the object that a key of config.json names, an empty one if it is null or absent."""
    section = c.get(name) or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{name} is {section!r}, not an object")
    return section


def _scaling(c: Json, rope: Json) -> dict[str, object]:
    """Return the keys of `model.rope_scaling`; empty if there is no scaling."""
    kind = rope.get("rope_type", rope.get("type", "default")) or "default"
    if kind == "default":
        return {}
    if kind == "su":
        kind = "longrope"
    longest = float(c.get("max_position_embeddings") or 0)
    inner, outer = (place.get(_ORIGINAL) for place in (rope, c))
    by_kind = _FULL in (c.get("rope_parameters") or ())  # which transformers reads by itself
    original = (inner if by_kind else outer or inner) or longest
    factor = float(rope.get("factor") or 0)
    values: dict[str, object] = {"type": kind}
    if kind in ("llama3", "yarn", "longrope"):
        if not original:
            raise ValueError(f"{kind} needs {_ORIGINAL} or max_position_embeddings")
        values["original_max_position"] = int(original)
        factor = factor or max(1.0, longest / original)
    values["factor"] = factor
    if kind == "llama3":
        values |= {name: float(rope[name]) for name in ("low_freq_factor", "high_freq_factor")}
    elif kind == "yarn":
        values["beta_fast"] = float(rope.get("beta_fast") or 32)
        values["beta_slow"] = float(rope.get("beta_slow") or 1)
        values["truncate"] = bool(rope.get("truncate", True))
        values["attention_factor"] = _yarn_factor(rope, factor)
    elif kind == "longrope":
        values["attention_factor"] = float(rope.get("attention_factor") or 0)
        values |= {name: [float(x) for x in rope[name]] for name in ("short_factor", "long_factor")}
    elif kind != "linear":
        raise ValueError(f"rope_type {kind!r} is none of default, linear, llama3, yarn, longrope")
    elif not rope.get("factor"):
        raise ValueError("rope_type 'linear' has no factor")
    return {f"rope_scaling.{name}": value for name, value in values.items()}


def _yarn_factor(rope: Json, factor: float) -> float:
    """Return yarn's factor of rotated queries and keys; 0 if it follows from `factor` alone."""
    if rope.get("attention_factor"):
        return float(rope["attention_factor"])
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return 0.0
    scales = [
        1.0 if factor <= 1 else 0.1 * rope[name] * math.log(factor) + 1
        for name in ("mscale", "mscale_all_dim")
    ]
    return scales[0] / scales[1]


def _written_scaling(m: ModelConfig) -> dict[str, object]:
    s = m.rope_scaling
    if not s.is_scaled:
        return {}
    written: dict[str, object] = {"rope_type": s.type, "type": s.type, "factor": s.factor}
    if s.type != "linear":
        written[_ORIGINAL] = s.original_max_position
    names = {
        "linear": (),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "truncate"),
        "longrope": ("short_factor", "long_factor"),
    }
    written |= {name: getattr(s, name) for name in names[s.type]}
    if s.attention_factor and s.type in ("yarn", "longrope"):
        written["attention_factor"] = s.attention_factor
    return written
