"""Any file and any override gives a Config or a ConfigError."""

import string

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from maxpipe.config import Config, ConfigError, load, resolve, to_yaml
from maxpipe.config.options import OPTIONS, SECTIONS, get

WORDS = [
    *("-1", "0", "1", "2", "3", "4", "8", "1e3", "4k", "1e15", "1e9999", "-5", "0.5", "nan"),
    *("true", "off", "null", "''", "[]", "[1,2]", "[5,3]", "[[embed,[fsdp]]]", "{a: 1}", "", "a/b"),
    *("circular", "gpipe", "lockstep_1f1b", "zb_h1", "sequential"),
    *("${steps}", "${seed}", "${oc.env:HOME}"),
]
values = st.one_of(st.sampled_from(WORDS), st.integers(-3, 64).map(str), st.text(max_size=8))
keys = st.one_of(
    st.sampled_from(list(OPTIONS)), st.text(string.ascii_lowercase + "._", max_size=12)
)
words = st.lists(st.tuples(keys, values).map("=".join), max_size=4)
fast = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@fast
@example(["__dict__=-1"], 1, 1)
@given(words, st.sampled_from([1, 2, 3, 4, 6, 8, 64, 720]), st.sampled_from([1, 2]))
def test_any_overrides_give_a_config_or_a_config_error(base, overrides, devices, slices):
    try:
        config = resolve(load(base, overrides), devices * slices, slices)
    except ConfigError as error:
        config = error
    if isinstance(config, ConfigError):
        for problem in config.problems:
            assert problem.message
            assert "\n" not in problem.message
            assert problem.source or any(key in str(problem) for key in (*OPTIONS, *SECTIONS))
        return
    assert isinstance(config, Config)
    assert not [
        key for key, option in OPTIONS.items() if option.bounds.derived and get(config, key) == -1
    ]
    pipeline, mesh = config.pipeline, config.mesh
    stages = mesh.size("stage")
    if not pipeline.layers_per_stage:
        assert (
            stages * pipeline.num_repeats * pipeline.num_layers_per_stage == config.model.num_layers
        )
    shards = mesh.size("data") * mesh.size("fsdp")
    assert config.data.global_batch_size % (shards * pipeline.num_microbatches) == 0


trees = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(list(OPTIONS)), inner)
    ),
    max_leaves=5,
)


@fast
@given(
    st.dictionaries(
        st.one_of(st.sampled_from(list(OPTIONS)), st.sampled_from(["model", "mesh"])), trees
    )
)
def test_any_tree_as_a_file_gives_a_config_or_a_config_error(write, tree):
    try:
        loaded = load(write("run.yml", yaml.safe_dump(tree)))
    except ConfigError:
        return
    assert load(write("again.yml", to_yaml(loaded.config))).config == loaded.config
