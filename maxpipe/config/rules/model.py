"""Check the model, and how its arrays and sequences are split."""

from maxpipe.config.options import is_set
from maxpipe.config.rules.engines import EFFECT_RULES
from maxpipe.config.rules.rule import (
    Derived,
    Wrong,
    check,
    derive,
    divisors,
    multiples_around,
    rules_in,
)
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.config.sections.model_parts import (
    ALL_LINEAR,
    ATTENTION_PROJECTIONS,
    MLP_PROJECTIONS,
    PROJECTIONS,
)
from maxpipe.config.values import nearest

_AXIS_RULES = "sharding.logical_axis_rules"


@derive("model.num_kv_heads")
def check_grouped_heads(c: Config) -> Derived:
    heads, kv_heads, key = c.model.num_query_heads, c.model.num_kv_heads, "model.num_kv_heads"
    if c.model.is_latent:
        if is_set(c, key) and kv_heads != heads:
            yield key, f"{kv_heads} is not possible with model.attention_kind=mla; use {heads}"
        return {key: heads}
    if heads % kv_heads:
        legal = ", ".join(str(n) for n in divisors(heads))
        yield key, f"{kv_heads} does not divide model.num_query_heads={heads}; legal are {legal}"
    return {}


@derive("model.head_dim")
def derive_head_dim(c: Config) -> Derived:
    """Derive the width of a head from the width of the residual stream, or of its parts."""
    m, size, key = c.model, c.model.head_dim, "model.head_dim"
    rotated, rotated_key = size, key
    if m.is_latent:
        if size not in (-1, m.mla.head_dim):
            parts = f"model.mla.qk_nope_head_dim + qk_rope_head_dim = {m.mla.head_dim}"
            yield key, f"{size} is not {parts}; leave it out"
        size = m.mla.head_dim
        rotated, rotated_key = m.mla.qk_rope_head_dim, "model.mla.qk_rope_head_dim"
    elif size == -1 and m.embed_dim % m.num_query_heads:
        legal = multiples_around(m.embed_dim, m.num_query_heads)
        message = f"{m.embed_dim} is not divisible by model.num_query_heads={m.num_query_heads}"
        yield "model.embed_dim", f"{message}; nearest legal: {legal}"
        return {}
    elif size == -1:
        rotated = size = m.embed_dim // m.num_query_heads
    if rotated % 2:
        yield rotated_key, f"must be even, since pairs are rotated; got {rotated}"
    return {key: size}


@derive("model.unpadded_vocab_size")
def derive_unpadded_vocab_size(c: Config) -> Derived:
    rows, ids = c.model.vocab_size, c.model.unpadded_vocab_size
    if ids > rows:
        yield "model.vocab_size", f"{rows} is less than model.unpadded_vocab_size={ids}"
    return {"model.unpadded_vocab_size": c.model.num_token_ids}


@check
def check_rope_fraction(c: Config) -> Wrong:
    m = c.model
    if m.head_dim > 0 and (m.rotated_dim % 2 or not m.rotated_dim):
        channels = f"{m.rotated_dim} channels of model.head_dim={m.head_dim}"
        yield "model.rope_fraction", f"{m.rope_fraction} rotates {channels}, but pairs are rotated"


@derive("model.rope_scaling.length")
def derive_rope_scaling(c: Config) -> Derived:
    """Check the numbers of the kind of scaling, and choose one of the two lists of longrope."""
    scaling, key = c.model.rope_scaling, "model.rope_scaling"
    if scaling.type == "longrope":
        pairs = c.model.rotated_dim // 2
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name)
            if len(factors) != pairs or min(factors) <= 0:
                expected = f"a positive number for each of {pairs} rotated pairs"
                yield f"{key}.{name}", f"must have {expected}; got {len(factors)} numbers"
        if scaling.length == "auto":
            is_long = c.data.sequence_length > scaling.original_max_position
            return {f"{key}.length": "long" if is_long else "short"}
    limits = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
    if scaling.factor != 1 and scaling.type in limits:
        low, high = limits[scaling.type]
        smaller, larger = getattr(scaling, low), getattr(scaling, high)
        if smaller >= larger:
            yield f"{key}.{low}", f"must be less than {key}.{high}={larger}; got {smaller}"
    return {}


@check
def check_layer_pattern(c: Config) -> Wrong:
    pattern, window, key = c.model.layer_pattern, c.model.attention_window, "model.layer_pattern"
    has_local = any(kind.startswith("local") for kind in pattern)
    if has_local and not window:
        yield key, "has local layers, which need model.attention_window"
    if pattern and not has_local and window:
        yield "model.attention_window", f"{window} has no effect, since {key} has no local layer"


@check
def check_lora(c: Config) -> Wrong:
    m, lora, key = c.model, c.model.lora, "model.lora.targets"
    if not lora.rank:
        return
    if not m.adapted:
        choices = ATTENTION_PROJECTIONS if m.moe.experts else PROJECTIONS
        yield key, f"names none of {', '.join(choices)}; name one, or {ALL_LINEAR}"
    elif m.moe.experts and (names := [n for n in lora.targets if n in MLP_PROJECTIONS]):
        yield key, f"experts have no adapters: leave out {', '.join(names)}, or use [{ALL_LINEAR}]"


@check
def check_experts(c: Config) -> Wrong:
    m, moe, key = c.model, c.model.moe, "model.moe"
    if m.first_dense_layers >= m.num_layers:
        yield "model.first_dense_layers", f"must be less than model.num_layers={m.num_layers}"
    available = moe.groups_per_token * moe.experts // moe.groups
    if not moe.experts:
        return
    if moe.per_token > moe.experts:
        yield f"{key}.per_token", f"{moe.per_token} is more than {key}.experts={moe.experts}"
    elif moe.experts % moe.groups:
        yield f"{key}.groups", f"{moe.groups} does not divide {key}.experts={moe.experts}"
    elif moe.groups_per_token > moe.groups:
        yield f"{key}.groups_per_token", f"is more than {key}.groups={moe.groups}"
    elif moe.per_token > available:
        message = f"give {available} experts, fewer than {key}.per_token={moe.per_token}"
        yield f"{key}.groups_per_token", message


@check
def check_logical_axis_rules(c: Config) -> Wrong:
    names: set[str] = set()
    for entry in c.sharding.logical_axis_rules:
        match entry:
            case [str(name), [*axes]] if all(isinstance(axis, str) for axis in axes):
                for axis in axes:
                    if axis not in MESH_AXES:
                        legal = f"{nearest(axis, MESH_AXES)}; they are {', '.join(MESH_AXES)}"
                        yield _AXIS_RULES, f"{entry}: there is no mesh axis {axis!r}{legal}"
                if len(set(axes)) < len(axes):
                    yield _AXIS_RULES, f"{entry} uses a mesh axis twice"
                if name in names:
                    yield _AXIS_RULES, f"{name!r} has more than one rule; merge them"
                names.add(name)
            case _:
                yield _AXIS_RULES, f"{entry} is not of the form [logical axis, [mesh axes]]"


@check
def check_expert_axis(c: Config) -> Wrong:
    size, experts = c.mesh.size("expert"), c.model.moe.experts
    axes_of = dict(c.sharding.logical_axis_rules)
    key = "mesh.ici.expert" if c.mesh.ici.expert > 1 else "mesh.dcn.expert"
    if size == 1:
        # Tokens travel over this axis alone.
        if experts and axes_of.get("expert") not in (None, [], ["expert"]):
            message = "experts can only be split over mesh axis expert; use [expert, [expert]]"
            yield _AXIS_RULES, message
    elif not experts:
        remedy = f"use 1 and mesh.ici.fsdp={size}, or set model.moe.experts"
        yield key, f"{size} devices have no experts to share; {remedy}"
    elif experts % size:
        legal = " or ".join(str(n) for n in divisors(experts) if n > 1) or "1"
        yield key, f"{size} devices do not divide model.moe.experts={experts}; use {legal}"
    else:
        rows = axes_of.get("activation_batch", [])
        if axes_of.get("expert") != ["expert"]:
            yield _AXIS_RULES, f"{key} splits experts over the axis; use [expert, [expert]]"
        if "expert" not in rows:
            remedy = f"use [activation_batch, [{', '.join([*rows, 'expert'])}]]"
            yield _AXIS_RULES, f"{key} splits rows of batches over the axis, too; {remedy}"


@check
def check_context(c: Config) -> Wrong:
    context = c.mesh.size("context")
    if context == 1:
        return
    # Attention gathers and sums over this axis.
    axes = dict(c.sharding.logical_axis_rules).get("activation_length", [])
    if axes != ["context"]:
        yield _AXIS_RULES, "mesh.*.context splits sequences; use [activation_length, [context]]"
    length, unit = c.data.sequence_length, 2 * context  # two chunks lie on every device
    if length % unit:
        legal = multiples_around(length, unit)
        message = f"{length} is not divisible by 2 x mesh.*.context = {unit}"
        yield "data.sequence_length", f"{message}; nearest legal: {legal}"


MODEL_RULES = (*EFFECT_RULES, *rules_in(globals()))
