"""Read traced programs (jaxprs), open the calls in them, and cut programs out of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Atom = Var | Literal

CALLS = ("jit", "pjit", "closed_call", "core_call")
CHECKPOINTS = ("checkpoint", "remat2", "remat")

# What a program runs on the host for its own sake, such as jax.debug.print.
_CALLBACKS = ("debug_callback", "debug_print", "io_callback")

_EXPENSIVE = (
    "dot_general",
    "ragged_dot",
    "conv_general_dilated",
    "gather",
    "sort",
    "top_k",
    "approx_top_k",
    "pure_callback",
    "ffi_call",
)

_COLLECTIVES = ("all_gather", "reduce_scatter", "psum")


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Return the program without its constants, if it has any."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Yield the programs among an equation's parameters, such as branches and bodies of loops."""
    for parameter in jax.tree.leaves(list(eqn.params.values())):
        if isinstance(parameter, (Jaxpr, ClosedJaxpr)):
            yield parameter


def shaped(atom: Atom) -> ShapedArray:
    """Return shape and dtype of a variable or literal that is an array."""
    aval = atom.aval
    assert isinstance(aval, ShapedArray)
    return aval


def inline(
    program: ClosedJaxpr,
    calls: Sequence[str],
    make_jaxpr: Callable[..., Callable[..., ClosedJaxpr]] = jax.make_jaxpr,
) -> ClosedJaxpr:
    """Return the program with every call of a primitive in `calls` replaced by the call's body.

    Args:
      program: as traced.
      calls: names of primitives.
      make_jaxpr: traces a function in the surroundings in which the program was traced.
    """

    def run(*args: jax.Array) -> list[jax.Array]:
        return _evaluate(program, args, calls)

    return make_jaxpr(run)(
        *(jax.ShapeDtypeStruct(shaped(v).shape, shaped(v).dtype) for v in program.jaxpr.invars)
    )


def _evaluate(
    program: Jaxpr | ClosedJaxpr, args: Sequence[jax.Array], calls: Sequence[str]
) -> list[jax.Array]:
    jaxpr = open_jaxpr(program)
    consts = program.consts if isinstance(program, ClosedJaxpr) else ()
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    # A literal's value may be a Python number.
    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        if eqn.primitive.name in calls:
            outputs = _evaluate(next(inner_jaxprs(eqn)), inputs, calls)
        else:
            with eqn.ctx.manager:
                outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def part(
    jaxpr: Jaxpr, inputs: Sequence[Var], equations: Sequence[JaxprEqn], outputs: Sequence[Atom]
) -> Jaxpr:
    """Return some equations of a program as a program of their own, which has no constants."""
    return jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        eqns=list(equations),
        outvars=list(outputs),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def ancestors(
    equations: Sequence[JaxprEqn], ends: Iterable[Atom], *, with_callbacks: bool = False
) -> list[JaxprEqn]:
    """Return the equations that the ends depend on, in order, and on demand all callbacks."""
    needed = set(variables(ends))
    selected = []
    for eqn in reversed(equations):
        is_needed = any(v in needed for v in eqn.outvars)
        if is_needed or (with_callbacks and calls_back(eqn)):
            selected.append(eqn)
            needed.update(variables(eqn.invars))
    return selected[::-1]


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return the atoms that are not literals."""
    return [v for v in atoms if not isinstance(v, Literal)]


def read_by(equations: Iterable[JaxprEqn], others: Iterable[Atom]) -> dict[Var, None]:
    """Return the variables that equations read or `others` name, each once, in order."""
    return dict.fromkeys(
        [*(v for eqn in equations for v in variables(eqn.invars)), *variables(others)]
    )


def calls_back(eqn: JaxprEqn) -> bool:
    """Return whether an equation runs on the host for its own sake, even if it has no results."""
    return eqn.primitive.name in _CALLBACKS


def is_cheap(eqn: JaxprEqn) -> bool:
    """Return whether an equation costs little more than reading its operands."""
    name = eqn.primitive.name
    if name.startswith(("scatter", "cum", "reduce_window")) or name in _EXPENSIVE:
        return False
    return not eqn.effects and not any(inner_jaxprs(eqn))


def is_cheap_or_collective(eqn: JaxprEqn) -> bool:
    """Return whether an equation is cheap, or only moves its operands between devices."""
    if eqn.primitive.name == "shard_map":
        inner = [e for jaxpr in inner_jaxprs(eqn) for e in open_jaxpr(jaxpr).eqns]
        return all(map(is_cheap_or_collective, inner))
    return eqn.primitive.name in _COLLECTIVES or is_cheap(eqn)
