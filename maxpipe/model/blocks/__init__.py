"""Decoder blocks; each module registers one, chosen by `model.block`.

A block sees whole sequences, unless the program is manual over mesh axis `context` (`maxpipe.context_parallel`): then
an auxiliary loss, which is a function of a whole sequence, has to take its means over the axis, too.
"""

from maxpipe.registry import Registry

BLOCKS: Registry = Registry(__name__, __path__, "model.block")
