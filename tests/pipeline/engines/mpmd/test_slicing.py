"""Slicing small programs: what each computation runs, reads and writes."""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers.engines import make_mesh, tiny
from helpers.mpmd_programs import (
    assert_computes,
    chain,
    computation,
    inputs,
    operations,
    sliced,
    weights,
)

from maxpipe.builder import build_trainer
from maxpipe.pipeline.engines.mpmd import slicing
from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary as mark
from maxpipe.pipeline.engines.mpmd.program import UnitName, dump, fingerprint, route
from maxpipe.pipeline.schedules.load import load_schedule


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"]
)
def test_sliced_program_computes_loss_and_gradients(wrap, split):
    def loss(w, x):
        for one in w:
            x = mark(wrap(lambda x, w: jnp.sin(x @ w))(x, one))
        return jnp.sum(x * x)

    program = sliced(loss, weights(), inputs(), split_backwards=split)
    assert_computes(program, loss, weights(), inputs())
    kinds = "FIW" if split else "FB"
    assert sorted(map(str, program.computations)) == [
        f"{k}{c}" for k in sorted(kinds) for c in range(3)
    ]


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
def test_example_of_the_docstring_gives_the_computations_listed_there(split):
    def loss(w, x):
        return jnp.sum(mark(mark(jnp.sin(x @ w[0])) @ w[1]))

    listed = {}
    for line in slicing.__doc__.splitlines():
        if "|" in line:
            equation, unsplit, halves = line.split("|")
            names = re.findall(r"\b[FBIW]\d", halves if split else unsplit)
            for name in names:
                listed.setdefault(name, []).append(equation.split()[2])
    program = sliced(loss, weights(2), inputs(), split_backwards=split)
    assert {str(name): operations(program, str(name)) for name in program.computations} == listed


def test_costly_code_before_the_first_mark_runs_once_in_its_first_reader():
    def loss(w, x):
        table = w[2] @ jnp.ones((4, 4))
        for one in w[:2]:
            x = mark(jnp.sin(x @ one))
        return jnp.sum(mark(x @ table))

    program = sliced(loss, weights(), inputs())
    assert [operations(program, f"F{c}").count("dot_general") for c in range(3)] == [1, 1, 2]
    assert_computes(program, loss, weights(), inputs())


def test_code_that_only_the_backward_reads_moves_there():
    def loss(w, mask, x):
        @jax.custom_vjp
        def scaled(x, costly):
            return x

        scaled.defvjp(lambda x, costly: (x, costly), lambda costly, ct: (ct @ costly, None))
        x = mark(x @ w[0])
        x = mark(scaled(x @ w[1], mask @ mask))
        return jnp.sum(x * x)

    program = sliced(loss, weights(2), weights(1)[0], inputs())
    assert operations(program, "F1").count("dot_general") == 1
    assert program.inputs[2] in computation(program, "B1").arguments
    assert program.inputs[2] not in computation(program, "F1").arguments


def test_dead_code_is_dropped_across_stages():
    def loss(w, x):
        unused = jnp.cos(x @ w[0])
        for one in w:
            x, unused = mark((jnp.sin(x @ one), jnp.exp(unused)))
        return jnp.sum(x * x)

    program = sliced(loss, weights(), inputs())
    assert not any("exp" in operations(program, f"F{c}") for c in range(3))
    assert operations(program, "F0").count("dot_general") == 1


def test_gradient_of_a_shared_weight_has_a_part_on_each_stage():
    def loss(w, x):
        for i in (0, 1, 0):
            x = mark(jnp.sin(x @ w[i]))
        return jnp.sum(x * x)

    program = sliced(loss, weights(2), inputs())
    assert [str(n) for n, c in program.computations.items() if 1 in c.outputs] == ["B2", "B0"]
    sends = route(program, [0, 1, 2]).sends
    assert all(v.aval.shape == (2, 4) for values in sends.values() for v in values)
    assert_computes(program, loss, weights(2), inputs())


def test_recomputed_forward_of_a_checkpoint_runs_in_i_only():
    def loss(w, x):
        for one in w:
            x = mark(jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, one))
        return jnp.sum(x * x)

    program = sliced(loss, weights(), inputs(), split_backwards=True)
    assert [operations(program, f"{k}1").count("dot_general") for k in "IW"] == [2, 1]


def test_fingerprint_tells_what_differs_and_is_the_same_for_another_trace():
    def digest(factor=3.0, rows=2, schedule="1f1b", microbatches=4):
        def loss(matrices, x):
            for matrix in matrices:
                x = mark(jnp.sin(x @ matrix) * factor)
            return jnp.sum(x * x)

        table = load_schedule(schedule, 3, microbatches)
        return fingerprint(sliced(loss, weights(), inputs()[:rows]), table)

    assert digest() == digest()
    others = digest(2.0), digest(rows=1), digest(microbatches=5), digest(schedule="gpipe")
    assert len({digest(), *others}) == 5


def test_dump_names_values_after_their_computations():
    texts = dump(sliced(chain, weights(), inputs()), ["first", "second", "third", "x"])
    assert [*map(str, texts)] == ["F0", "F1", "F2", "B2", "B1", "B0"]
    first = texts[UnitName("F", 0)]
    assert first.startswith("F0\n  reads  first f32[4,4]\n  reads  x f32[2,4]\n")
    assert "  writes F0.1 f32[2,4] for F1, B1\n" in first
    assert "dot_general" in first
    assert "  adds to output 2 f32[4,4]\n" in texts[UnitName("B", 1)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("words", ["tensor=2", "tie_embeddings=true remat_policy=none"])
def test_computations_of_a_model_hand_over_no_parameter_and_no_gradient_of_one(dtype, words):
    """Activations of a device are [6, 8, ...] here, and no parameter is, nor is its shard."""
    common = "schedule=zb_h1 stage=2 fsdp=2 num_microbatches=4 global_batch_size=48"
    config = tiny(f"{common} dtype={dtype} {words}")
    engine = build_trainer(config, make_mesh(config)).engine
    program = engine.training.program
    shards = [v.aval for v in program.inputs]
    arrays = [*shards, *jax.tree.leaves(engine.abstract)]
    layouts = {shape for x in arrays for shape in (x.shape, x.shape[1:])}
    halves = [c for c in program.computations.values() if c.name.kind == "I"]
    assert [c.name.chunk for c in halves] == [1, 0]
    for half in halves:
        assert half.writes
        assert not half.outputs
    for unit in program.computations.values():
        # The sum of auxiliary losses is a scalar.
        handed_over = {v.aval.shape for v in unit.writes} - {()}
        assert layouts.isdisjoint(handed_over)
