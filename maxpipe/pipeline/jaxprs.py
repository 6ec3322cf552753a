"""Programs inside traced programs."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Without the constants, if it has any."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Any]:
    """Those among an equation's parameters, such as branches and bodies of loops; open or closed."""
    for parameter in jax.tree.leaves(list(eqn.params.values())):
        if isinstance(parameter, (Jaxpr, ClosedJaxpr)):
            yield parameter
