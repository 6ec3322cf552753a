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


def test_to_yaml_keeps_a_path_of_a_mixture_that_looks_like_a_number(base, write):
    paths = ["4k", "08", "1e5", "12", ".5", "1_0", "a.txt"]
    entries = [{"source": "text", "path": path, "weight": 1.0} for path in paths]
    config = load(base, [f"data.mixture={json.dumps(entries)}"]).config
    assert config.data.mixture == entries
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


def test_print_config_marks_values_that_depend_on_devices(base):
    text = print_config(load(base, ["mesh.ici.fsdp=-1"]))
    assert "fsdp: -1" in text
    assert "# command line; derived at start" in text


def test_notes_give_reasons_of_derived_values(base):
    loaded = load(base, ["mesh.ici.fsdp=-1", "pipeline.num_repeats=2"])
    lines = notes(resolve(loaded, 4), loaded)
    assert "mesh.ici.fsdp=2: the devices that the other axes leave" in lines
    assert "pipeline.engine=circular: it runs schedule circular" in lines
    assert "pipeline.num_layers_per_stage=2: 8 layers over 2 stages x 2 repeats" in lines
    assert "pipeline.num_microbatches=2: one per stage" in lines
    assert "model.head_dim=16: model.embed_dim / model.num_query_heads" in lines
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


def test_notes_name_keys_that_the_optimizer_does_not_use(noted):
    words = ["optimizer.beta1=0.8", "optimizer.beta2=0.9", "optimizer.eps=1e-6"]

    def named(optimizer):
        lines = noted(*words, f"optimizer.name={optimizer}")
        return [line.partition(" ")[0] for line in lines if " has no effect" in line]

    assert {o: named(o) for o in ("adafactor", "sgd", "adamw", "muon")} == {
        "adafactor": ["optimizer.beta1", "optimizer.beta2", "optimizer.eps"],
        "sgd": ["optimizer.beta2", "optimizer.eps"],
        "adamw": [],
        "muon": [],
    }


YARN = "model.rope_scaling.type=yarn model.rope_scaling.factor=2"
WITHOUT_EFFECT = {  # word, the word that switches it off, others: words with which it acts
    ("optimizer.final_fraction=0.5", "optimizer.schedule=constant", ""): "optimizer.schedule=wsd",
    ("optimizer.stable_fraction=0.5", "optimizer.schedule=constant", ""): "optimizer.schedule=wsd",
    ("optimizer.stable_fraction=0.5", "optimizer.schedule=linear", ""): "optimizer.schedule=wsd",
    ("optimizer.spike_deviations=4", "optimizer.spike_window=0", ""): "optimizer.spike_window=100",
    ("eval.batches=8", "eval.every=0", ""): "eval.every=100",
    ("checkpoint.keep=5", "checkpoint.every=0", ""): "checkpoint.every_minutes=5",
    ("model.qk_norm_scope=full", "model.qk_norm=false", ""): "model.qk_norm=true",
    ("model.rope_theta_local=500", "model.attention_window=0", ""): "model.attention_window=64",
    ("model.rope_scaling.type=yarn", "model.rope_scaling.factor=1", ""): YARN,
    (
        "model.rope_scaling.beta_fast=16",
        "model.rope_scaling.type=llama3",
        "model.rope_scaling.factor=2",
    ): YARN,
    (
        "model.rope_scaling.length=long",
        "model.rope_scaling.type=llama3",
        "model.rope_scaling.factor=2",
    ): YARN,
}


def test_notes_name_keys_that_another_key_switches_off(noted):
    for (word, off, others), on in WITHOUT_EFFECT.items():
        line = f"{word.partition('=')[0]} has no effect with {off}"
        assert line in noted(word, off, *others.split())
        assert line not in noted(off, *others.split())
        assert line not in noted(word, *on.split())


def test_notes_name_no_key_without_effect_that_was_only_derived(noted):
    line = "eval.batches_per_source has no effect with eval.every=0"
    assert line not in noted("eval.every=0", "eval.batches=4")
    assert line in noted("eval.every=0", "eval.batches_per_source=0")


def test_notes_name_steps_that_are_never_reached(noted):
    lines = noted("stop_after=100")
    assert max(map(len, lines)) < 100
    assert "stop_after=100 has no effect: the run ends at steps=100" in lines


def test_notes_a_rule_of_a_logical_axis_that_no_array_has(noted):
    rules = [*DEFAULT_RULES, ["activation_lenght", ["context"]]]
    lines = noted(f"sharding.logical_axis_rules={json.dumps(rules)}")
    (line,) = [line for line in lines if "logical axis" in line]
    assert "the rule of 'activation_lenght' has no effect" in line
    assert line.endswith("; did you mean activation_length?")


def test_notes_prefetch_without_shards_has_no_effect(noted):
    words = ["pipeline.engine=scheduled", "pipeline.schedule=lockstep_1f1b"]
    words.append("pipeline.fsdp_prefetch=true")
    line = "pipeline.fsdp_prefetch=true has no effect: with fsdp=1 weights are whole"
    assert line in noted(*words, "mesh.ici.fsdp=1", "mesh.ici.data=2")
    assert line not in noted(*words)


def test_notes_topology_is_for_compile_only(noted):
    line = noted("compile.topology=v5p:2x2x1", "compile.num_slices=2")[-1]
    assert line.startswith("compile.topology: for maxpipe.compile only")


def test_notes_of_runs_without_surprises_are_none(base):
    by_the_clock = ["checkpoint.every=0", "checkpoint.every_minutes=5", "checkpoint.keep=5"]
    for words in ([], by_the_clock):
        assert notes(resolve(load(base, words), 4)) == []


def test_repr_of_a_config_is_its_differences_as_yaml():
    config = load("base", ["model.num_layers=12"]).config
    assert "model:\n  num_layers: 12\n" in repr(config)
    assert "checkpoint:\n  every: 50\n" in repr(config)
    assert "keep" not in repr(config)
