"""Compute the seconds of a step in closed form, for arrays of candidates.

A step is its matrix products and what runs between them, the communication that computation waits
for, and the bubble. Times are of one device; every array has the dimensions [M, V, policies,
gathers, tiles], some of size 1.

Letters: F, I, W times of a chunk's forward, input gradient and weight gradient; S stages,
V repeats, M microbatches.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.plan.number import Number


class Units(NamedTuple):
    """Seconds of one layer for one microbatch.

    Attributes:
      forward: F.
      input_gradient: I, with what it computes again.
      weight_gradient: W.
      head: logits, loss and their gradients.
    """

    forward: Number
    input_gradient: Number
    weight_gradient: Number
    head: Number

    @property
    def layer(self) -> Number:
        return self.forward + self.input_gradient + self.weight_gradient


class Waits(NamedTuple):
    """Seconds of transfers of one layer or one microbatch, as if nothing hid them.

    Attributes:
      gather: gather of a layer's weights.
      scatter: sum of a layer's gradients over the devices that share its weights.
      forward, backward: transfers of activations in a layer, which the next product waits for.
      gradient: sum of a layer's gradients over copies of its weights, where every unit has one.
      permute: transfer of activations to the next stage.
      reduction: sum of the other gradients over copies of the parameters, once a step.
      outer: gathers and sums of embedding and head, once.
    """

    gather: Number
    scatter: Number
    forward: Number
    backward: Number
    gradient: Number
    permute: Number
    reduction: Number
    outer: Number


class Seconds(NamedTuple):
    """A predicted step, whose parts are means of all devices.

    Attributes:
      products: matrix products, attention, what runs between them, and the optimizer's update.
      communication: what computation waits for.
      bubble: idle slots and idle stages.
    """

    products: Number
    communication: Number
    bubble: Number

    @property
    def step(self) -> Number:
        return self.products + self.communication + self.bubble


def exposed(transfer: Number, last: Number, compute: Number) -> Number:
    """Return the seconds that computation does not hide of transfers that run during it.

    Args:
      transfer: seconds of all of a unit's transfers.
      last: the part of them that comes after all computation.
      compute: seconds of the unit's computation.
    """
    return last + np.maximum(np.subtract(transfer - last, compute), 0.0)
