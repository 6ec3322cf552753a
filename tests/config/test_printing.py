"""Configs written to disk can be read back; sources and automatic decisions are shown."""

import json

import yaml

from maxpipe.config import Config, load, notes, print_config, resolve, to_yaml
from maxpipe.config.options import OPTIONS
from maxpipe.config.sections.parallelism import DEFAULT_RULES

ODD = [
    "run_name=007",
    "pipeline.skip_idle=false",
    "compile.cache_dir=off",
    "data.source=text",
    "data.path=a: #b'",
    "checkpoint.resume=12",
    "pipeline.layers_per_stage=[5,3]",
    "telemetry.profile_steps=[2,3]",
    "model.norm_eps=1e-12",
]


def test_to_yaml_reads_back_to_an_equal_config(base, write):
    for config in (Config(), load(base, ODD).config, resolve(load(base, ODD), 4)):
        assert load(write("again.yml", to_yaml(config))).config == config


def test_print_config_is_yaml_with_sources(base):
    loaded = load(base, ["seed=3"])
    text = print_config(loaded)
    lines = {line.partition(":")[0].strip(): line for line in text.splitlines()}
    assert lines["seed"].endswith("# command line")
    assert lines["num_layers"].endswith(f"# {base}:4")
    assert lines["head_dim"].split("#") == ["  head_dim: 16".ljust(46), " derived"]
    assert lines["output_dir"].endswith("# default")
    assert text.count("  # ") == len(OPTIONS)
    assert yaml.safe_load(text)["mesh"]["ici"]["stage"] == 2


def test_notes_give_reasons_of_derived_values(base):
    loaded = load(base, ["mesh.ici.fsdp=-1", "pipeline.num_repeats=2"])
    lines = notes(resolve(loaded, 4), loaded)
    assert "mesh.ici.fsdp=2: what the other axes leave" in lines
    assert "pipeline.engine=circular: it runs schedule circular" in lines
    assert "pipeline.num_layers_per_stage=2: layers / (stages x num_repeats)" in lines
    assert "pipeline.num_microbatches=2: stages (twice as many with delayed forwarding)" in lines
    assert "model.head_dim=16: embed_dim / num_query_heads, or model.mla's" in lines
    assert not any(line.startswith("pipeline.num_repeats") for line in lines)


def test_values_derived_as_their_help_says_are_listed_only_if_asked_for():
    loaded = load("base", ["data.source=synthetic", "model.vocab_size=64"])
    resolved = resolve(loaded, 4)
    every, surprising = (
        {line.partition("=")[0] for line in notes(resolved, loaded, verbose=verbose)}
        for verbose in (True, False)
    )
    assert "optimizer.warmup_steps" in every - surprising
    assert "data.tokenizer" in surprising


def test_notes_a_rule_of_a_logical_axis_that_no_array_has(noted):
    rules = [*DEFAULT_RULES, ["activation_lenght", ["context"]]]
    lines = noted(f"sharding.logical_axis_rules={json.dumps(rules)}")
    (line,) = [line for line in lines if "logical axis" in line]
    assert "the rule of 'activation_lenght' has no effect" in line
    assert line.endswith("; did you mean activation_length?")


def test_repr_of_a_config_is_its_differences_as_yaml():
    config = load("base", ["model.num_layers=12"]).config
    assert "model:\n  num_layers: 12\n" in repr(config)
    assert "checkpoint:\n  every: 50\n" in repr(config)
    assert "keep" not in repr(config)
