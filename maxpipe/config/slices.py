"""Read names of TPU slices: libtpu's, such as v5p:4x4x4, and the cloud's, such as v5p-128.

libtpu names a slice by its grid of chips. The cloud names it by a number, which counts TensorCores
on chips that have two of them (v4, v5p, tpu7x) and chips on the others (v5e, v6e).
"""

import functools
import math
import re
from dataclasses import dataclass

CUBE = 4  # 3D slices of 64 chips or more are made of cubes of 4 x 4 x 4
HOST = 2  # chips of a host in each of the first two dimensions


@dataclass(frozen=True)
class Generation:
    """A kind of TPU, and how its slices are named.

    Attributes:
      name: libtpu's name.
      grids: the usual slices below one cube (3 dimensions), or all of them (2 dimensions).
      most_chips: chips of the largest slice.
      host_chips: chips of the largest slice that one host drives alone.
      cores_per_chip: what the number in the cloud's name counts, per chip.
      devices_per_chip: JAX devices of a chip in libtpu's topologies.
      aliases: other names of the kind.
    """

    name: str
    grids: tuple[str, ...]
    most_chips: int
    host_chips: int
    cores_per_chip: int = 1
    devices_per_chip: int = 1
    aliases: tuple[str, ...] = ()


_SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
GENERATIONS = (
    Generation("v4", cores_per_chip=2, grids=_SMALL, most_chips=4096, host_chips=4),
    Generation("v5e", grids=_FLAT, aliases=("v5litepod", "v5lite"), most_chips=256, host_chips=8),
    Generation("v5p", cores_per_chip=2, grids=_SMALL, most_chips=6144, host_chips=4),
    Generation("v6e", grids=_FLAT, aliases=("trillium",), most_chips=256, host_chips=8),
    Generation(
        "tpu7x",
        cores_per_chip=2,
        devices_per_chip=2,
        grids=_SMALL,
        aliases=("v7x", "tpu7", "v7", "ironwood"),
        most_chips=9216,
        host_chips=4,
    ),
)
GPUS = ("a100", "h100", "h200", "b200")
_BY_NAME = {name: entry for entry in GENERATIONS for name in (entry.name, *entry.aliases)}
_NAME = re.compile(r"([a-z]+\d*[a-z]*\d*[a-z]*)([-:])(\d+(?:x\d+){0,2})")


def canonical_topology(name: str) -> str:
    """Return libtpu's name of a slice: v5p:4x4x4 for v5p-128, tpu7x:2x2x1 for ironwood:2x2x1.

    Raises:
      ValueError: the name has another form, or there is no slice of that size; the message has the
        nearest ones.
    """
    match = _NAME.fullmatch(name.lower())
    kind, number = (match[1], match[3]) if match else (name.lower(), "")
    generation = _BY_NAME.get(kind)
    if generation is None and "x" in number:
        return f"{kind}:{number}"  # an older chip, which libtpu may know
    if generation is None or match is None:
        raise ValueError(f"{name!r} {_misnamed(kind, number)}")
    if "x" in number:
        return f"{generation.name}:{number}"
    chips, odd = divmod(int(number), generation.cores_per_chip)
    grid = _usual_grids(generation).get(chips)
    if odd or not grid:
        unit = "TensorCores" if generation.cores_per_chip > 1 else "chips"
        near = ", ".join(nearest_slices(generation, chips))
        raise ValueError(f"there is no slice of {number} {unit}; the nearest are {near}")
    return f"{generation.name}:{grid}"


def _misnamed(kind: str, number: str) -> str:
    """Return what is wrong with the name of something that is not compiled for."""
    if kind == "cpu":
        return f"is maxpipe.plan's name; use compile.topology=cpu mesh.simulated_devices={number}"
    if kind in GPUS:
        command = f"python -m maxpipe.plan CONFIG.yml --topology {kind.upper()}:{number}"
        return f"names GPUs, which maxpipe.compile does not support; {command} predicts for them"
    if generation := _BY_NAME.get(kind):
        grid = _usual_grids(generation)[generation.host_chips]
        return f"has no grid; give one, such as {generation.name}:{grid}"
    examples = "v5e:4x4, v5p:4x4x4 or v6e:8x8, or v5p-128 as the cloud names it"
    return f"is neither cpu nor a chip and its grid, such as {examples}"


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
    for cubes in range(1, generation.most_chips // CUBE**3 + 1):
        sizes = [
            (a, b, cubes // (a * b))
            for a in range(1, cubes + 1)
            if cubes % a == 0
            for b in range(a, cubes // a + 1)
            if cubes // a % b == 0 and cubes // (a * b) >= b
        ]
        grids[cubes * CUBE**3] = "x".join(str(CUBE * size) for size in min(sizes, key=sum))
    return grids


def _product(grid: str) -> int:
    return math.prod(map(int, grid.split("x")))


def nearest_slices(generation: Generation, chips: int) -> list[str]:
    """Return up to two usual slices around a number of chips: "v5p-64 (v5p:2x4x4)"."""
    grids = _usual_grids(generation)
    below = [count for count in grids if count <= chips][-1:]
    above = [count for count in grids if count > chips][:1]
    return [
        f"{generation.name}-{count * generation.cores_per_chip} ({generation.name}:{grids[count]})"
        for count in (*below, *above)
    ]


def examples_of(topology: str) -> list[str]:
    """Return usual slices near a canonical topology; of several kinds if its kind is unknown."""
    generation = _BY_NAME.get(topology.partition(":")[0])
    if generation is None:
        return ["v4:2x2x1", "v5e:4x4", "v5p:4x4x4", "v6e:8x8", "tpu7x:2x2x1"]
    return nearest_slices(generation, num_chips(topology))


def num_chips(topology: str) -> int:
    """Return the number of chips of a canonical topology."""
    return _product(topology.partition(":")[2])


def num_devices(topology: str) -> int:
    """Return the number of JAX devices of a canonical topology."""
    generation = _BY_NAME.get(topology.partition(":")[0])
    return num_chips(topology) * (generation.devices_per_chip if generation else 1)


def check_grid(topology: str) -> None:
    """Check that a canonical topology is a grid in which its chips are wired.

    Raises:
      ValueError: the chip is unknown, or its slices have other sizes or fewer chips.
    """
    name, _, grid = topology.partition(":")
    if name not in _BY_NAME:
        known = ", ".join(generation.name for generation in GENERATIONS)
        raise ValueError(f"there is no chip {name!r} in the table; it has {known}")
    generation, sizes = _BY_NAME[name], [int(size) for size in grid.split("x")]
    dimensions = len(generation.grids[0].split("x"))
    chips = math.prod(sizes)
    legal = "; usual slices: " + ", ".join(nearest_slices(generation, max(chips, 1)))
    if len(sizes) != dimensions or min(sizes) < 1:
        raise ValueError(f"{topology}: grids of {name} have {dimensions} dimensions{legal}")
    if grid not in generation.grids and any(size % HOST for size in sizes[:2]):
        raise ValueError(f"{topology}: a host holds 2x2 chips{legal}")
    if chips > generation.most_chips:
        most = generation.most_chips
        raise ValueError(f"{topology} has {chips} chips; the largest slice has {most}{legal}")
    if dimensions == 3 and chips > CUBE**3 and any(size % CUBE for size in sizes):
        raise ValueError(f"{topology}: slices above 64 chips are made of cubes of 4x4x4{legal}")


def slices_of(name: str) -> list[str]:
    """Return all usual slices of a kind of TPU, the smallest first: ["v5e:1x1", ...].

    Raises:
      ValueError: there is no kind of this name.
    """
    if name.lower() not in _BY_NAME:
        known = ", ".join(generation.name for generation in GENERATIONS)
        raise ValueError(f"there is no kind of TPU {name!r}; there are {known}")
    generation = _BY_NAME[name.lower()]
    return [f"{generation.name}:{grid}" for grid in _usual_grids(generation).values()]


def hosts_of(topology: str) -> int:
    """Return how many hosts, and so processes, drive a canonical topology; at least 1."""
    generation = _BY_NAME.get(topology.partition(":")[0])
    chips = num_chips(topology)
    is_one_host = generation is None or chips <= generation.host_chips
    return 1 if is_one_host else -(-chips // HOST**2)
