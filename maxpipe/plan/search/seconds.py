"""The seconds of a step, for one candidate or for arrays of candidates."""

from typing import NamedTuple

from maxpipe.plan.number import Number


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
