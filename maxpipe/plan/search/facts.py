"""Collect what the closed forms need to know about a model, once for each way to split it.

Reading a model takes JAX, which traces one layer on shapes. Nothing after that needs JAX: the same
facts serve every candidate that splits the model alike.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TypeVar, cast

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
from maxpipe.plan.search.space import ENGINE, POLICY, SCANS, Axes
from maxpipe.sharding.collectives import CONTEXT_AXIS, EXPERT_AXIS

# Weights are gathered over these axes for the computation; experts stay where they are.
_WHOLE_IN_USE = frozenset(STORAGE_AXES) - {EXPERT_AXIS}


T = TypeVar("T")


class Facts:
    """What is known about one model, read when it is first needed.

    `platform` is JAX's name of the devices' platform, which decides kernels: by default that of
    `compile.topology`; with "" kernels are as configured.
    """

    def __init__(self, config: Config, platform: str | None = None, *, only_trained: bool = False):
        self.config = config
        self._platform = platform_of(config) if platform is None else platform
        self._only_trained = only_trained
        self._known: dict[tuple[object, ...], object] = {}
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
        sizes = tuple(
            n if name in self._splitting or name == "stage" else 1
            for name, n in zip(MESH_AXES, axes, strict=True)
        )
        return self._once(
            ("parameters", sizes),
            lambda: parameters_of(self._on(sizes), only_trained=self._only_trained),
        )

    def layer(self, axes: Axes) -> LayerCosts:
        key = self._splits(axes)
        return self._once(("layer", *key), lambda: layer_costs(self._on(*key), self._platform))

    def saving(self, axes: Axes, engine: str, policy: str, *, scans: bool) -> Saving:
        """Return what a policy saves on a device of a mesh; `scans` as in `Block`."""
        key = self._splits(axes)
        changes = {ENGINE: engine, POLICY: policy, SCANS: scans}
        return self._once(
            ("saving", *key, *changes.values()),
            lambda: saving_of(update(self._on(*key), changes)),
        )

    def _once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        return cast(T, self._known[key])

    def _splits(self, axes: Axes) -> tuple[Axes, int]:
        """Return what decides how a layer computes: sizes of axes that split it, and of context.

        Parts of a sequence decide the kernel of attention; other axes that do not split count as 1.
        """
        split = tuple(
            n if name in self._splitting and name not in _WHOLE_IN_USE else 1
            for name, n in zip(MESH_AXES, axes, strict=True)
        )
        return split, axes[MESH_AXES.index(CONTEXT_AXIS)]

    def _on(self, axes: Axes, parts: int = 0) -> Config:
        """Return the configuration on a mesh, with kernels for so many parts of sequences."""
        sizes = {f"mesh.ici.{axis}": n for axis, n in zip(MESH_AXES, axes, strict=True)}
        config = update(self.config, sizes | {f"mesh.dcn.{axis}": 1 for axis in MESH_AXES})
        if not parts or not self._platform:
            return config
        parted = update(config, {f"mesh.ici.{CONTEXT_AXIS}": parts})
        return replace(config, model=on_platform(parted, self._platform).model)
