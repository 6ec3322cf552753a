"""Read names of TPU slices: libtpu's, such as v5p:4x4x4, and the cloud's, such as v5p-128.

libtpu names a slice by its grid of chips. The cloud names it by a number, which counts TensorCores
on chips that have two of them (v4, v5p, tpu7x) and chips on the others (v5e, v6e).
"""

import functools
import math
import re
from dataclasses import dataclass

_CUBE = 4  # 3D slices of 64 chips or more are made of cubes of 4 x 4 x 4
_HOST = 2  # chips of a host in each of the first two dimensions
_SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")


@dataclass(frozen=True)
class Generation:
    """A kind of TPU, and how its slices are named.

    Attributes:
      name: libtpu's name.
      grids: the usual slices below one cube (3 dimensions), or all of them (2 dimensions).
      most_chips: chips of the largest slice.
      host_chips: chips of the largest slice that one host drives alone.
      aliases: other names of the kind.
      cores: what the number in the cloud's name counts, per chip.
      devices: JAX devices of a chip in libtpu's topologies.
    """

    name: str
    grids: tuple[str, ...]
    most_chips: int
    host_chips: int
    aliases: tuple[str, ...] = ()
    cores: int = 1
    devices: int = 1


_TPU7X = ("v7x", "tpu7", "v7", "ironwood")
_GENERATIONS = (
    Generation("v4", _SMALL, most_chips=4096, host_chips=4, cores=2),
    Generation("v5e", _FLAT, most_chips=256, host_chips=8, aliases=("v5litepod", "v5lite")),
    Generation("v5p", _SMALL, most_chips=6144, host_chips=4, cores=2),
    Generation("v6e", _FLAT, most_chips=256, host_chips=8, aliases=("trillium",)),
    Generation("tpu7x", _SMALL, 9216, host_chips=4, aliases=_TPU7X, cores=2, devices=2),
)
_BY_NAME = {name: entry for entry in _GENERATIONS for name in (entry.name, *entry.aliases)}
_EXAMPLES = ["v4:2x2x1", "v5e:4x4", "v5p:4x4x4", "v6e:8x8", "tpu7x:2x2x1"]
_NAME = re.compile(r"([a-z]+\d*[a-z]*\d*[a-z]*)([-:])(\d+(?:x\d+){0,2})")


def canonical_topology(name: str) -> str:
    """Return libtpu's name of a slice: v5p:4x4x4 for v5p-128, tpu7x:2x2x1 for ironwood:2x2x1.

    Raises:
      ValueError: the name has another form, or there is no slice of that size; the message has the
        nearest ones.
    """
    match = _NAME.fullmatch(name.lower())
    kind, number = (match[1], match[3]) if match else ("", "")
    generation = _BY_NAME.get(kind)
    if "x" in number:  # an older chip libtpu may know
        return f"{generation.name if generation else kind}:{number}"
    if generation is None:
        raise ValueError(
            f"{name!r} is neither cpu nor a chip and its grid, such as {', '.join(_EXAMPLES)}, or "
            "v5p-128 as the cloud names it; maxpipe.plan takes GPUs as well"
        )
    chips, odd = divmod(int(number), generation.cores)
    grid = _usual_grids(generation).get(chips)
    if odd or not grid:
        unit = "TensorCores" if generation.cores > 1 else "chips"
        near = ", ".join(_nearest_slices(generation, chips))
        raise ValueError(f"there is no slice of {number} {unit}; the nearest are {near}")
    return f"{generation.name}:{grid}"


def names_kind(topology: str) -> bool:
    """Return whether a topology begins with the name of a kind of TPU, or else has a grid."""
    match = _NAME.fullmatch(topology.lower())
    return re.split("[-:]", topology.lower())[0] in _BY_NAME or (
        match is not None and "x" in match[3]
    )


def explain_topology(name: str) -> str:
    """Return what a name was understood as, with its chips; empty if it is libtpu's name."""
    canonical = name if name in ("", "cpu") else canonical_topology(name)
    if canonical == name:
        return ""
    chips = num_chips(canonical)
    return f"compile.topology={name} is {canonical}, {chips} chip{'s' * (chips > 1)}"


@functools.cache
def _usual_grids(generation: Generation) -> dict[int, str]:
    """Return the usual grids by their number of chips, ascending; of cubes the most compact one."""
    grids = {_product(grid): grid for grid in generation.grids}
    if generation.grids == _FLAT:
        return grids
    for cubes in range(1, generation.most_chips // _CUBE**3 + 1):
        sizes = [
            (a, b, cubes // (a * b))
            for a in range(1, cubes + 1)
            if cubes % a == 0
            for b in range(a, cubes // a + 1)
            if cubes // a % b == 0 and cubes // (a * b) >= b
        ]
        grids[cubes * _CUBE**3] = "x".join(str(_CUBE * size) for size in min(sizes, key=sum))
    return grids


def _product(grid: str) -> int:
    return math.prod(map(int, grid.split("x")))


def _nearest_slices(generation: Generation, chips: int) -> list[str]:
    grids = _usual_grids(generation)
    below = [count for count in grids if count <= chips][-1:]
    above = [count for count in grids if count > chips][:1]
    return [
        f"{generation.name}-{count * generation.cores} ({generation.name}:{grids[count]})"
        for count in (*below, *above)
    ]


def examples_of(topology: str) -> list[str]:
    """Return usual slices near a canonical topology; of several kinds if its kind is unknown."""
    generation = _BY_NAME.get(topology.partition(":")[0])
    return _nearest_slices(generation, num_chips(topology)) if generation else _EXAMPLES


def num_chips(topology: str) -> int:
    """Return the number of chips of a canonical topology."""
    return _product(topology.partition(":")[2])


def num_devices(topology: str) -> int:
    """Return the number of JAX devices of a canonical topology."""
    generation = _BY_NAME.get(topology.partition(":")[0])
    return num_chips(topology) * (generation.devices if generation else 1)


def check_grid(topology: str) -> None:
    """Check that a canonical topology is a grid in which its chips are wired.

    Raises:
      ValueError: the chip is unknown, or its slices have other sizes or fewer chips.
    """
    name, _, grid = topology.partition(":")
    generation, sizes = _generation(name), [int(size) for size in grid.split("x")]
    dimensions, chips = len(generation.grids[0].split("x")), math.prod(sizes)
    reason = ""
    if len(sizes) != dimensions or min(sizes) < 1:
        reason = f"grids of {name} have {dimensions} dimensions"
    elif grid not in generation.grids and any(size % _HOST for size in sizes[:2]):
        reason = "a host holds 2x2 chips"
    elif chips > generation.most_chips:
        reason = f"it has {chips} chips; the largest slice has {generation.most_chips}"
    elif dimensions == 3 and chips > _CUBE**3 and any(size % _CUBE for size in sizes):
        reason = "slices above 64 chips are made of cubes of 4x4x4"
    if reason:
        usual = ", ".join(_nearest_slices(generation, max(chips, 1)))
        raise ValueError(f"{topology}: {reason}; usual slices: {usual}")


def slices_of(name: str) -> list[str]:
    """Return all usual slices of a kind of TPU, the smallest first: ["v5e:1x1", ...]; raises
    ValueError if there is no kind of this name.
    """
    generation = _generation(name.lower())
    return [f"{generation.name}:{grid}" for grid in _usual_grids(generation).values()]


def _generation(name: str) -> Generation:
    if name not in _BY_NAME:
        known = ", ".join(generation.name for generation in _GENERATIONS)
        raise ValueError(f"there is no chip {name!r} in the table; it has {known}")
    return _BY_NAME[name]


def hosts_of(topology: str) -> int:
    """Return how many hosts, and so processes, drive a canonical topology; at least 1."""
    generation = _BY_NAME.get(topology.partition(":")[0])
    chips = num_chips(topology)
    is_one_host = generation is None or chips <= generation.host_chips
    return 1 if is_one_host else -(-chips // _HOST**2)
