"""Fit the mesh to the devices, and propose meshes that fit when the configured one does not."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import islice

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import update
from maxpipe.config.rules.rule import Rule, Updates, apply_rules, distance, divisors
from maxpipe.config.sections import MESH_AXES, Config

LEVELS = ("ici", "dcn")
# Proposals use these axes only, at this cost per doubling or halving: splitting the data
# differently is the mildest change, and tensor parallelism across slices is never a good one.
_COSTS = {
    "ici": {"fsdp": 1.0, "data": 1.1, "stage": 1.6, "tensor": 2.5},
    "dcn": {"data": 1.0, "stage": 1.3, "fsdp": 1.5},
}
_MAX_TRIED = 200
_PROPOSALS = 3


def _sizes(c: Config, level: str) -> dict[str, int]:
    return dataclasses.asdict(getattr(c.mesh, level))


def _unknown(c: Config, level: str) -> list[str]:
    return [f"mesh.{level}.{axis}" for axis, size in _sizes(c, level).items() if size == -1]


def unknown_axes(c: Config) -> list[str]:
    """Return the full keys of the mesh axes that are still -1."""
    return [key for level in LEVELS for key in _unknown(c, level)]


def axes_problems(c: Config) -> list[Problem]:
    """Return a problem for each level of the mesh of which more than one axis is -1."""
    return [
        Problem(keys[-1], f"only one axis may be -1, not {' and '.join(keys)}")
        for level in LEVELS
        if len(keys := _unknown(c, level)) > 1
    ]


def fit_mesh(c: Config, num_devices: int, num_slices: int, rules: Sequence[Rule]) -> Config:
    """Return the config with the unknown axes filled in, for devices over all slices.

    Raises:
      ConfigError: a product differs from the number of devices per slice, or of slices; the message
        gives both numbers and up to three meshes that fit, first those that pass `rules`.
    """
    assert num_devices % num_slices == 0, (num_devices, num_slices)
    counts = {"ici": num_devices // num_slices, "dcn": num_slices}
    updates: Updates = {}
    wrong = []
    for level, count in counts.items():
        sizes = _sizes(c, level)
        left = max(1, count // math.prod(size for size in sizes.values() if size != -1))
        sizes = {axis: left if size == -1 else size for axis, size in sizes.items()}
        if math.prod(sizes.values()) == count:
            updates |= {f"mesh.{level}.{axis}": size for axis, size in sizes.items()}
        else:
            wrong.append(level)
    fitted = update(c, updates)
    if wrong:
        raise ConfigError(*(_mismatch(fitted, level, counts[level], rules) for level in wrong))
    return fitted


def _mismatch(c: Config, level: str, count: int, rules: Sequence[Rule]) -> Problem:
    sizes, others = _sizes(c, level), _sizes(c, "dcn")
    written = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
    product = math.prod(size for size in sizes.values() if size != -1)
    counted = "slices" if level == "dcn" else "devices"
    if level == "ici" and math.prod(others.values()) > 1:
        counted += " per slice"
    if count == 1:
        counted = counted.replace("devices", "device").replace("slices", "slice")
    relation = f"but there {'is' if count == 1 else 'are'}"
    relation = "which does not divide the" if -1 in sizes.values() else relation
    choices = "; ".join(
        " ".join(
            f"mesh.{level}.{axis}={new[axis]}"
            for axis in MESH_AXES
            if new[axis] > 1 or new[axis] != sizes[axis]
        )
        for new in _proposals(c, level, count, rules)
    )
    message = (
        f"{written or 'all axes 1'} makes {product}, {relation} {count} {counted}; "
        f"these fit: {choices}"
    )
    is_simulated = c.compile.topology in ("", "cpu") and (count == 1 or c.mesh.simulated_devices)
    if level == "ici" and is_simulated:
        # The least number of devices that the mesh divides and that is not below `count`.
        needed = -(-count // product) * product if -1 in sizes.values() else product
        needed *= math.prod(size for size in others.values() if size != -1)
        message += f" (mesh.simulated_devices={needed} makes a CPU pretend to have {needed})"
    return Problem(f"mesh.{level}", message)


def _proposals(c: Config, level: str, count: int, rules: Sequence[Rule]) -> list[dict[str, int]]:
    """Return the meshes of `count` nearest to the configured one, first those that pass `rules`."""
    old, costs = _sizes(c, level), _COSTS[level]

    def cost(new: dict[str, int]) -> float:
        axes = [axis for axis in costs if old[axis] != -1]
        return sum(distance(new[axis], old[axis]) * costs[axis] for axis in axes)

    def usable(new: dict[str, int]) -> bool:
        other = update(c, {f"mesh.{level}.{axis}": size for axis, size in new.items()})
        divides = c.model.num_kv_heads % other.mesh.size("tensor") == 0
        return divides and not apply_rules(rules, other, unknown_axes(other))[1]

    # Axes that are never proposed keep their size, if that is possible.
    fixed = {axis: size for axis, size in old.items() if axis not in costs and size > 1}
    if count % math.prod(fixed.values()):
        fixed = {}
    factorings = _factorings(count // math.prod(fixed.values()), list(costs))
    ranked = sorted((new | fixed for new in factorings), key=cost)
    best = list(islice(filter(usable, ranked[:_MAX_TRIED]), _PROPOSALS))
    return [*best, *(new for new in ranked if new not in best)][:_PROPOSALS]


def _factorings(count: int, axes: list[str]) -> Iterator[dict[str, int]]:
    if len(axes) == 1:
        yield dict.fromkeys(MESH_AXES, 1) | {axes[0]: count}
        return
    for size in divisors(count):
        for others in _factorings(count // size, axes[1:]):
            yield others | {axes[0]: size}
