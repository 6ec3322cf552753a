"""Price attention of a layer, by what the kernel that a run chooses on the devices computes.

A flash attention kernel skips masked blocks of scores, and holds no scores in memory. Two matrix
products with all scores between them skip nothing.
"""

from typing import NamedTuple

from maxpipe.plan.search.facts import LayerCosts
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.stores import FLOAT32, Number

# Products in splash attention's backward kernels, 3 and 4, over the 2 of its forward.
_BACKWARD = 3.5
# Bytes of scores that a backward moves, as a multiple of its forward's. XLA's estimates of a layer
# of 8 heads and 2048 tokens on v5e give 3.2.
_SCORES_BACKWARD = 3.0


class AttentionSeconds(NamedTuple):
    """Seconds of a layer's attention for one microbatch.

    Attributes:
      forward: seconds in F.
      backward: seconds of the gradients, with scores that are recomputed though their product's
        result is saved. Nothing else that a policy recomputes is included.
    """

    forward: Number
    backward: Number


def attention_seconds(sizes: BlockSizes, machine: Machine, layer: LayerCosts) -> AttentionSeconds:
    """Return the seconds of a layer's attention.

    A kernel that holds scores computes masked ones, too, by matrix products, and moves them through
    memory.
    """
    if not layer.scores:
        length = sizes.config.data.sequence_length
        masked = 1 + min(sizes.config.model.attention_block_size, length) / length
        flops = masked * sizes.tokens * layer.attention_flops
        kernel = flops / machine.attention_peak()
        return AttentionSeconds(kernel, _BACKWARD * kernel)
    peak = machine.peak * machine.matrix_efficiency
    products = sizes.tokens * layer.attention_flops / peak
    # Each of the arrays of `footprint.made_width` is written once and read once.
    moved = 2 * (FLOAT32 + sizes.itemsize) * sizes.tokens * layer.scores / machine.hbm
    # Scores take one of the two products of a forward.
    again = sizes.scores_again * (products / 2 + moved)
    backward = 2 * products + _SCORES_BACKWARD * moved + again
    return AttentionSeconds(products + moved, backward)
