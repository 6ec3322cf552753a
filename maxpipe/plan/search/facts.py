"""Collect what the closed forms need to know about a model, once for each way to split it.

Reading a model takes JAX, which traces one layer on shapes. Nothing after that needs JAX: the same
facts serve every candidate that splits the model alike.
"""

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from maxpipe.config.options import update
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.pipeline.weights import STORAGE_AXES
from maxpipe.plan.device_parameters import Parameters, parameters_of, with_dense_layers
from maxpipe.plan.flops import model_flops_per_token
from maxpipe.plan.footprint import itemsize, on_platform, optimizer_bytes
from maxpipe.plan.layer_costs import LayerCosts, Saving, layer_costs, saving_of
from maxpipe.plan.layer_trace import trace_model
from maxpipe.plan.number import FLOAT32
from maxpipe.plan.search.machine import platform_of
from maxpipe.plan.search.space import Axes
from maxpipe.sharding.collectives import CONTEXT_AXIS, EXPERT_AXIS

# Weights are gathered over these axes for the computation; experts stay where they are.
_WHOLE_IN_USE = frozenset(STORAGE_AXES) - {EXPERT_AXIS}


class _Key(NamedTuple):
    """What decides how a layer computes.

    Attributes:
      axes: sizes of the axes that split it; 1 for the others.
      parts: parts of a sequence, by which the kernel of attention is chosen.
    """

    axes: Axes
    parts: int


class Facts:
    """What is known about one model, read when it is first needed.

    Args:
      config: the model, sequence length, logical axis rules and whatever candidates do not change.
      platform: JAX's name of the devices' platform, which decides kernels; "" to take kernels as
        configured. By default that of `compile.topology`.
      only_trained: whether frozen parameters are left out.
    """

    def __init__(self, config: Config, platform: str | None = None, *, only_trained: bool = False):
        self.config = config
        self._platform = platform_of(config) if platform is None else platform
        self._only_trained = only_trained
        self._parameters: dict[Axes, Parameters] = {}
        self._computing_on: dict[_Key, Config] = {}
        self._layers: dict[_Key, LayerCosts] = {}
        self._savings: dict[tuple[_Key, str, str, bool], Saving] = {}
        self._splitting = {
            axis
            for name, axes in config.sharding.logical_axis_rules
            if not str(name).startswith("activation_")
            for axis in axes
        }

    @cached_property
    def of_first_layers(self) -> "Facts | None":
        """Return the facts of a model of first dense layers alone; None if there are none."""
        if not self.config.model.first_dense_layers:
            return None
        return Facts(with_dense_layers(self.config), self._platform)

    @cached_property
    def trained(self) -> "Facts":
        """Return the facts of the parameters that have a gradient; these if all have one."""
        if not self.config.model.lora.rank:
            return self
        return Facts(self.config, self._platform, only_trained=True)

    @cached_property
    def model_flops_per_token(self) -> float:
        """Return the model FLOPs of a token, forward and backward."""
        return model_flops_per_token(self.config.model, self.config.data.sequence_length)

    @cached_property
    def head_flops(self) -> float:
        return trace_model(self.config.model, self.config.data.sequence_length).head_flops

    def least_state_bytes(self) -> float:
        """Return the bytes of parameters, optimizer state and gradients over all devices."""
        config = self.config
        each = itemsize(config.model.param_dtype) + optimizer_bytes(config) + FLOAT32
        return each * self.parameters((1,) * len(MESH_AXES)).at_rest

    def parameters(self, axes: Axes) -> Parameters:
        key = tuple(
            n if name in self._splitting or name == "stage" else 1
            for name, n in zip(MESH_AXES, axes, strict=True)
        )
        if key not in self._parameters:
            self._parameters[key] = parameters_of(self._on(key), only_trained=self._only_trained)
        return self._parameters[key]

    def layer(self, axes: Axes) -> LayerCosts:
        key = self._computing(axes)
        if key not in self._layers:
            self._layers[key] = layer_costs(self._computed(key), self._platform)
        return self._layers[key]

    def saving(self, axes: Axes, engine: str, policy: str, *, scans: bool) -> Saving:
        """Return what a policy saves on a device of a mesh; `scans` as in `Block`."""
        key = (self._computing(axes), engine, policy, scans)
        if key not in self._savings:
            changes = {
                "pipeline.engine": engine,
                "pipeline.remat_policy": policy,
                "pipeline.scan_layers": scans,
            }
            self._savings[key] = saving_of(update(self._computed(key[0]), changes))
        return self._savings[key]

    def _computing(self, axes: Axes) -> "_Key":
        split = tuple(
            n if name in self._splitting and name not in _WHOLE_IN_USE else 1
            for name, n in zip(MESH_AXES, axes, strict=True)
        )
        return _Key(split, axes[MESH_AXES.index(CONTEXT_AXIS)])

    def _computed(self, key: "_Key") -> Config:
        """Return the configuration, with kernels chosen, on a mesh that splits a layer by `key`."""
        if key not in self._computing_on:
            config = self._on(key.axes)
            if self._platform:
                parted = update(config, {f"mesh.ici.{CONTEXT_AXIS}": key.parts})
                config = replace(config, model=on_platform(parted, self._platform).model)
            self._computing_on[key] = config
        return self._computing_on[key]

    def _on(self, axes: Axes) -> Config:
        sizes = {f"mesh.ici.{axis}": n for axis, n in zip(MESH_AXES, axes, strict=True)}
        return update(self.config, sizes | {f"mesh.dcn.{axis}": 1 for axis in MESH_AXES})
