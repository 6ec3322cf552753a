"""Find the parts of a state that belong to parameters, such as an optimizer's moments."""

from collections.abc import Callable
from typing import TypeVar

import jax

from maxpipe.model.parameters import Params

StateT = TypeVar("StateT")
LeafT = TypeVar("LeafT")
ValueT = TypeVar("ValueT")


def mirrors(params: jax.tree_util.PyTreeDef, node: object) -> bool:
    """Return whether a part of a state is a tree like the parameters, with a subtree for each.

    Moments of an optimizer have one array per parameter, `per_layer` has one state per parameter.
    """
    try:
        params.flatten_up_to(node)
    except ValueError:
        return False
    return True


def map_by_parameter(
    f: Callable[[LeafT, ValueT], object], state: StateT, values: Params, otherwise: ValueT
) -> StateT:
    """Map each leaf of a state together with a value of the parameter that it belongs to.

    A leaf belongs to a parameter if it lies in that parameter's place within a subtree that
    `mirrors` the parameters; others, such as counters, get `otherwise`.
    """
    params = jax.tree.structure(values)

    def is_mirror(node: object) -> bool:
        return mirrors(params, node)

    def map_subtree(value: ValueT, subtree: StateT) -> StateT:
        return jax.tree.map(lambda leaf: f(leaf, value), subtree)

    def map_node(node: StateT) -> StateT:
        if is_mirror(node):
            return jax.tree.map(map_subtree, values, node)
        return map_subtree(otherwise, node)

    return jax.tree.map(map_node, state, is_leaf=is_mirror)
