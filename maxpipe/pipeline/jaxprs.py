"""Looking into traced programs, and taking them apart."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Atom = Var | Literal

CALLS = ("jit", "pjit", "closed_call", "core_call")
CHECKPOINTS = ("checkpoint", "remat2", "remat")

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


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Without the constants, if it has any."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Any]:
    """Those among an equation's parameters, such as branches and bodies of loops; open or closed."""
    for parameter in jax.tree.leaves(list(eqn.params.values())):
        if isinstance(parameter, (Jaxpr, ClosedJaxpr)):
            yield parameter


def inline(program: ClosedJaxpr, calls: Sequence[str]) -> ClosedJaxpr:
    """The same program with the bodies of `calls`, names of primitives, in the place of the calls."""

    def run(*args: Any) -> list[Any]:
        return _evaluate(program, args, calls)

    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals))


def _evaluate(program: Any, args: Sequence[Any], opened: Sequence[str]) -> list[Any]:
    jaxpr = open_jaxpr(program)
    consts = program.consts if isinstance(program, ClosedJaxpr) else ()
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        if eqn.primitive.name in opened:
            outputs = _evaluate(next(inner_jaxprs(eqn)), inputs, opened)
        else:
            with eqn.ctx.manager:
                outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def part(
    jaxpr: Jaxpr, inputs: Sequence[Var], equations: Sequence[JaxprEqn], outputs: Sequence[Atom]
) -> Jaxpr:
    """Some equations of a program as a program of their own, which has no constants."""
    return jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        eqns=list(equations),
        outvars=list(outputs),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def ancestors(equations: Sequence[JaxprEqn], ends: Iterable[Atom]) -> list[JaxprEqn]:
    """The equations that the ends depend on, in order."""
    needed, found = set(variables(ends)), []
    for eqn in reversed(equations):
        if any(v in needed for v in eqn.outvars):
            found.append(eqn)
            needed.update(variables(eqn.invars))
    return found[::-1]


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Those atoms that are no literals."""
    return [v for v in atoms if not isinstance(v, Literal)]


def read_by(equations: Iterable[JaxprEqn], others: Iterable[Atom]) -> dict[Var, None]:
    """Variables that equations and others name, each once, in order."""
    return dict.fromkeys(
        [*(v for eqn in equations for v in variables(eqn.invars)), *variables(others)]
    )


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation costs little more than reading its operands."""
    name = eqn.primitive.name
    if (
        name.startswith(("scatter", "cum", "reduce_window"))
        or eqn.effects
        or any(inner_jaxprs(eqn))
    ):
        return False
    return name not in _EXPENSIVE
