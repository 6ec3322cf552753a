"""Compute how many parameters of a model's parts lie on one device."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.model.parameters import ParamSpec, outer_axes
from maxpipe.pipeline.weights import STORAGE_AXES, axes_in_use
from maxpipe.plan.layer_trace import model_program
from maxpipe.plan.number import Number
from maxpipe.sharding.rules import AxisRules, axes_of, without

Rules = tuple[tuple[str, tuple[str, ...]], ...]
Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model on one device, as numbers of values.

    "Gathered" ones are whole over all storage axes, those "over fsdp" over that axis alone.
    """

    at_rest: float  # all, as if layers divided evenly over the stages
    layer_at_rest: float
    layer_over_fsdp: float
    layer_gathered: float
    layer_outside: float  # those of a layer outside the pipeline, laid out for use
    ends_at_rest: float  # those of embedding and head
    ends_over_fsdp: float
    embed_gathered: float
    head_gathered: float
    embed_of_stage: float  # where it lies on the devices of one stage
    head_of_stage: float
    projection: float  # those that make logits, gathered
    shared_at_rest: float  # those of head and first dense layers, which lockstep stages share
    shared: float  # the same, gathered


@dataclass(frozen=True)
class StageParameters:
    """Parameters of a stage on one device, as numbers of values."""

    of: Parameters
    layers: Number  # in the stage's chunks; in one program all are as large as the largest
    rows: Number = 0.0  # places for layers outside the pipeline, used or padding
    outside: Number = 0.0  # layers outside the pipeline, which the stages share

    @property
    def stored(self) -> Number:
        """Return all parameters, with the rows of layers outside the pipeline."""
        return self.of.ends_at_rest + self.layers_at_rest + self.in_rows

    @property
    def at_rest(self) -> Number:
        """Return all parameters, with layers outside the pipeline laid out for use."""
        return self.of.ends_at_rest + self.layers_at_rest + self.outside_at_rest

    @property
    def layers_at_rest(self) -> Number:
        return self.layers * self.of.layer_at_rest

    @property
    def layers_gathered(self) -> Number:
        return self.layers * self.of.layer_gathered

    @property
    def over_fsdp(self) -> Number:
        return self.of.ends_over_fsdp + self.layers * self.of.layer_over_fsdp

    @property
    def in_rows(self) -> Number:
        return self.rows * self.of.layer_at_rest

    @property
    def outside_at_rest(self) -> Number:
        return self.outside * self.of.layer_outside

    @property
    def outside_gathered(self) -> Number:
        return self.outside * self.of.layer_gathered


def parameters_of(config: Config, *, only_trained: bool = False) -> Parameters:
    """Return the parameters of a resolved configuration on one device, all or the trained ones."""

    def part(name: str, whole_over: Collection[str] = (), **options: bool) -> float:
        return device_parameters(
            config, name, whole_over=whole_over, only_trained=only_trained, **options
        )

    def projection_and_first(whole_over: Collection[str] = ()) -> tuple[float, float]:
        # The part "embed" has the first dense layers as well.
        table = device_parameters(
            with_dense_layers(config), "embed", whole_over=whole_over, only_trained=only_trained
        )
        projection = table if config.model.tie_embeddings else part("head", whole_over)
        return projection, part("embed", whole_over) - table

    projection, first = projection_and_first(STORAGE_AXES)
    fsdp = ("fsdp",)
    return Parameters(
        at_rest=total_parameters(config, only_trained=only_trained),
        layer_at_rest=part("layers"),
        layer_over_fsdp=part("layers", fsdp),
        layer_gathered=part("layers", STORAGE_AXES),
        layer_outside=part("outside"),
        ends_at_rest=part("embed") + part("head"),
        ends_over_fsdp=part("embed", fsdp) + part("head", fsdp),
        embed_gathered=part("embed", STORAGE_AXES),
        head_gathered=part("head", STORAGE_AXES),
        embed_of_stage=part("embed", without_stages=True),
        head_of_stage=part("head", without_stages=True),
        projection=projection,
        shared_at_rest=sum(projection_and_first()),
        shared=projection + first,
    )


def device_parameters(
    config: Config,
    part: str,
    *,
    whole_over: Collection[str] = (),
    without_stages: bool = False,
    only_trained: bool = False,
) -> float:
    """Return the parameters of a part of the model that a device holds, all or the trained ones.

    Args:
      part: "embed", "head", "layers" for one layer, which lies on one stage, or "outside" for a
        layer outside the pipeline, laid out for use.
      whole_over: mesh axes over which the parameters are gathered.
      without_stages: whether the part lies on the devices of one stage, as on the MPMD engine.
    """
    sizes = dict(mesh_sizes(config))
    if without_stages or part == "layers":
        sizes["stage"] = 1
    mesh, is_outside = tuple(sizes.items()), part == "outside"
    rules = bound_rules(rules_of(config), mesh)
    specs: list[ParamSpec] = jax.tree.leaves(
        model_program(config.model).specs["layers" if is_outside else part],
        is_leaf=lambda leaf: isinstance(leaf, ParamSpec),
    )

    def shards(spec: ParamSpec) -> int:
        axes = outer_axes(spec) if is_outside else spec.axes
        gathered = {*whole_over} - axes_in_use(rules, spec)
        return num_shards(without(rules.spec(axes, spec.shape), gathered), mesh)

    return sum(
        math.prod(spec.shape) / shards(spec) for spec in specs if not (only_trained and spec.frozen)
    )


def total_parameters(
    config: Config, whole_over: Collection[str] = (), *, only_trained: bool = False
) -> float:
    """Return the parameters of all parts on one device; arguments as in `device_parameters`."""
    layers, *ends = (
        device_parameters(config, part, whole_over=whole_over, only_trained=only_trained)
        for part in ("layers", "embed", "head")
    )
    return layers * config.model.stacked_layers / config.mesh.size("stage") + sum(ends)


def with_dense_layers(config: Config) -> Config:
    return replace(config, model=config.model.dense)


def mesh_sizes(config: Config) -> Sizes:
    return tuple((axis, config.mesh.size(axis)) for axis in MESH_AXES)


def rules_of(config: Config) -> Rules:
    return tuple((name, tuple(axes)) for name, axes in config.sharding.logical_axis_rules)


def bound_rules(rules: Rules, sizes: Sizes) -> AxisRules:
    names, counts = zip(*sizes, strict=True)
    return AxisRules(rules, AbstractMesh(counts, names))


def num_shards(spec: PartitionSpec, sizes: Sizes) -> int:
    size_of = dict(sizes)
    return math.prod(size_of[axis] for axis in axes_of(spec))
