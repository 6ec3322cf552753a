"""Find the collectives that a compiled step runs: kind, mesh axes, how often, how many bytes."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from maxpipe.compile.hlo import Computation, Instruction, Module, array_bytes, executions
from maxpipe.devices.chips import Chip, slice_of
from maxpipe.devices.mesh import crossing_axes
from maxpipe.plan.links import links_along

_SLICE = 100000  # libtpu's number of a device: _SLICE * its slice + its place there
COLLECTIVE_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_NAMED = rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\({_IOTA}\))? \{{((?:'\w+',?)+)\}}"
# On TPUs, computations of this name hold part of a collective and what runs at the same time.
ASYNC_FUSION = "async_collective_fusion"


@dataclass
class Collective:
    """All collectives of one kind over the same mesh axes.

    Attributes:
      kind: HLO name of the operation.
      axes: mesh axes over which devices exchange data, such as "fsdp" or "data,fsdp".
      network: "ici", or "dcn" if some group spans slices.
      count: how many of them a step runs.
      bytes: size of the operands on one device, over a step.
      sent_bytes: bytes that one device sends in a step with the usual ring algorithms.
    """

    kind: str
    axes: str
    network: str
    count: float
    bytes: float
    sent_bytes: float


class Transfer(NamedTuple):
    """One collective, and the partitions of a slice that exchange data; none between slices."""

    collective: Collective
    groups: Sequence[Sequence[int]] = ()


class Transfers:
    """Reads the collectives of a program for a mesh, in whose order partitions are numbered."""

    def __init__(self, mesh: Mesh) -> None:
        self._shape = slice_shape(mesh)
        self._dcn_axes = ",".join(crossing_axes(mesh))
        self._num_slices = len(np.unique(_slices(mesh)))

    def of(self, computation: Computation, instruction: Instruction) -> Transfer | None:
        """Return the collective that an instruction is or starts, or None."""
        if kind := _between_slices(instruction):
            size = array_bytes(instruction.type)[0]
            sent = sent_bytes(kind, size, _slices_of_group(instruction, self._num_slices))
            return Transfer(Collective(kind, self._dcn_axes, "dcn", 1, size, sent))
        if kind := _within_slice(computation, instruction):
            groups = groups_of(instruction, math.prod(self._shape.values()))
            size = operand_bytes(computation, instruction)
            sent = sent_bytes(kind, size, max(map(len, groups), default=1))
            axes = axes_of(groups, self._shape)
            return Transfer(Collective(kind, axes, "ici", 1, size, sent), groups)
        return None


def find_collectives(
    module: Module, mesh: Mesh, branch_runs: Callable[[float], float] = lambda runs: runs
) -> list[Collective]:
    """Return every collective of a compiled step, the largest sender first."""
    transfers = Transfers(mesh)
    return summed(
        (runs, transfer.collective)
        for computation, instruction, runs in executions(module, branch_runs)
        if (transfer := transfers.of(computation, instruction))
    )


def summed(runs: Iterable[tuple[float, Collective]]) -> list[Collective]:
    """Return the sums of collectives that run so often, the largest sender first."""
    totals: dict[tuple[str, str, str], Collective] = {}
    for times, c in runs:
        key = c.kind, c.axes, c.network
        total = totals.setdefault(key, Collective(*key, 0.0, 0.0, 0.0))
        total.count += times * c.count
        total.bytes += times * c.bytes
        total.sent_bytes += times * c.sent_bytes
    return sorted(totals.values(), key=lambda c: -c.sent_bytes)


def _within_slice(computation: Computation, instruction: Instruction) -> str | None:
    """Return the kind of the collective that an instruction is or starts, or None.

    On TPUs a reduce-scatter is a fusion of an all-reduce and a slice. A collective that was started
    earlier has a part in each fusion that runs meanwhile. The names of the fusions tell both cases.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in COLLECTIVE_KINDS or computation.name.startswith(ASYNC_FUSION):
        return None
    if opcode == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
        return "reduce-scatter"
    return opcode


def _between_slices(instruction: Instruction) -> str | None:
    """Return the kind of the collective whose traffic between slices a `send` carries, or None.

    TPUs hand data that crosses slices to their hosts, in sends with the kind of the collective as
    an attribute.
    """
    if instruction.opcode != "send":
        return None
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    if transfer is None:
        return None
    kind = transfer[1].lower().replace("_", "-")
    return kind if kind in COLLECTIVE_KINDS else "collective-permute"


def _slices_of_group(send: Instruction, num_slices: int) -> int:
    """Return how many slices exchange data; all of them if the text does not say.

    It lists groups of devices, each as 100000 * slice + place in the slice, or all slices and
    places: `{{100000,200000},{100001,200001}}` or `"{1,2}x{0:3}"`.
    """
    target = re.search(r'_xla_megascale_target="?\{+([\d,]+)\}', send.attributes)
    if target is None:
        return num_slices
    numbers = _numbers(target[1])
    return len({number // _SLICE for number in numbers} if max(numbers) >= _SLICE else numbers)


def slice_shape(mesh: Mesh) -> dict[str, int]:
    """Return the sizes of the mesh axes in one slice, each of which runs a program of its own."""
    slices = _slices(mesh)
    is_first = slices == slices.flat[0]
    counts = []
    for axis in range(is_first.ndim):
        line = np.moveaxis(is_first, axis, -1)[(0,) * (is_first.ndim - 1)]
        counts.append(int(line.sum()))
    return dict(zip(mesh.axis_names, counts, strict=True))


def _slices(mesh: Mesh) -> np.ndarray:
    slices: np.ndarray = np.vectorize(slice_of)(mesh.devices)
    return slices


def operand_bytes(computation: Computation, instruction: Instruction) -> int:
    """Return the bytes of the operands on one device; if their types are unknown, of the result.

    For a ragged collective these are the bytes that may travel: the smaller of the buffers that a
    device sends from and receives into.
    """
    types = [
        computation.instructions[n].type
        for n in instruction.operands
        if n in computation.instructions
    ]
    # Some texts give the types between the parentheses.
    sizes = [s for t in types for s in array_bytes(t)] or array_bytes(instruction.arguments)
    if instruction.opcode.startswith("ragged"):
        return min(sizes[:2])
    return sum(sizes) or max(array_bytes(instruction.type), default=0)


def sent_bytes(kind: str, operand: float, size: int) -> float:
    """Return the bytes that each device of a group of `size` sends for an operand."""
    if size <= 1:
        return 0.0
    share = (size - 1) / size
    factor = {
        "all-gather": size - 1,
        "all-reduce": 2 * share,
        "collective-permute": 1,
        "collective-broadcast": 1,
    }
    return operand * factor.get(kind, share)


def groups_of(instruction: Instruction, num_devices: int) -> list[list[int]]:
    """Return groups of partitions that exchange data; for permutes (source, target)."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", instruction.attributes):
        return [[int(n) for n in p.split(",")] for p in re.findall(r"\{?(\d+,\d+)\}?", pairs[1])]
    if iota := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", instruction.attributes):
        return _iota(iota[2], iota[3]).reshape(_numbers(iota[1])).tolist()
    if named := re.search(_NAMED, instruction.attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        inside, names = re.findall(r"\w+", named[4]), list(sizes)
        ids = _iota(named[2], named[3]) if named[2] else np.arange(num_devices)
        outside_first = sorted(names, key=lambda name: inside.index(name) if name in inside else -1)
        ids = ids.reshape([*sizes.values()]).transpose(
            [names.index(name) for name in outside_first]
        )
        return ids.reshape(-1, math.prod(sizes[name] for name in inside)).tolist()
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", instruction.attributes):
        return [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", listed[1])]
    return [list(range(num_devices))]


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Return 0, 1, ... in an array of `sizes`, its axes transposed to `order`."""
    ids = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def axes_of(groups: Sequence[Sequence[int]], sizes: Mapping[str, int]) -> str:
    """Return the mesh axes along which members of a group differ; "" for groups of one."""
    shape = tuple(sizes.values())
    differing = np.zeros(len(shape), bool)
    for group in groups:
        places = np.array(np.unravel_index(np.asarray(group), shape))
        differing |= (places != places[:, :1]).any(axis=1)
    return ",".join(name for name, differs in zip(sizes, differing, strict=True) if differs)


PERMUTE = "collective-permute"


@dataclass(frozen=True)
class LinkUse:
    """Traffic of one device over one set of mesh axes in a step.

    Attributes:
      network: "ici", or "dcn" between slices.
      kind: "permutes" between neighbours, or "collectives" of groups.
      links: links of a chip that groups along all of the axes can use, though groups along some
        of them may not; None on DCN, where each chip has a share of its host's network cards.
      of: number of all links of a chip; None on DCN.
      seconds: least time to send the bytes; None if the bandwidth is unknown.
    """

    axes: str
    network: str
    kind: str
    links: int | None
    of: int | None
    sent_bytes: float
    seconds: float | None


def link_uses(collectives: Sequence[Collective], mesh: Mesh, chip: Chip) -> list[LinkUse]:
    """Return the traffic over each set of mesh axes, the slowest first."""
    sent: dict[tuple[str, str, str], float] = {}
    for collective in collectives:
        if collective.sent_bytes:
            kind = "permutes" if collective.kind == PERMUTE else "collectives"
            place = (collective.axes, collective.network, kind)
            sent[place] = sent.get(place, 0.0) + collective.sent_bytes
    uses = [_use(mesh, chip, *place, size) for place, size in sent.items()]
    return sorted(uses, key=lambda use: -(use.seconds or 0.0))


def network_seconds(uses: Sequence[LinkUse], chip: Chip) -> float | None:
    """Return the least seconds for all traffic of a step; None if a needed bandwidth is unknown.

    That is the time of the slowest set of axes, or, if longer, of all traffic within a slice spread
    over all links of a chip.
    """
    seconds = [use.seconds for use in uses]
    known = [time for time in seconds if time is not None]
    if len(known) < len(seconds):
        return None
    within = sum(use.sent_bytes for use in uses if use.network == "ici")
    return max([*known, within / chip.ici_bandwidth])


def _use(mesh: Mesh, chip: Chip, axes: str, network: str, kind: str, size: float) -> LinkUse:
    if network == "dcn":
        seconds = size / chip.dcn_bandwidth if chip.dcn_bandwidth else None
        return LinkUse(axes, network, kind, None, None, size, seconds)
    links = links_along(mesh, chip, axes, between_neighbours=kind == "permutes")
    return LinkUse(
        axes, network, kind, links, chip.links, size, size / (links * chip.link_bandwidth)
    )
