import jax
import jax.numpy as jnp
import pytest
from helpers.engines import make_mesh, tiny
from jax.sharding import PartitionSpec as P

from maxpipe.builder import build_trainer
from maxpipe.config import ConfigError
from maxpipe.config.sections.parallelism import DEFAULT_RULES
from maxpipe.pipeline.microbatches import ARRAYS
from maxpipe.sharding.rules import AxisRules, without


@pytest.fixture(scope="module")
def mesh():
    axes = {f"mesh.ici.{axis}": 2 for axis in ("data", "stage", "fsdp")}
    return make_mesh(tiny(**axes))


@pytest.fixture
def rules(mesh):
    return AxisRules(DEFAULT_RULES, mesh)


def problem_of(call, *args):
    with pytest.raises(ConfigError) as error:
        call(*args)
    (problem,) = error.value.problems
    assert problem.key == "sharding.logical_axis_rules"
    return problem.message


def test_spec_follows_the_rules(rules):
    assert rules.spec(("activation_batch", "activation_length")) == P(("data", "fsdp"), None)
    layers = ("repeat", "stage", "layers_per_stage", "embed")
    assert rules.spec(layers) == P(None, "stage", None, "fsdp")
    assert rules.spec((None, "embed")) == P(None, "fsdp")
    assert rules.spec(("embed", "mlp")) == P("fsdp", None)  # tensor has size one
    assert rules.size("activation_batch") == 4
    assert rules.size("mlp") == 1


def test_spec_of_an_axis_without_a_rule_is_refused(rules):
    message = problem_of(rules.spec, ("embed", "experts"))
    assert all(part in message for part in ("no rule for logical axis 'experts'", "[experts, []]"))


def test_spec_of_two_dimensions_on_one_mesh_axis_is_refused(mesh):
    rules = AxisRules([["embed", ["fsdp"]], ["mlp", ["data", "fsdp"]]], mesh)
    message = problem_of(rules.spec, ("embed", "mlp"))
    assert all(word in message for word in ("'embed'", "'mlp'", "'fsdp'"))
    # One of size one is allowed.
    rules = AxisRules([["embed", ["tensor"]], ["mlp", ["tensor"]]], mesh)
    assert rules.spec(("embed", "mlp")) == P(None, None)


def test_spec_of_an_indivisible_dimension_is_not_split_and_reported_once(mesh):
    said = []
    rules = AxisRules(DEFAULT_RULES, mesh, said.append)
    for _ in range(2):
        assert rules.spec(("embed", "mlp"), (7, 12)) == P(None, None)
    (line,) = said
    assert all(word in line for word in ("'embed'", "7", "'fsdp'"))
    rules.spec(("embed", "mlp"), (9, 12))
    assert len(said) == 2


def test_spec_uses_the_mesh_axes_that_divide(rules):
    assert rules.spec(("activation_batch",), (6,)) == P("data")
    assert rules.spec(("activation_batch",), (8,)) == P(("data", "fsdp"))
    assert rules.spec(("activation_batch",), (3,)) == P(None)


def test_without_removes_mesh_axes():
    assert without(P(("data", "fsdp"), "stage", None), ("fsdp",)) == P("data", "stage", None)
    assert without(P("fsdp", ("data", "stage", "fsdp")), ("fsdp",)) == P(None, ("data", "stage"))


def test_constrain_shows_each_constraint_once_with_its_axes(mesh):
    lines = []
    rules = AxisRules(DEFAULT_RULES, mesh, show=lines.append)

    def layer(x):
        return rules.constrain(
            2 * rules.constrain(x, ("activation_batch", None)), ("activation_batch", None)
        )

    jax.jit(layer)(jnp.ones((8, 3)))
    assert lines == ["constraint: float32 [activation_batch=8, -=3] over (('data', 'fsdp'), None)"]


def test_constrain_inside_a_manual_program_leaves_its_axes_out(mesh):
    lines = []
    rules = AxisRules(DEFAULT_RULES, mesh, show=lines.append)

    def local(x):
        return rules.constrain(x, ("activation_stage", "activation_batch"))

    rows = P(None, ("data", "fsdp"))
    options = {"axis_names": {"data", "fsdp"}, "check_vma": False}
    run = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, **options)
    x = jnp.arange(16.0).reshape(2, 8)
    assert (jax.jit(run)(x) == x).all()
    (line,) = lines
    assert line.startswith(
        "constraint: float32 [activation_stage=2, activation_batch=2] over ('stage', None)"
    )
    assert line.endswith(("manual over data, fsdp", "manual over fsdp, data"))


def test_sharding_debug_prints_the_steps_constraints(capsys):
    config = tiny("schedule=circular stage=2 fsdp=2", **{"sharding.debug": True})
    engine = build_trainer(config, make_mesh(config))
    batch = dict.fromkeys(ARRAYS, jax.ShapeDtypeStruct((16, 8), jnp.int32))
    batch["weights"] = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    engine.jitted_step.lower(engine.abstract_state(), batch)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) > 10
    dims = "activation_stage=2, activation_batch=8, activation_length=8, -=16"
    assert f"constraint: float32 [{dims}] over ('stage', 'fsdp', None, None)" in lines
    assert "constraint: float32 [embed=16, mlp=32] over (None, None)" in lines  # gathered for use
