"""Read traced programs (jaxprs), open the calls in them, and cut programs out of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Atom = Var | Literal

CALLS = ("jit", "closed_call")
CHECKPOINTS = ("remat2",)

# Primitives that call the host for a side effect, such as jax.debug.print.
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
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Yield the programs among an equation's parameters, such as branches and bodies of loops."""
    for parameter in jax.tree.leaves(list(eqn.params.values())):
        if isinstance(parameter, (Jaxpr, ClosedJaxpr)):
            yield parameter


def shaped(atom: Atom) -> ShapedArray:
    aval = atom.aval
    assert isinstance(aval, ShapedArray)
    return aval


def inline(
    program: ClosedJaxpr,
    calls: Sequence[str],
    make_jaxpr: Callable[..., Callable[..., ClosedJaxpr]] = jax.make_jaxpr,
) -> ClosedJaxpr:
    """Return the program with every call of a primitive in `calls` replaced by the call's body.

    Equations keep the scopes in which they were traced.

    Args:
      calls: names of primitives.
      make_jaxpr: function that traces another in the context in which `program` was traced.
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
        if eqn.primitive.name in calls:
            body = _within_scopes(eqn, next(inner_jaxprs(eqn)))
            outputs = _evaluate(body, [read(v) for v in eqn.invars], calls)
        else:
            # JAX evaluates an equation in its scopes (`jax.named_scope`), which profiles show.
            inputs = variables(eqn.invars)
            alone = part(jaxpr, inputs, [eqn], eqn.outvars)
            outputs = jax.core.eval_jaxpr(alone, (), *map(read, inputs))
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _within_scopes(call: JaxprEqn, body: Jaxpr | ClosedJaxpr) -> Jaxpr | ClosedJaxpr:
    """Return the body of a call, its equations also in the scopes of the call."""

    def within(eqn: JaxprEqn) -> JaxprEqn:
        names = call.source_info.name_stack + eqn.source_info.name_stack
        return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))

    jaxpr = open_jaxpr(body)
    named = jaxpr.replace(eqns=list(map(within, jaxpr.eqns)))
    return ClosedJaxpr(named, body.consts) if isinstance(body, ClosedJaxpr) else named


def part(
    jaxpr: Jaxpr, inputs: Sequence[Var], equations: Sequence[JaxprEqn], outputs: Sequence[Atom]
) -> Jaxpr:
    """Return some equations of a program as a separate program without constants."""
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
    """Return the equations that the ends depend on, in order, and if wanted all callbacks."""
    needed = set(variables(ends))
    selected = []
    for eqn in reversed(equations):
        is_needed = any(v in needed for v in eqn.outvars)
        if is_needed or (with_callbacks and calls_back(eqn)):
            selected.append(eqn)
            needed.update(variables(eqn.invars))
    return selected[::-1]


def variables(atoms: Iterable[Atom]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


def read_by(equations: Iterable[JaxprEqn], others: Iterable[Atom]) -> dict[Var, None]:
    """Return the variables that equations read or `others` name, each once, in order."""
    return dict.fromkeys(
        [*(v for eqn in equations for v in variables(eqn.invars)), *variables(others)]
    )


def calls_back(eqn: JaxprEqn) -> bool:
    """Return whether an equation, or a loop or branch in it, calls the host for a side effect."""
    if eqn.primitive.name in _CALLBACKS:
        return True
    # Effects of bodies are those of their equation too, so only few programs are searched.
    inner = inner_jaxprs(eqn) if eqn.effects else ()
    return any(calls_back(e) for jaxpr in inner for e in open_jaxpr(jaxpr).eqns)


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
