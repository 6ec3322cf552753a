"""Count the FLOPs of splash attention's kernels by their names, shapes, blocks and masks."""

import math
import re

from maxpipe.compile.hlo import Computation, Instruction
from maxpipe.plan.jaxpr_flops import visible_blocks

_NAME = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# Matrix products over the channels of queries, and over those of values, in each kernel: forward,
# gradient for queries, gradients for keys and values.
_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}
# Block sizes of a kernel, in tokens, as JAX writes them next to it: their names end with its word,
# except in the forward. Where JAX writes none, the option's default is assumed.
_DEFAULT_BLOCK = 512
_BLOCK = r'block_{}\\*": (\d+)'
_FLOATS = re.compile(r"^(?:bf16|f16|f32)\[(\d+(?:,\d+)+)\]")
_MASK = re.compile(r"^s(?:8|16|32)\[(\d+(?:,\d+)+)\]")


def is_attention(kernel: Instruction) -> bool:
    return _NAME.search(kernel.name) is not None


def attention_flops(computation: Computation, kernel: Instruction) -> float | None:
    """Return the FLOPs of the blocks of scores that a kernel visits.

    None if its operands are not queries, keys and values.
    """
    named = _NAME.search(kernel.name)
    types = [
        computation.instructions[n].type for n in kernel.operands if n in computation.instructions
    ]
    # First come operands of the mask, then queries [B, H, T, C], keys [B, KV, S, C] and values
    # [B, KV, S, V].
    floats = [index for index, text in enumerate(types) if _FLOATS.match(text)]
    if named is None or len(floats) < 3:
        return None
    queries, keys, values = (_sizes(_FLOATS, types[index]) for index in floats[:3])
    masks = [_sizes(_MASK, text) for text in types[: floats[0]] if _MASK.match(text)]
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
    of_queries, of_values = _PRODUCTS[named[1]]
    channels = of_queries * queries[-1] + of_values * values[-1]
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
