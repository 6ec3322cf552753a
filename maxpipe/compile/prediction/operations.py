"""Price the operations of a scheduled program: computation, copies, transfers between chips.

XLA writes an estimate of cycles next to almost every fusion. What carries none is priced here:
attention kernels by their FLOPs, other kernels by the FLOPs and bytes that they state, transfers by
their bytes and links, the rest by the bytes of its result through memory, which is called a guess.
A matrix product or a kernel that cannot be priced is reported, not guessed.
"""

import math
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from jax.sharding import Mesh

from maxpipe.compile.collectives import PERMUTE, Transfers, operand_bytes
from maxpipe.compile.hlo import PRODUCTS, Computation, Instruction, Module, array_bytes, arrays
from maxpipe.compile.prediction.constants import Constants
from maxpipe.devices.chips import Chip, devices_per_chip
from maxpipe.model.experts.exchange import SPARSE_CALL
from maxpipe.model.kernels.splash import filled
from maxpipe.plan.jaxpr_flops import visible_blocks
from maxpipe.plan.links import group_links

_HOST = "S(5)"  # memory space in the layout of arrays on the host
_INDEX_BYTES = 64  # operands of a slice up to this size say where it begins


class Part(StrEnum):
    MATRIX_PRODUCTS = "matrix products"
    ATTENTION = "attention kernels"
    LOOP_FUSIONS = "loop fusions"
    COPIES = "copies"
    COLLECTIVES = "collectives"


class Price(NamedTuple):
    """What an operation costs.

    Attributes:
      seconds: how long it takes; None if that is unknown.
      collective: HLO name of the collective, such as "all-gather"; "" for other operations.
      is_estimated: whether the seconds are the compiler's estimate.
      is_guess: whether they are only its bytes over the memory's bandwidth, without an estimate.
      links: the links that the collective sends over, or the memory that a copy passes through; ""
        if it is not a transfer. Transfers over the same links wait for each other.
    """

    part: Part
    seconds: float | None
    collective: str = ""
    axes: str = ""
    is_estimated: bool = False
    is_guess: bool = False
    links: str = ""


_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')  # a negative one is no estimate
_PAIRS = re.compile(r"\bsource_target_pairs=(\{[{}\d,]*\})")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_STATED = re.compile(r'"cost_estimate":\{"flops":"(\d+)".*?"bytes_accessed":"(\d+)"')
_SPARSE = re.compile(rf"{SPARSE_CALL}(\d+)_of_(\d+)")
_KERNEL = "tpu_custom_call"
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id",
    "after-all", "opt-barrier", "domain", "add-dependency", "recv",
}  # fmt: skip
# The compiler's own custom calls that only name, join or mark existing values.
_NO_WORK = {
    "AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast",
    "GatherScatterIndicesBitpacked", "PrepareAsyncCallDone", "PrepareAsyncCallStart", "Sharding",
    "SliceId", "X64Combine", "ZeroCrop",
}  # fmt: skip


class Prices:
    """Prices the instructions of one program."""

    def __init__(self, module: Module, mesh: Mesh, chip: Chip, constants: Constants):
        self._module = module
        self._mesh = mesh
        self._chip = chip
        self._constants = constants
        self._transfers = Transfers(mesh)
        self._links: dict[tuple[int, ...], float] = {}
        self._devices_per_chip = devices_per_chip(mesh.devices.reshape(-1).tolist())
        self._contains: dict[str, bool] = {}

    def of(self, computation: Computation, instruction: Instruction) -> Price | None:
        """Return the price of an instruction; None for one that does no work of its own."""
        if instruction.opcode in _FREE:
            return None
        if cycles := _CYCLES.search(instruction.attributes):
            seconds = int(cycles[1]) / self._constants.clock
            return Price(self._part(instruction), seconds, is_estimated=True)
        if collective := self.collective(computation, instruction):
            return collective
        if instruction.opcode == "custom-call":
            return self._kernel(computation, instruction)
        if self._part(instruction) is Part.MATRIX_PRODUCTS:
            return Price(Part.MATRIX_PRODUCTS, None)
        part = Part.COPIES if instruction.opcode == "copy" else Part.LOOP_FUSIONS
        moved = _moved_bytes(computation, instruction)
        return Price(part, moved / self._constants.hbm_bandwidth, is_guess=True)

    def collective(self, computation: Computation, instruction: Instruction) -> Price | None:
        """Return the price of a collective, its start or a fusion around one; None for others."""
        for inside, candidate in self._candidates(computation, instruction):
            if transfer := self._transfers.of(inside, candidate):
                moved, groups = transfer
                kind, axes = moved.kind, moved.axes
                if moved.network == "dcn":
                    bandwidth, links = self._constants.dcn_bandwidth or 0.0, axes
                else:
                    # A permute sends to one neighbour, over one link of the chip.
                    share = 1 / self._devices_per_chip
                    used = share if kind == PERMUTE else self._links_of(groups)
                    bandwidth = used * self._constants.link_bandwidth
                    # Permutes to different neighbours go over different links.
                    pairs = _PAIRS.search(candidate.attributes)
                    links = f"{axes} {pairs[1]}" if pairs else axes
                seconds = moved.sent_bytes / bandwidth if bandwidth else None
                return Price(Part.COLLECTIVES, seconds, kind, axes, links=links)
        return None

    def transfer(self, computation: Computation, instruction: Instruction) -> Price:
        """Return the price of an asynchronous start: a collective, or a copy within the chip."""
        if collective := self.collective(computation, instruction):
            return collective
        # A copy moves its operand; a slice moves the smaller of operand and result.
        moved = min(
            operand_bytes(computation, instruction),
            max(array_bytes(instruction.type), default=0) or math.inf,
        )
        if instruction.opcode == "slice-start" or "slice" in instruction.name:
            moved = min([moved, *(n for n in array_bytes(instruction.type) if n > _INDEX_BYTES)])
        # Copies share the bandwidth of the chip's memory; the host's memory has its own.
        queue = "host" if _HOST in instruction.type else "memory"
        return Price(Part.COPIES, moved / self._constants.hbm_bandwidth, links=queue)

    def channel(self, instruction: Instruction) -> str:
        """Return what identifies a transfer at both ends; for a fusion, of the collective inside.

        Between slices it is the name of a rendezvous, else the number of a channel; "" if there
        is neither.
        """
        names = instruction.called().get("calls", []) if instruction.opcode == "fusion" else []
        texts = [instruction.attributes] + [
            inner.attributes
            for name in names
            for inner in self._module.computations[name].instructions.values()
        ]
        matches = (_RENDEZVOUS.search(text) or _CHANNEL.search(text) for text in texts)
        return next((match[1] for match in matches if match), "")

    def _candidates(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[tuple[Computation, Instruction]]:
        """Yield an instruction, and the instructions that a fusion or a start wraps.

        A call that is started asynchronously runs on the chip's sparse cores.
        """
        yield computation, instruction
        if instruction.opcode in ("fusion", "async-start", "call-start"):
            called = instruction.called()
            for name in (*called.get("calls", ()), *called.get("to_apply", ())):
                inside = self._module.computations[name]
                for inner in inside.instructions.values():
                    yield inside, inner

    def _links_of(self, groups: Sequence[Sequence[int]]) -> float:
        """Return the links of a device in these groups, each perhaps a part of a mesh axis."""
        key: tuple[int, ...] = max(map(tuple, groups), key=len, default=())
        if len(key) < 2:
            return self._chip.links / self._devices_per_chip
        if key not in self._links:
            self._links[key] = group_links(self._mesh, self._chip, groups)
        return self._links[key]

    def _part(self, instruction: Instruction) -> Part:
        opcode = instruction.opcode
        if opcode in PRODUCTS or any(
            self._has_product(name) for name in instruction.called().get("calls", [])
        ):
            return Part.MATRIX_PRODUCTS
        return Part.COPIES if opcode in ("copy", "transpose") else Part.LOOP_FUSIONS

    def _has_product(self, name: str) -> bool:
        if name not in self._contains:
            inside = self._module.computations.get(name)
            self._contains[name] = inside is not None and any(
                inner.opcode in PRODUCTS
                or any(self._has_product(n) for n in inner.called().get("calls", []))
                for inner in inside.instructions.values()
            )
        return self._contains[name]

    def _kernel(self, computation: Computation, instruction: Instruction) -> Price | None:
        target = _TARGET.search(instruction.attributes)
        if target and target[1] in _NO_WORK:
            return None
        if not target or target[1] != _KERNEL or not is_attention(instruction):
            return self._stated(computation, instruction)
        flops = attention_flops(computation, instruction)
        peak = self._constants.attention_efficiency * self._constants.peak_flops
        return Price(Part.ATTENTION, None if flops is None else flops / peak)

    def _stated(self, computation: Computation, instruction: Instruction) -> Price:
        """Return the price of a custom call that states its FLOPs and bytes, as megablox does."""
        stated = _STATED.search(instruction.attributes)
        if not stated:
            return Price(Part.LOOP_FUSIONS, None)
        flops, moved = float(stated[1]), float(stated[2])
        known = computation.instructions
        types = [instruction.type, *(known[n].type for n in instruction.operands if n in known)]
        operated = [array for text in types for array in arrays(text)]
        shapes = [sizes for sizes, _ in operated]
        used, rows = self._sparse_rows(instruction, shapes) or (1, 1)
        share = used / rows  # it skips the other rows
        efficiency = self._constants.attention_efficiency
        if tiles := row_tiles(shapes):
            efficiency = self._constants.grouped_efficiency
            flops *= (share * tiles.filled + tiles.shared) / tiles.filled
            visited = (share * tiles.filled + tiles.shared) / (tiles.filled + tiles.shared)
            # Forward and the gradient of rows read an expert's weights for each tile.
            written = sum(size for sizes, size in operated[:1] if len(sizes) == 3)
            moved = written + visited * max(0.0, moved - written)
        else:
            with_rows = sum(size for sizes, size in operated if rows in sizes)
            flops, moved = share * flops, max(0.0, moved - (1 - share) * with_rows)
        seconds = max(
            flops / (efficiency * self._constants.peak_flops),
            moved / self._constants.hbm_bandwidth,
        )
        return Price(Part.MATRIX_PRODUCTS, seconds)

    def _sparse_rows(
        self, instruction: Instruction, shapes: Sequence[Sequence[int]]
    ) -> tuple[int, int] | None:
        """Return how many rows a kernel uses and how many there are; None if it uses all.

        XLA drops the name of some kernels; these are taken to be like others with as many rows.
        """
        if named := _SPARSE.search(instruction.attributes):
            return int(named[1]), int(named[2])
        sizes = {size for shape in shapes for size in shape}
        return next(((used, rows) for rows, used in self._used_rows.items() if rows in sizes), None)

    @cached_property
    def _used_rows(self) -> dict[int, int]:
        """Return the most rows that calls use, by the number of rows that they have."""
        computations = self._module.computations.values()
        instructions = [i for c in computations for i in c.instructions.values()]
        named = (_SPARSE.search(instruction.attributes) for instruction in instructions)
        return dict(sorted((int(call[2]), int(call[1])) for call in named if call))


def _moved_bytes(computation: Computation, instruction: Instruction) -> float:
    """Return the bytes that an operation reads and writes, about twice its result.

    An operation that takes or updates a slice in place touches only the smaller side.
    """
    if "slice" in instruction.name or "slice" in instruction.opcode:
        sizes = [
            sum(array_bytes(computation.instructions[name].type))
            for name in instruction.operands
            if name in computation.instructions
        ]
        return 2.0 * min((size for size in sizes if size > _INDEX_BYTES), default=0)
    return 2.0 * sum(array_bytes(instruction.type))


class RowTiles(NamedTuple):
    """Tiles of rows of a product with experts' weights.

    Attributes:
      filled: tiles that the rows fill.
      shared: further visits to tiles that have rows of two experts, each of which multiplies all
        rows of the tile.
    """

    filled: int
    shared: int


def row_tiles(shapes: Sequence[Sequence[int]]) -> RowTiles | None:
    """Return the tiles of a megablox kernel with results and operands of these shapes, else None.

    Two of its operands list the tile and the expert of every visit that there may be, [visits].
    """
    experts = next((sizes[0] for sizes in shapes if len(sizes) == 3), 0)
    vectors = [sizes[0] for sizes in shapes if len(sizes) == 1]
    if not experts or experts + 1 not in vectors:
        return None
    vectors.remove(experts + 1)  # where the rows of each expert begin
    visits = next((size for size in vectors if vectors.count(size) == 2 and size > experts), 0)
    if not visits:
        return None
    return RowTiles(visits - experts + 1, experts - 1)


_ATTENTION = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# Matrix products over the channels of queries, and over those of values, in each kernel: forward,
# gradient for queries, gradients for keys and values.
_ATTENTION_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}
# Block sizes of a kernel, in tokens, as JAX writes them next to it: their names end with its word,
# except in the forward. Where JAX writes none, the option's default is assumed.
_DEFAULT_BLOCK = 512
_BLOCK = r'block_{}\\*": (\d+)'
_FLOAT_SIZES = re.compile(r"^(?:bf16|f16|f32)\[(\d+(?:,\d+)+)\]")
_MASK_SIZES = re.compile(r"^s(?:8|16|32)\[(\d+(?:,\d+)+)\]")


def is_attention(kernel: Instruction) -> bool:
    return _ATTENTION.search(kernel.name) is not None


def attention_flops(computation: Computation, kernel: Instruction) -> float | None:
    """Return the FLOPs of the blocks of scores that a kernel visits.

    None if its operands are not queries, keys and values.
    """
    named = _ATTENTION.search(kernel.name)
    types = [
        computation.instructions[n].type for n in kernel.operands if n in computation.instructions
    ]
    # First come operands of the mask, then queries [B, H, T, C], keys [B, KV, S, C] and values
    # [B, KV, S, V].
    floats = [index for index, text in enumerate(types) if _FLOAT_SIZES.match(text)]
    if named is None or len(floats) < 3:
        return None
    queries, keys, values = (_sizes(_FLOAT_SIZES, types[index]) for index in floats[:3])
    masks = [_sizes(_MASK_SIZES, text) for text in types[: floats[0]] if _MASK_SIZES.match(text)]
    suffix = "" if named[1] == "fwd" else f"_{named[1]}"
    block_q, block_k = (
        min(_block(kernel, f"{side}{suffix}"), length)
        for side, length in (("q", queries[-2]), ("kv", keys[-2]))
    )
    reach = keys[-2]
    if masks and named[1] != "dkv":
        reach = min(reach, masks[0][-1] * block_k)
    # A part of the queries may visit a block of keys entirely, whatever the window.
    elif masks and masks[0][-2] * block_q < queries[-2]:
        reach = masks[0][-2] * block_q
    met = _keys_met(keys[-2], block_q, block_k, reach)
    # Besides segment ids a kernel reads the places of its queries, if its mask cuts blocks. Between
    # parts of a ring none is cut, and half of them are visited.
    if sum(_MASK_SIZES.match(text) is not None for text in types[floats[2] :]) == 2:
        met = keys[-2] / 2
    of_queries, of_values = _ATTENTION_PRODUCTS[named[1]]
    channels = of_queries * filled(queries[-1]) + of_values * filled(values[-1])
    return 2.0 * math.prod(queries[:-1]) * met * channels


def _keys_met(length: int, block_q: int, block_k: int, reach: int) -> float:
    """Return how many keys a query meets on average, with masked ones in visited blocks.

    Args:
      length: tokens of the sequence.
      block_q, block_k: tokens of a block of queries and of keys.
      reach: most keys that a block of queries visits: a mask of a window has no more columns.
    """
    rows = math.ceil(length / block_q)
    before = visible_blocks(rows, block_q, block_k)
    return sum(min(block_k * blocks, reach) for blocks in before) / rows


def _sizes(pattern: re.Pattern[str], text: str) -> list[int]:
    match = pattern.match(text)
    return [int(size) for size in match[1].split(",")] if match else []


def _block(kernel: Instruction, name: str) -> int:
    size = re.search(_BLOCK.format(name), kernel.attributes)
    return int(size[1]) if size else _DEFAULT_BLOCK
