"""Check the model, and how its arrays and sequences are split."""

from maxpipe.config.catalog import BLOCKS
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import is_set
from maxpipe.config.rules.effects import EFFECT_RULES
from maxpipe.config.rules.rule import Updates, divisors, multiples_around, rule
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.config.sections.lora import (
    ALL_LINEAR,
    ATTENTION_PROJECTIONS,
    MLP_PROJECTIONS,
    PROJECTIONS,
)
from maxpipe.config.sections.model import LAYER_KINDS, ModelConfig
from maxpipe.config.values import nearest

_CONTEXT_AXES = ("mesh.ici.context", "mesh.dcn.context")
_EXPERT_AXES = ("mesh.ici.expert", "mesh.dcn.expert")
_AXIS_RULES = "sharding.logical_axis_rules"


@rule(
    "model.attention_kind",
    "model.num_query_heads",
    "model.num_kv_heads",
    writes=("model.num_kv_heads",),
)
def check_grouped_heads(c: Config) -> Updates:
    """Check that every key/value head serves the same number of query heads."""
    heads, key = c.model.num_query_heads, "model.num_kv_heads"
    if c.model.is_latent:
        if is_set(c, key) and c.model.num_kv_heads != heads:
            message = (
                f"{c.model.num_kv_heads} is not possible with model.attention_kind=mla, where "
                f"every query head has a key of its own; use {heads}"
            )
            raise ConfigError(Problem(key, message))
        return {key: heads}
    if heads % c.model.num_kv_heads:
        legal = ", ".join(str(n) for n in divisors(heads))
        message = (
            f"{c.model.num_kv_heads} does not divide model.num_query_heads={heads}; "
            f"legal are {legal}"
        )
        raise ConfigError(Problem(key, message))
    return {}


@rule(
    "model.attention_kind",
    "model.mla",
    "model.embed_dim",
    "model.num_query_heads",
    "model.head_dim",
    writes=("model.head_dim",),
)
def derive_head_dim(c: Config) -> Updates:
    """Derive the width of a head from the width of the residual stream, or of its parts."""
    width, heads, size = c.model.embed_dim, c.model.num_query_heads, c.model.head_dim
    if c.model.is_latent:
        if size not in (-1, c.model.mla.head_dim):
            message = (
                f"{size} is not model.mla.qk_nope_head_dim + qk_rope_head_dim = "
                f"{c.model.mla.head_dim}; leave it out"
            )
            raise ConfigError(Problem("model.head_dim", message))
        return {"model.head_dim": c.model.mla.head_dim}
    if size == -1 and width % heads:
        message = (
            f"{width} is not divisible by model.num_query_heads={heads}; "
            f"nearest legal: {multiples_around(width, heads)}"
        )
        raise ConfigError(Problem("model.embed_dim", message))
    if size == -1:
        size = width // heads
    if size % 2:
        message = f"must be even, since rotary embeddings rotate pairs; got {size}"
        raise ConfigError(Problem("model.head_dim", message))
    return {"model.head_dim": size}


@rule("model.vocab_size", "model.unpadded_vocab_size", writes=("model.unpadded_vocab_size",))
def derive_unpadded_vocab_size(c: Config) -> Updates:
    """Take all rows of the embedding table as token ids, unless fewer are given."""
    if c.model.unpadded_vocab_size > c.model.vocab_size:
        message = (
            f"{c.model.vocab_size} rows do not hold model.unpadded_vocab_size="
            f"{c.model.unpadded_vocab_size} token ids"
        )
        raise ConfigError(Problem("model.vocab_size", message))
    return {"model.unpadded_vocab_size": c.model.num_token_ids}


@rule("model.attention_kind", "model.mla.qk_rope_head_dim")
def check_latent_attention(c: Config) -> None:
    """Check that the rotated channels of latent attention make pairs."""
    if c.model.is_latent and (size := c.model.mla.qk_rope_head_dim) % 2:
        message = f"must be even, since rotary embeddings rotate pairs; got {size}"
        raise ConfigError(Problem("model.mla.qk_rope_head_dim", message))


@rule("model.rope_fraction", "model.head_dim")
def check_rope_fraction(c: Config) -> None:
    """Check that pairs of channels are rotated."""
    if c.model.head_dim > 0 and (c.model.rotated_dim % 2 or not c.model.rotated_dim):
        message = (
            f"{c.model.rope_fraction} of model.head_dim={c.model.head_dim} are "
            f"{c.model.rotated_dim} channels, but rotary embeddings rotate pairs"
        )
        raise ConfigError(Problem("model.rope_fraction", message))


@rule(
    "model.rope_scaling",
    "model.rope_theta",
    "model.head_dim",
    "model.rope_fraction",
    "data.sequence_length",
    writes=("model.rope_scaling.length",),
)
def derive_rope_scaling(c: Config) -> Updates:
    """Check the numbers of the kind of scaling, and choose one of the two lists of longrope."""
    scaling, key = c.model.rope_scaling, "model.rope_scaling"
    if scaling.type == "longrope":
        pairs = c.model.rotated_dim // 2
        problems = [
            Problem(
                f"{key}.{name}",
                f"must have a positive number for each of {pairs} rotated pairs of channels; "
                f"got {len(divisors)} numbers",
            )
            for name, divisors in (
                ("short_factor", scaling.short_factor),
                ("long_factor", scaling.long_factor),
            )
            if len(divisors) != pairs or min(divisors) <= 0
        ]
        if problems:
            raise ConfigError(*problems)
        if scaling.length == "auto":
            is_long = c.data.sequence_length > scaling.original_max_position
            return {f"{key}.length": "long" if is_long else "short"}
    elif scaling.factor != 1 and scaling.type == "llama3":
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            message = (
                f"must be less than {key}.high_freq_factor={scaling.high_freq_factor}; "
                f"got {scaling.low_freq_factor}"
            )
            raise ConfigError(Problem(f"{key}.low_freq_factor", message))
    elif scaling.factor != 1 and scaling.type == "yarn" and scaling.beta_slow >= scaling.beta_fast:
        message = f"must be less than {key}.beta_fast={scaling.beta_fast}; got {scaling.beta_slow}"
        raise ConfigError(Problem(f"{key}.beta_slow", message))
    return {}


@rule("model.layer_pattern", "model.attention_window")
def check_layer_pattern(c: Config) -> None:
    """Check the kinds of layers, and that local layers and a window go together."""
    pattern, key = c.model.layer_pattern, "model.layer_pattern"
    problems = [
        Problem(
            key, f"{kind!r} is not one of {', '.join(LAYER_KINDS)}{nearest(kind, [*LAYER_KINDS])}"
        )
        for kind in dict.fromkeys(pattern)
        if kind not in LAYER_KINDS
    ]
    has_local = any(kind.startswith("local") for kind in pattern)
    if has_local and not c.model.attention_window:
        message = "has local layers, which need model.attention_window, the tokens they see"
        problems.append(Problem(key, message))
    if pattern and not has_local and c.model.attention_window:
        message = (
            f"{c.model.attention_window} has no effect, since model.layer_pattern has no local "
            "layer; name one, or leave the pattern empty for a window in all layers"
        )
        problems.append(Problem("model.attention_window", message))
    if problems:
        raise ConfigError(*problems)


@rule(
    "model.lora",
    "model.attention_kind",
    "model.moe.experts",
    "model.embed_dim",
    "model.head_dim",
    "model.num_query_heads",
    "model.num_kv_heads",
    "model.mlp_dim",
)
def check_lora(c: Config) -> None:
    """Check which projections have adapters, and that their rank is below the projections' own."""
    lora, key = c.model.lora, "model.lora.targets"
    if not lora.rank:
        return
    legal = [*PROJECTIONS, ALL_LINEAR]
    problems = [
        Problem(key, f"{name!r} is not one of {', '.join(legal)}{nearest(name, legal)}")
        for name in dict.fromkeys(lora.targets)
        if name not in legal
    ]
    if c.model.is_latent:
        message = "model.attention_kind=mla has no adapters; use 0, which trains all parameters"
        problems.append(Problem("model.lora.rank", message))
    elif not c.model.adapted and not problems:
        choices = ATTENTION_PROJECTIONS if c.model.moe.experts else PROJECTIONS
        message = f"names none of {', '.join(choices)}; name one, or {ALL_LINEAR}"
        problems.append(Problem(key, message))
    elif c.model.moe.experts and (names := [n for n in lora.targets if n in MLP_PROJECTIONS]):
        message = (
            f"experts have no adapters: leave out {', '.join(names)}, or use [{ALL_LINEAR}], which "
            "are those of attention and of the first dense layers"
        )
        problems.append(Problem(key, message))
    else:
        problems += [Problem("model.lora.rank", text) for text in _too_narrow(c.model)]
    if problems:
        raise ConfigError(*problems)


def _too_narrow(m: ModelConfig) -> list[str]:
    """Return what is wrong with a rank above the smaller side of an adapted projection."""
    width, heads = m.embed_dim, m.num_query_heads * m.head_dim
    others = {"query": heads, "out": heads} | dict.fromkeys(MLP_PROJECTIONS, m.mlp_dim)
    others |= dict.fromkeys(("key", "value"), m.num_kv_heads * m.head_dim)
    sides = {name: min(width, others[name]) for name in m.adapted}
    if not sides or m.lora.rank <= min(sides.values()):
        return []
    narrowest = min(sides, key=lambda name: sides[name])
    return [
        f"{m.lora.rank} is above {sides[narrowest]}, the rank of the projection {narrowest} "
        f"itself; use at most {sides[narrowest]}"
    ]


@rule("model.quantisation", "model.block", "model.moe.experts")
def check_quantisation(c: Config) -> None:
    """Check that the model has projections that can be quantised."""
    form, block, experts = c.model.quantisation, c.model.block, c.model.moe.experts
    if form == "none":
        return
    message = ""
    if experts:
        message = (
            f"{form} is not possible with model.moe.experts={experts}, since no kernel of experts "
            "multiplies in 8 bits; use none"
        )
    elif block in BLOCKS and not BLOCKS[block].quantises:
        able = " or ".join(name for name, facts in BLOCKS.items() if facts.quantises)
        message = f"model.block={block} does not quantise; use none, or model.block={able}"
    if message:
        raise ConfigError(Problem("model.quantisation", message))


@rule("model.num_layers", "model.first_dense_layers")
def check_first_dense_layers(c: Config) -> None:
    """Check that there are other layers than dense ones."""
    if (first := c.model.first_dense_layers) >= c.model.num_layers:
        message = f"{first} must be less than model.num_layers={c.model.num_layers}"
        raise ConfigError(Problem("model.first_dense_layers", message))


@rule("model.moe")
def check_experts(c: Config) -> None:
    """Check that a token has experts to choose from, in its groups."""
    moe, key = c.model.moe, "model.moe"
    if not moe.experts:
        return
    size, remainder = divmod(moe.experts, moe.groups)
    if moe.per_token > moe.experts:
        name, problem = "per_token", f"{moe.per_token} is more than {key}.experts={moe.experts}"
    elif remainder:
        name, problem = "groups", f"{moe.groups} does not divide {key}.experts={moe.experts}"
    elif moe.groups_per_token > moe.groups:
        problem = f"{moe.groups_per_token} is more than {key}.groups={moe.groups}"
        name = "groups_per_token"
    elif moe.per_token > moe.groups_per_token * size:
        problem = (
            f"{moe.groups_per_token} of {moe.groups} groups have {moe.groups_per_token * size} "
            f"experts, fewer than {key}.per_token={moe.per_token}; use more groups per token"
        )
        name = "groups_per_token"
    else:
        return
    raise ConfigError(Problem(f"{key}.{name}", problem))


@rule(_AXIS_RULES)
def check_logical_axis_rules(c: Config) -> None:
    """Check the form of the rules, the mesh axes they name, and that no logical axis has two."""
    problems: list[str] = []
    names: set[str] = set()
    for entry in c.sharding.logical_axis_rules:
        match entry:
            case [str(name), [*axes]] if all(isinstance(axis, str) for axis in axes):
                problems += [f"{entry}{problem}" for problem in _axes_problems(axes)]
                if name in names:
                    problems.append(
                        f"{name!r} has more than one rule; merge their mesh axes into one list"
                    )
                names.add(name)
            case _:
                problems.append(f"{entry} is not of the form [logical axis, [mesh axes]]")
    if problems:
        raise ConfigError(*(Problem(_AXIS_RULES, message) for message in problems))


def _axes_problems(axes: list[str]) -> list[str]:
    legal = f"the mesh axes are {', '.join(MESH_AXES)}"
    problems = [
        f": there is no mesh axis {axis!r}{nearest(axis, list(MESH_AXES))}; {legal}"
        for axis in axes
        if axis not in MESH_AXES
    ]
    if len(set(axes)) < len(axes):
        problems.append(" uses a mesh axis twice, but an array can be split over it only once")
    return problems


@rule("model.moe.capacity_factor", "mesh.ici.context", "mesh.dcn.context")
def check_capacity(c: Config) -> None:
    """Check that devices have whole sequences if experts take a bounded number of their tokens."""
    factor, parts = c.model.moe.capacity_factor, c.mesh.size("context")
    if factor and parts > 1:
        key = "mesh.ici.context" if c.mesh.ici.context > 1 else "mesh.dcn.context"
        message = (
            f"{factor:g} counts the tokens of whole sequences, which {key}={parts} splits; use 0, "
            "or 1 device along that axis"
        )
        raise ConfigError(Problem("model.moe.capacity_factor", message))


@rule(*_EXPERT_AXES, "model.moe.experts", _AXIS_RULES)
def check_expert_axis(c: Config) -> None:
    """Check that the expert axis splits experts evenly, and rows of batches too."""
    size, num_experts = c.mesh.size("expert"), c.model.moe.experts
    axes_of = dict(c.sharding.logical_axis_rules)
    if size == 1:
        # Tokens travel over this axis alone.
        if num_experts and axes_of.get("expert") not in (None, [], ["expert"]):
            message = "experts can only be split over mesh axis expert; use [expert, [expert]]"
            raise ConfigError(Problem(_AXIS_RULES, message))
        return
    key = "mesh.ici.expert" if c.mesh.ici.expert > 1 else "mesh.dcn.expert"
    if not num_experts:
        message = (
            f"{size} devices have no experts to share; use 1 and mesh.ici.fsdp={size}, or set "
            "model.moe.experts"
        )
        raise ConfigError(Problem(key, message))
    if num_experts % size:
        legal = " or ".join(str(n) for n in divisors(num_experts) if n > 1) or "1"
        message = f"{size} devices do not divide model.moe.experts={num_experts}; use {legal}"
        raise ConfigError(Problem(key, message))
    problems = []
    if axes_of.get("expert") != ["expert"]:
        problems.append(f"{key} splits experts over the axis; use [expert, [expert]]")
    rows = axes_of.get("activation_batch", [])
    if "expert" not in rows:
        problems.append(
            f"{key} splits rows of batches over the axis, but activation_batch lies over {rows}; "
            f"use [activation_batch, [{', '.join([*rows, 'expert'])}]]"
        )
    if problems:
        raise ConfigError(*(Problem(_AXIS_RULES, message) for message in problems))


@rule(*_CONTEXT_AXES, "data.sequence_length")
def check_context_chunks(c: Config) -> None:
    """Check that a sequence divides into two chunks for every device along the context axis."""
    length, context = c.data.sequence_length, c.mesh.size("context")
    if context > 1 and length % (2 * context):
        message = (
            f"{length} is not divisible by 2 x mesh.*.context = {2 * context}; "
            f"nearest legal: {multiples_around(length, 2 * context)}"
        )
        raise ConfigError(Problem("data.sequence_length", message))


@rule(*_CONTEXT_AXES, _AXIS_RULES)
def check_context_rule(c: Config) -> None:
    """Check that sequences lie over the context axis: attention gathers and sums over it."""
    length_axes = dict(c.sharding.logical_axis_rules).get("activation_length", [])
    if c.mesh.size("context") > 1 and length_axes != ["context"]:
        message = (
            "mesh.*.context splits sequences over the axis, but activation_length lies over "
            f"{length_axes}; use [activation_length, [context]]"
        )
        raise ConfigError(Problem(_AXIS_RULES, message))


MODEL_RULES = (
    *EFFECT_RULES,
    check_grouped_heads,
    derive_head_dim,
    check_latent_attention,
    derive_unpadded_vocab_size,
    check_rope_fraction,
    derive_rope_scaling,
    check_layer_pattern,
    check_lora,
    check_quantisation,
    check_first_dense_layers,
    check_experts,
    check_logical_axis_rules,
    check_capacity,
    check_expert_axis,
    check_context_chunks,
    check_context_rule,
)
