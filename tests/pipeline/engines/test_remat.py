"""What an iteration saves and computes again follows the options, counted in the traced program."""

import math

import jax
import pytest
from helpers.engines import EngineUnderTest, make_batch, make_mesh, tiny

from maxpipe.builder import build_engine, build_engine_inputs
from maxpipe.pipeline.engines.mpmd.program import shape_of
from maxpipe.pipeline.engines.scheduled.stage_program import StageProgram
from maxpipe.pipeline.jaxprs import CHECKPOINTS, inner_jaxprs, open_jaxpr
from maxpipe.plan.jaxpr_flops import equation_flops, program_flops

LAYOUT = "stage=2 num_layers=8 num_layers_per_stage=2 num_repeats=2 num_microbatches=4 schedule="
# (remat_iterations, remat_layers)
NEITHER, ITERATIONS, LAYERS, BOTH = (False, False), (True, False), (False, True), (True, True)


def num_bytes(tree):
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def traced(schedule, options, monkeypatch):
    """Return (bytes of residuals, FLOPs) of a training step."""
    iterations, layers = options
    words = f"remat_policy=full remat_iterations={iterations} remat_layers={layers}"
    config = tiny(f"{LAYOUT}{schedule} {words}")
    if config.pipeline.engine == "mpmd":
        engine = build_engine(config, build_engine_inputs(config, make_mesh(config)))
        return traced_units(engine.training.program)
    engine, batch, key = EngineUnderTest(config), make_batch(16), jax.random.key(0)
    residuals = []
    original = StageProgram.run

    def run(self, plan, vjp, carry):
        residuals.extend(vjp.residuals)
        return original(self, plan, vjp, carry)

    monkeypatch.setattr(StageProgram, "run", run)
    step = engine.traced()
    if schedule == "circular":
        loss = lambda p: engine.pipeline.loss(p, batch, key)  # noqa: E731
        residuals = jax.tree.leaves(jax.eval_shape(lambda p: jax.vjp(loss, p)[1], engine.params))
    return num_bytes(residuals), program_flops(step)


def traced_units(program):
    units = program.computations.values()
    saved = {v for unit in units if unit.name.kind == "B" for v in unit.reads}
    saved = [shape_of(v) for v in saved if program.producer[v].kind == "F"]
    return num_bytes(saved), sum(equation_flops(eqn) for unit in units for eqn in unit.equations)


@pytest.mark.parametrize("schedule", ["circular", "lockstep_1f1b", "interleaved_1f1b"])
def test_remat_options_decide_what_is_saved_and_computed_again(schedule, monkeypatch):
    measured = {
        options: traced(schedule, options, monkeypatch)
        for options in (NEITHER, ITERATIONS, LAYERS, BOTH)
    }
    saved = {options: bytes_ for options, (bytes_, _) in measured.items()}
    flops = {options: count for options, (_, count) in measured.items()}
    # An iteration saves its input, with `remat_layers` alone the input of each layer.
    assert saved[NEITHER] > saved[LAYERS] > saved[ITERATIONS] == saved[BOTH]
    # Each option makes a pass more through the layers, without what no backward needs.
    one_pass = min(flops[ITERATIONS], flops[LAYERS]) - flops[NEITHER]
    assert one_pass > 0.15 * flops[NEITHER]
    assert flops[BOTH] - max(flops[ITERATIONS], flops[LAYERS]) > 0.3 * one_pass


def step_of(words):
    return EngineUnderTest(tiny(words)).traced().jaxpr


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(open_jaxpr(inner))


def num_activations(jaxpr):
    return sum(eqn.primitive.name == "logistic" for eqn in equations(jaxpr))


@pytest.mark.parametrize("schedule", ["circular", "lockstep_1f1b"])
def test_remat_cheap_decides_how_often_a_backward_computes_activation_functions(schedule):
    held, again = (
        num_activations(step_of(f"{LAYOUT}{schedule} remat_cheap={value}"))
        for value in ("false", "true")
    )
    assert 0 < held < again


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {False}),
        ("scan_layers=false", {True}),
        ("num_layers=1", {True}),
        # A layer is kept apart from what the iteration around it computes again.
        (LAYOUT + "circular", {False, True}),
        (LAYOUT + "circular remat_cheap=false", {False}),
        (LAYOUT + "circular scan_iterations=false", {True}),
        (LAYOUT + "lockstep_1f1b", {False, True}),
        (LAYOUT + "lockstep_1f1b remat_cheap=false", {False}),
        (LAYOUT + "lockstep_1f1b remat_layers=true", {False, True}),
        ("engine=scheduled schedule=lockstep_1f1b num_repeats=1", {True}),
    ],
)
def test_recomputation_is_kept_apart_from_a_forward_that_xla_could_merge_it_with(words, expected):
    """Merged, it would be saved after all."""
    program = step_of(words)
    # The head's is unrolled always; these are of layers.
    apart = {
        eqn.params["prevent_cse"]
        for eqn in equations(program)
        if eqn.primitive.name in CHECKPOINTS
        and any(e.primitive.name == "logistic" for e in equations(open_jaxpr(eqn.params["jaxpr"])))
    }
    assert apart == expected
