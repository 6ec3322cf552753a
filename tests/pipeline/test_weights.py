"""Where parameters lie at rest, and what the gathers leave sharded."""

import jax
import pytest
from helpers.engines import canonical_params, make_mesh, tiny
from jax.sharding import PartitionSpec as P

from maxpipe.builder import build_engine_inputs
from maxpipe.pipeline.weights import Weights, axes_in_use, spec_in_use


@pytest.fixture(scope="module")
def setting():
    config = tiny("stage=2 fsdp=2 tensor=2 num_repeats=2 qk_norm=true")
    parts = build_engine_inputs(config, make_mesh(config))
    weights = Weights(
        parts.rules, parts.program.specs, ("repeat", "stage", "layers_per_stage"), (2, 2, 1)
    )
    params = canonical_params(parts.program)
    params["layers"] = jax.tree.map(lambda p: p.reshape(2, 2, 1, *p.shape[1:]), params["layers"])
    return weights, jax.device_put(params, weights.shardings())


def spec_of(x):
    entries = list(x.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def test_shardings_at_rest_follow_the_rules(setting):
    _, params = setting
    layers = params["layers"]
    expected = {
        ("attention", "query"): P(None, "stage", None, "fsdp", "tensor"),
        ("attention", "out"): P(None, "stage", None, "tensor", None, "fsdp"),
        ("mlp", "down"): P(None, "stage", None, "tensor", "fsdp"),
        ("attention_norm", "scale"): P(None, "stage"),
    }
    for (part, name), spec in expected.items():
        assert spec_of(layers[part][name]) == spec
    # Embedding and head spread over the stages too, since every stage stores a share of them.
    assert spec_of(params["embed"]["embedding"]) == P("tensor", ("stage", "fsdp"))
    assert spec_of(params["head"]["kernel"]) == P(("stage", "fsdp"), "tensor")


def test_abstract_parameters_have_shape_dtype_and_layout_of_live_ones(setting):
    weights, params = setting
    facts = [
        jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
        for tree in (weights.abstract(), params)
    ]
    assert facts[0] == facts[1]


def test_gathers_over_fsdp_and_stage_leave_tensor_split(setting):
    weights, params = setting
    one = jax.tree.map(lambda p: p[0, 0, 0], params["layers"])
    layer, outer = jax.jit(weights.gather_layer)(one), jax.jit(weights.gather_outer)(params)
    assert spec_of(layer["attention"]["query"]) == P(None, "tensor")
    assert spec_of(layer["mlp"]["down"]) == P("tensor")
    assert set(outer) == {"embed", "head"}
    assert spec_of(outer["embed"]["embedding"]) == P("tensor")
    assert spec_of(outer["head"]["kernel"]) == P(None, "tensor")


def test_weights_of_experts_in_use_stay_split_over_their_axis():
    config = tiny("engine=sequential expert=2 fsdp=2 tensor=2 moe.experts=4 moe.mlp_dim=16")
    parts = build_engine_inputs(config, make_mesh(config))
    layers = parts.program.specs["layers"]
    gate, query = layers["moe"]["gate"], layers["attention"]["query"]
    assert axes_in_use(parts.rules, gate) == {"expert"}
    assert axes_in_use(parts.rules, query) == set()
    assert [*spec_in_use(parts.rules, gate)] == ["expert", None, "tensor"]
    assert [*spec_in_use(parts.rules, query)][:2] == [None, "tensor"]
