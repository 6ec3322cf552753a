"""Optimizers; each module registers one, chosen by `optimizer.name`.

A variant maps `optimizer.*` to an `optax.GradientTransformation` whose updates are descent directions: they are
multiplied by minus the learning rate, after weight decay was added. Gradients, and the parameters given to
`init`, are float32. Layer parameters have leading layer dimensions that an optimizer must treat as batch
dimensions.
"""

from collections.abc import Callable
from typing import Any

from maxpipe.registry import Registry

OPTIMIZERS: Registry[Callable[[Any], Any]] = Registry(__name__, __path__, "optimizer.name")
