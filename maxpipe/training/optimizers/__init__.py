"""Optimizers; each module registers one, chosen by `optimizer.name`.

A variant maps `optimizer.*` and the tree of `ParamSpec`s to an `optax.GradientTransformation` whose updates are
descent directions: they are multiplied by minus the learning rate, after weight decay was added. Gradients, and the
parameters given to `init`, are float32. Layer parameters have leading layer dimensions that their specs do not have,
one to three of them, as the engine likes: what is no elementwise function must go through `_layers.per_layer`.
"""

from collections.abc import Callable
from typing import Any

from maxpipe.registry import Registry

OPTIMIZERS: Registry[Callable[[Any, Any], Any]] = Registry(__name__, __path__, "optimizer.name")
