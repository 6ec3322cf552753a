"""List what differs from layer to layer: the window of attention and the rotation.

Layers have the same parameters and one program, so that they can be scanned, stacked over stages
and cut anywhere. What differs is a constant table, which
`attention.look_up` reads by the layer's index in model order.
"""

from dataclasses import dataclass
from functools import cache

from maxpipe.config.sections import ModelConfig, RopeScalingConfig
from maxpipe.model.rope import frequencies, rotary_factor

ALL_TOKENS = 2**30  # the window of global layers in a model that has local layers, too


@dataclass(frozen=True)
class LayerTable:
    """The facts of all layers, by kind of layer.

    Attributes:
      kinds: the kind of each layer in model order, an index into the other tables.
      windows: window of each kind, in tokens.
      rotations: frequencies of each kind, R / 2 numbers.
      factors: factor of rotated queries and keys of each kind.
      is_rotated: whether any layer has a rotary embedding.
    """

    kinds: tuple[int, ...]
    windows: tuple[int, ...]
    rotations: tuple[tuple[float, ...], ...]
    factors: tuple[float, ...]
    is_rotated: bool


@cache
def layer_table(config: ModelConfig) -> LayerTable:
    """Return the facts of all layers of a resolved model."""
    kinds = config.layer_kinds
    names = list(dict.fromkeys(kinds))
    rotations = [_rotation(config, kind) for kind in names]
    return LayerTable(
        kinds=tuple(names.index(kind) for kind in kinds),
        windows=tuple(config.attention_window if is_local(k) else ALL_TOKENS for k in names),
        rotations=tuple(rotation for rotation, _ in rotations),
        factors=tuple(factor for _, factor in rotations),
        is_rotated=any(any(rotation) for rotation, _ in rotations),
    )


def is_local(kind: str) -> bool:
    """Return whether layers of this kind see only a window."""
    return kind.startswith("local")


def visible_share(config: ModelConfig, length: int) -> float:
    """Return the share of a sequence's [T, T] scores that are not masked, averaged over layers.

    In a global layer this is half; the diagonal is not counted separately.
    """
    window = min(config.attention_window or length, length)
    # The first W queries see a triangle, the others W keys each.
    local = window / length - window**2 / (2 * length**2)
    shares = [local if is_local(kind) else 0.5 for kind in config.layer_kinds]
    return sum(shares) / len(shares)


def _rotation(config: ModelConfig, kind: str) -> tuple[tuple[float, ...], float]:
    """Return frequencies and factor of a kind of layer."""
    dim = config.rotated_dim
    if kind.endswith("nope"):
        return (0.0,) * (dim // 2), 1.0
    if is_local(kind) and config.rope_theta_local:
        freq = frequencies(dim, config.rope_theta_local, RopeScalingConfig())
        return tuple(freq.tolist()), 1.0
    freq = frequencies(dim, config.rope_theta, config.rope_scaling)
    return tuple(freq.tolist()), rotary_factor(config.rope_scaling)
