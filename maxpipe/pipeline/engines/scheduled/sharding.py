"""Lay out the arrays of the scheduled engine's program, and say what follows from the layout.

The program's collectives are written for one layout: rows of a batch over data, fsdp and expert,
layers over stage, columns of the embedding table over any of them. Every other dimension is free.
"""

from collections.abc import Iterable

from jax.sharding import Mesh, PartitionSpec

from maxpipe.config import ConfigError, PipelineConfig, Problem
from maxpipe.model.parameters import Params, ParamSpec, map_specs, trainable
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.engines.base import EngineInputs
from maxpipe.pipeline.layout import LAYER_AXES
from maxpipe.pipeline.manual import ROW_AXES, is_manual, manual_part
from maxpipe.pipeline.weights import spec_for_use
from maxpipe.sharding.collectives import CONTEXT_AXIS
from maxpipe.sharding.rules import AXIS_RULES_KEY, axes_of


def skips_idle(config: PipelineConfig, mesh: Mesh) -> bool:
    """Return whether idle slots are skipped: `pipeline.skip_idle`, with auto where it saves time.

    On a real pod a slot that is computed and masked costs nothing: other stages need that time.
    Simulated devices share cores, so there it does; but a conditional must not hold collectives,
    which the partitioner may insert over automatic axes of several devices.
    """
    if config.skip_idle != "auto":
        return config.skip_idle == "true"
    return mesh.devices.flat[0].platform == "cpu" and is_manual(mesh)


def check_rules(engine_inputs: EngineInputs) -> None:
    """Refuse rules that count rows twice, or leave a device without layers or vocabulary."""
    rules, shape = engine_inputs.rules, engine_inputs.mesh.shape
    required = {
        # Losses and gradients are summed over these, so a row on two devices would count twice.
        "activation_batch": [axis for axis in ROW_AXES if shape[axis] > 1],
        # A device loops over all V x L layers of its stage.
        **{name: [name] if name == "stage" and shape[name] > 1 else [] for name in LAYER_AXES},
    }
    laid = {name: axes_of(manual_part(rules.spec((name,)))) for name in required}
    # Attention gathers over no other manual axis; without that one each device has all tokens.
    tokens = axes_of(manual_part(rules.spec(("activation_length",))))
    if not tokens <= {CONTEXT_AXIS}:
        required["activation_length"], laid["activation_length"] = [CONTEXT_AXIS], tokens
    problems = [
        f"the scheduled engine lays {name} over {_names(axes)}, not {_names(laid[name])}; use "
        f"[{name}, [{', '.join(axes)}]]"
        for name, axes in required.items()
        if laid[name] != set(axes)
    ]
    # Rows of the embedding table, its vocabulary, lie over no manual axis: every device looks up
    # any token, in its own columns.
    table = engine_inputs.program.specs["embed"]["embedding"]
    if split := axes_of(manual_part(PartitionSpec(rules.spec(table.axes, table.shape)[0]))):
        problems.append(
            f"the scheduled engine spreads columns of the embedding table over {_names(split)}, "
            f"not rows; take these mesh axes from {table.axes[0]!r} and give them to "
            f"{table.axes[1]!r}"
        )
    if problems:
        raise ConfigError(*(Problem(AXIS_RULES_KEY, text) for text in problems))


def batch_specs(engine_inputs: EngineInputs) -> dict[str, PartitionSpec]:
    spec = engine_inputs.rules.spec(("activation_batch", "activation_length"))
    return microbatches.specs(manual_part(spec))


def with_first(params: Params) -> Params:
    """Return {"embed", ...} with its first dense layers as a separate part, "first".

    A stage looks up its columns of the embedding table only, but applies whole layers.
    """
    embed = dict(params["embed"])
    return params | {"first": embed.pop("first", {}), "embed": embed}


def trained_parts(specs: Params, parts: Params) -> Params:
    """Return parts of the parameters, named as in `param_specs`, with None for frozen ones."""
    names = {"outside": "layers"}
    return {
        name: trainable(specs[names.get(name, name)], part) if part else part
        for name, part in parts.items()
    }


def param_specs(engine_inputs: EngineInputs) -> Params:
    """Return the PartitionSpec of every parameter that the program takes.

    Leaves of "layers" are [V + E, S, L, ...], those of "outside" [num_outside, ...].
    """
    rules, leading = engine_inputs.rules, engine_inputs.layout.shape

    def outer(spec: ParamSpec) -> PartitionSpec:
        return manual_part(rules.spec(spec.axes, spec.shape))

    def layer(spec: ParamSpec) -> PartitionSpec:
        return manual_part(rules.spec(LAYER_AXES + spec.axes, leading + spec.shape))

    def outside(spec: ParamSpec) -> PartitionSpec:
        return PartitionSpec(None, *manual_part(spec_for_use(rules, spec)))

    specs = with_first(engine_inputs.program.specs)
    has_outside = engine_inputs.layout.num_outside > 0
    return {
        "embed": map_specs(outer, specs["embed"]),
        "first": map_specs(outer, specs["first"]),
        "head": map_specs(outer, specs["head"]),
        "layers": map_specs(layer, specs["layers"]),
        "outside": map_specs(outside, specs["layers"]) if has_outside else {},
    }


def _names(axes: Iterable[str]) -> str:
    return " and ".join(sorted(axes)) or "no axis"
