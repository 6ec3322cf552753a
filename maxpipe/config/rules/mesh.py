"""Fit the mesh to the devices, and propose meshes that fit when the configured one does not."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import COMMAND_LINE
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
_TYPED = 3.0  # times as much for an axis on the command line
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


def fit_mesh(
    c: Config, num_devices: int, num_slices: int, rules: Sequence[Rule], sources: Mapping[str, str]
) -> Config:
    """Return the config with the unknown axes filled in, for devices over all slices.

    Raises:
      ConfigError: a product differs from the number of devices per slice, or of slices; the message
        gives both numbers and up to three meshes that fit, first those that break no more `rules`,
        and near to what `sources`, of the keys' values, say was typed. Problems that the first of
        them leaves follow.
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
        problems = [_mismatch(fitted, level, counts[level], rules, sources) for level in wrong]
        raise ConfigError(*dict.fromkeys(chain.from_iterable(problems)))
    return fitted


def _mismatch(
    c: Config, level: str, count: int, rules: Sequence[Rule], sources: Mapping[str, str]
) -> list[Problem]:
    """Return the problem of a level, then those that the first mesh it proposes would leave."""
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
    proposals, left = _proposals(c, level, count, rules, sources)
    choices = "; ".join(
        " ".join(
            f"mesh.{level}.{axis}={new[axis]}"
            for axis in MESH_AXES
            if new[axis] > 1 or new[axis] != sizes[axis]
        )
        for new in proposals
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
    return [Problem(f"mesh.{level}", message), *left]


def _proposals(
    c: Config, level: str, count: int, rules: Sequence[Rule], sources: Mapping[str, str]
) -> tuple[list[dict[str, int]], list[Problem]]:
    """Return the meshes of `count` nearest to the configured one, first those with no problem that
    is not there now, and the problems that the first of them leaves.
    """
    old, costs = _sizes(c, level), {**_COSTS[level]}
    for axis in costs:
        costs[axis] *= _TYPED if sources.get(f"mesh.{level}.{axis}") == COMMAND_LINE else 1

    def cost(new: dict[str, int]) -> float:
        axes = [axis for axis in costs if old[axis] != -1]
        return sum(distance(new[axis], old[axis]) * costs[axis] for axis in axes)

    def with_mesh(new: dict[str, int]) -> Config:
        return update(c, {f"mesh.{level}.{axis}": size for axis, size in new.items()})

    def problems(new: dict[str, int]) -> list[Problem]:
        return apply_rules(rules, with_mesh(new), unknown_axes(with_mesh(new)))[1]

    # What another mesh does not solve must not decide which one is proposed.
    present = problems(old)

    def usable(new: dict[str, int]) -> bool:
        divides = c.model.num_kv_heads % with_mesh(new).mesh.size("tensor") == 0
        return divides and all(problem in present for problem in problems(new))

    # Axes that are never proposed keep their size, if that is possible.
    fixed = {axis: size for axis, size in old.items() if axis not in costs and size > 1}
    if count % math.prod(fixed.values()):
        fixed = {}
    factorings = _factorings(count // math.prod(fixed.values()), list(costs))
    ranked = sorted((new | fixed for new in factorings), key=cost)
    best = list(islice(filter(usable, ranked[:_MAX_TRIED]), _PROPOSALS))
    best = [*best, *(new for new in ranked if new not in best)][:_PROPOSALS]
    return best, [problem for problem in problems(best[0]) if problem in present]


def _factorings(count: int, axes: list[str]) -> Iterator[dict[str, int]]:
    if len(axes) == 1:
        yield dict.fromkeys(MESH_AXES, 1) | {axes[0]: count}
        return
    for size in divisors(count):
        for others in _factorings(count // size, axes[1:]):
            yield others | {axes[0]: size}
