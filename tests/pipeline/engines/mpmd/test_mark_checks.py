"""Marks where a program cannot be cut are refused with a remedy; marks elsewhere work."""

import jax
import jax.numpy as jnp
import pytest
from helpers.mpmd_programs import assert_computes, inputs, operations, sliced, weights

from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary as mark
from maxpipe.pipeline.engines.mpmd.slicing import slice_program
from maxpipe.pipeline.jaxprs import calls_back


def in_scan(w, x):
    stacked = jnp.stack(w)
    return jnp.sum(jax.lax.scan(lambda x, w: (mark(jnp.sin(x @ w)), None), x, stacked)[0])


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


def of_frozen_weights(w, x):
    return jnp.sum(mark(jax.jit(lambda x: mark(jnp.sin(x @ weights()[1])))(x) @ w[0]))


def around_a_gradient(w, x):
    gradient = jax.grad(lambda x: jnp.sum(mark(jnp.sin(x @ w[0]))))(x)
    return jnp.sum(mark(gradient @ w[1]))


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (in_scan, r"inside a lax.scan .*write the loop over stages in Python"),
        (in_cond, r"inside a lax.cond .*call mark_stage_boundary after it"),
        (in_checkpoint, r"inside jax.checkpoint.*apply it to the code between two marks"),
        (missing, r"no stage marks; call mark_stage_boundary after each chunk"),
        (unused, r"nothing uses the result of stage mark 0 of 2 .*x = mark_stage_boundary\(x\)"),
        (of_integers, r"stage mark 0 of 2 .* only integers"),
        (without_gradient, r"gradients pass through 1 of 2 .*outside of jax.lax.stop_gradient"),
        (of_the_batch, r"nothing before stage mark 0 of 2 .* in params"),
        (of_frozen_weights, r"nothing before stage mark 0 of 2 .* after the first trained"),
        (around_a_gradient, r"order forward, backward, forward, backward; .*no other gradient"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_gradient_with_a_wrong_mark_is_refused_with_a_remedy(loss, message, split):
    with pytest.raises(ValueError, match=message):
        sliced(loss, weights(), inputs(), split_backwards=split)


def test_forward_with_a_mark_in_a_while_loop_is_refused():
    program = jax.make_jaxpr(in_while)(weights(), inputs())
    with pytest.raises(ValueError, match=r"inside a lax.while_loop.*loop over stages in Python"):
        slice_program(program)


def test_marks_of_tangents_are_refused():
    def tangent(x):
        return jax.jvp(lambda x: jnp.sum(mark(jnp.sin(x))), (x,), (x,))

    with pytest.raises(ValueError, match=r"forward mode.*slice jax\.value_and_grad"):
        slice_program(jax.make_jaxpr(tangent)(inputs()))


def test_mark_of_nothing_is_refused():
    with pytest.raises(ValueError, match="needs an array"):
        mark({})


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
def test_loops_branches_and_checkpoints_between_marks_work(split):
    def loss(w, x):
        x = mark(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, jnp.stack(w[:2]))[0])
        x = mark(jax.lax.cond(x[0, 0] > 0, lambda x: x @ w[2], jnp.cos, x))
        return jnp.sum(mark(jax.checkpoint(jnp.sin)(x @ w[0])) ** 2)

    program = sliced(loss, weights(), inputs(), split_backwards=split)
    assert program.num_chunks == 3
    assert_computes(program, loss, weights(), inputs())


def test_marks_in_a_vmap_work():
    def loss(w, xs):
        return jnp.sum(jax.vmap(lambda x: mark(mark(jnp.sin(x @ w[0])) @ w[1]) ** 2)(xs))

    program = sliced(loss, weights(2), inputs())
    assert program.num_chunks == 2
    assert_computes(program, loss, weights(2), inputs())


def test_second_of_two_marks_in_a_row_ends_a_chunk_without_work():
    def loss(w, x):
        return jnp.sum(mark(mark(mark(jnp.sin(x @ w[0]))) @ w[1]))

    program = sliced(loss, weights(2), inputs())
    assert [operations(program, f"F{c}").count("dot_general") for c in range(3)] == [1, 0, 1]
    assert_computes(program, loss, weights(2), inputs())


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


def print_in_scan(x):
    jax.lax.scan(lambda c, i: (c, jax.debug.print("{}", i)), x, jnp.arange(2))


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize(
    "show", [lambda x: jax.debug.print("largest {}", x), print_in_cond, print_in_scan]
)
def test_prints_stay_in_the_chunk_that_has_them(show, split):
    def loss(w, x):
        for i, matrix in enumerate(w):
            x = mark(jnp.sin(x @ matrix))
            if i == 0:
                show(jnp.max(x))
        return jnp.sum(x)

    program = sliced(loss, weights(), inputs(), split_backwards=split)
    printing = [
        str(name) for name, c in program.computations.items() if any(map(calls_back, c.equations))
    ]
    assert printing == ["F1"]
    assert_computes(program, loss, weights(), inputs())
