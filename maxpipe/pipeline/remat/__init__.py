"""Rematerialisation policies: what the backward pass of a layer recomputes, chosen by `pipeline.remat_policy`."""

from collections.abc import Callable
from typing import Any

from maxpipe.registry import Registry

# A variant wraps a layer function: remat(f) computes the same as f and saves what the policy says.
REMAT: Registry[Callable[[Callable[..., Any]], Callable[..., Any]]] = Registry(
    __name__, __path__, "pipeline.remat_policy"
)
