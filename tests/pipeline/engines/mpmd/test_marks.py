"""Stage marks are identities that survive transformations; where none can be, it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.mpmd_programs import assert_computes, inputs, operations, sliced, weights

from maxpipe.pipeline.engines.mpmd.marks import mark_p
from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary as mark
from maxpipe.pipeline.engines.mpmd.slicing import slice_program
from maxpipe.pipeline.jaxprs import calls_back

both_splits = pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])


def two_stages(w, x):
    x = mark(jnp.sin(x @ w[0]))
    return jnp.sum(jnp.cos(mark(x @ w[1])))


def in_scan(w, x):
    stacked = jnp.stack(w)
    return jnp.sum(jax.lax.scan(lambda x, w: (mark(jnp.sin(x @ w)), None), x, stacked)[0])


def test_mark_is_the_identity_on_any_tree_with_an_array():
    tree = {"x": jnp.arange(3), "y": (jnp.ones(()), None)}
    marked = mark(tree)
    assert jax.tree.structure(marked) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, marked, tree)
    with pytest.raises(ValueError, match="needs an array"):
        mark({})


def test_backward_mark_has_only_operands_with_a_gradient():
    def f(x, n):
        x, n = mark((x, n))
        return x * n

    jaxpr = jax.make_jaxpr(jax.grad(f))(2.0, 3)
    marks = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive is mark_p]
    assert [(len(eqn.invars), eqn.params["phase"]) for eqn in marks][1:] == [(1, "backward")]


def in_while(w, x):
    x = jax.lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: mark(x - jnp.max(w[0])), x)
    return jnp.sum(x)


def in_cond(w, x):
    x = jax.lax.cond(x[0, 0] > 0, lambda x: mark(jnp.sin(x @ w[0])), lambda x: x @ w[0], x)
    return jnp.sum(mark(x @ w[1]))


def in_checkpoint(w, x):
    # The jit in between shows that calls are searched.
    two_stages = jax.jit(jax.checkpoint(lambda x: mark(mark(jnp.sin(x @ w[0])) @ w[1])))
    return jnp.sum(two_stages(x) ** 2)


def missing(w, x):
    return jnp.sum(x @ w[0])


def unused(w, x):
    x = jnp.sin(x @ w[0])
    mark(x)
    return jnp.sum(mark(x @ w[1]))


def of_integers(w, x):
    return jnp.sum(mark(x @ w[0] * mark(jnp.arange(4))))


def without_gradient(w, x):
    x = jax.lax.stop_gradient(mark(jnp.sin(x @ w[0])))
    return jnp.sum(mark(x @ w[1]))


def of_the_batch(w, x):
    return jnp.sum(mark(mark(jnp.sin(x)) @ w[0]))


def around_a_gradient(w, x):
    gradient = jax.grad(lambda x: jnp.sum(mark(jnp.sin(x @ w[0]))))(x)
    return jnp.sum(mark(gradient @ w[1]))


ONE_OF_TWO = r"gradients pass through 1 of 2 .* x = mark_stage_boundary\(x\) of activations, after"


@both_splits
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (in_scan, "inside scan, .* write a loop over stages in Python"),
        (in_cond, "inside cond, .* call mark_stage_boundary outside of it"),
        (in_checkpoint, "inside jax.checkpoint, .* apply jax.checkpoint to the code between"),
        (missing, r"no stage marks; call mark_stage_boundary after each chunk"),
        (unused, ONE_OF_TWO),
        (of_integers, ONE_OF_TWO),
        (without_gradient, ONE_OF_TWO),
        (of_the_batch, ONE_OF_TWO),
        (around_a_gradient, r"order forward, backward, forward, backward; .*no other gradient"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_gradient_with_a_wrong_mark_is_refused_with_a_remedy(loss, message, split):
    with pytest.raises(ValueError, match=message):
        sliced(loss, weights(), inputs(), split_backwards=split)


def test_marks_in_a_while_loop_and_of_tangents_are_refused():
    with pytest.raises(ValueError, match=r"inside while, .* loop over stages in Python"):
        slice_program(jax.make_jaxpr(in_while)(weights(), inputs()))

    def tangent(*args):
        return jax.jvp(two_stages, args, args)

    with pytest.raises(ValueError, match=r"forward mode.*slice jax\.value_and_grad"):
        slice_program(jax.make_jaxpr(tangent)(weights(2), inputs()))


@both_splits
def test_loops_branches_and_checkpoints_between_marks_and_a_vmap_around_one_work(split):
    def loss(w, x):
        x = mark(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, jnp.stack(w[:2]))[0])
        x = mark(jax.lax.cond(x[0, 0] > 0, lambda x: x @ w[2], jnp.cos, x))
        return jnp.sum(jax.vmap(lambda x: mark(jax.checkpoint(jnp.sin)(x @ w[0])))(x) ** 2)

    program = sliced(loss, weights(), inputs(), split_backwards=split)
    assert program.num_chunks == 3
    assert_computes(program, loss, weights(), inputs())


def test_chunks_have_the_order_of_the_calls_where_they_do_not_depend_on_each_other():
    def loss(w, x):
        second = mark(jnp.sin(x @ w[1]))
        first = mark(jnp.cos(x @ w[0]))
        return jnp.sum(mark(first @ second.T @ first))

    program = sliced(loss, weights(2), inputs())
    assert ["sin" in operations(program, f"F{c}") for c in range(3)] == [True, False, False]
    assert_computes(program, loss, weights(2), inputs())


def print_in_cond(x):
    jax.lax.cond(x > 0, lambda: jax.debug.print("positive"), lambda: None)


@both_splits
def test_prints_stay_in_the_chunk_that_has_them(split):
    def loss(w, x):
        for i, matrix in enumerate(w):
            x = mark(jnp.sin(x @ matrix))
            if i == 0:
                print_in_cond(jnp.max(x))
        return jnp.sum(x)

    program = sliced(loss, weights(), inputs(), split_backwards=split)
    printing = [
        str(name) for name, c in program.computations.items() if any(map(calls_back, c.equations))
    ]
    assert printing == ["F1"]
    assert_computes(program, loss, weights(), inputs())
