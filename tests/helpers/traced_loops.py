"""Find the loops of a traced program."""

from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr

from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr


def loop_bodies(program: Jaxpr | ClosedJaxpr) -> Iterator[Jaxpr]:
    """Yield the body of every scan, outer ones first."""
    for eqn in open_jaxpr(program).eqns:
        for inner in inner_jaxprs(eqn):
            if eqn.primitive.name == "scan":
                yield open_jaxpr(inner)
            yield from loop_bodies(inner)
