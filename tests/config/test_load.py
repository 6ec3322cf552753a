"""Loading: precedence, sources, all problems at once; resolving and replacing."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from maxpipe.config import Config, ConfigError, load, replace, resolve
from maxpipe.config.catalog import SCHEDULES
from maxpipe.config.load import from_record
from maxpipe.config.options import OPTIONS


def test_load_precedence_is_base_preset_file_command_line(write):
    table = {  # steps in the base, the preset and the file, words: steps of the run
        ("", "", "", ()): 200,
        ("steps: 1", "", "", ()): 1,
        ("steps: 1", "steps: 2", "", ()): 2,
        ("steps: 1", "steps: 2", "steps: 3", ()): 3,
        ("steps: 1", "", "steps: 3", ("steps=4", "steps=5")): 5,
    }
    steps = {}
    for in_base, in_preset, in_file, words in table:
        write("base.yml", in_base)
        write("models/preset.yml", f"base: ../base.yml\n{in_preset}\n")
        path = write("run.yml", f"base: models/preset.yml\n{in_file}\n")
        steps[in_base, in_preset, in_file, words] = load(path, words).config.steps
    assert steps == table


def test_load_merges_sections_key_by_key_and_replaces_lists(write):
    steps = "telemetry: {profile_steps: [10, 12]}"
    write("base.yml", f"model: {{num_layers: 4, embed_dim: 64}}\n{steps}\n")
    text = "base: base.yml\nmodel: {num_layers: 6}\ntelemetry: {profile_steps: [3, 4]}\n"
    config = load(write("run.yml", text)).config
    assert (config.model.num_layers, config.model.embed_dim) == (6, 64)
    assert config.telemetry.profile_steps == [3, 4]


def test_load_takes_dotted_keys_and_flow_mappings(write):
    path = write("run.yml", "mesh.ici.stage: 2\nmesh: {ici: {fsdp: 2}}\n")
    config = load(path, ["mesh.dcn={data: 2}"]).config
    assert (config.mesh.ici.stage, config.mesh.ici.fsdp, config.mesh.dcn.data) == (2, 2, 2)


def keys_refused(base, *words, undecided=()):
    with pytest.raises(ConfigError) as caught:
        load(base, words, undecided)
    return {problem.key for problem in caught.value.problems}


def test_load_raises_all_problems_at_once(base):
    words = ["stepz=4", "steps=abc", "optimizer.name=adam", "run_name=a/b", "model.num_layers=9"]
    assert keys_refused(base, *words, "nonsense") == {"", *(w.partition("=")[0] for w in words)}


def test_load_broken_key_silences_only_dependent_rules(problems):
    refusals = problems("steps=abc", "optimizer.warmup_steps=1000", "data.global_batch_size=15")
    assert set(refusals) == {"steps", "data.global_batch_size"}


def test_load_problems_have_the_source_of_the_value(base):
    source = rf"data.global_batch_size \({base}:7\): 16 is not divisible"
    with pytest.raises(ConfigError, match=source):
        load(base, ["pipeline.num_microbatches=6"])


def test_resolve_twice_changes_nothing(resolved):
    for words in ((), ("pipeline.engine=sequential", "mesh.ici.stage=1", "mesh.ici.fsdp=4")):
        once = resolved(*words)
        assert resolve(once, 4) == once


def test_load_names_a_mesh_that_misfits_without_what_only_follows_from_it(base):
    words = ("mesh.ici.stage=3", "mesh.simulated_devices=4")
    following = {"model.num_layers", "data.global_batch_size"}
    assert keys_refused(base, *words) == {"mesh.ici"}
    assert keys_refused(base, *words, "checkpoint.keep_every=7", "steps=0") == {
        "mesh.ici",
        "checkpoint.keep_every",
        "steps",
    }
    assert keys_refused(base, "mesh.ici.stage=3") == following
    assert keys_refused(base, *words, "compile.topology=v5p:2x2x3") == following


def test_replace_raises_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        replace(Config(), stage=2, steps="5", seed=-1)
    assert [problem.key for problem in caught.value.problems] == ["stage", "steps", "seed"]


def recorded(config):
    return json.loads(json.dumps(dataclasses.asdict(config)))


def test_from_record_of_a_saved_configuration_returns_it():
    config = resolve(load("configs/base.yml"), num_devices=4)
    assert from_record(recorded(config)) == config
    own = recorded(config)
    own["model"]["block"] = "one_that_a_module_adds"
    own["model"]["moe"] |= {"experts": 4, "router": "one_of_its_own"}
    own["of_a_later_version"] = 3
    model = from_record(own).model
    assert (model.block, model.moe.router) == ("one_that_a_module_adds", "one_of_its_own")
    assert from_record({"model": {"num_layers": 3}}) == replace(Config(), **{"model.num_layers": 3})


def test_from_record_values_that_no_run_has_saved_are_refused():
    crafted = recorded(resolve(load("configs/base.yml"), num_devices=4))
    crafted["seed"] = "x"
    crafted["data"]["sequence_length"] = 10**18
    crafted["model"]["num_kv_heads"] = 3
    with pytest.raises(ConfigError) as caught:
        from_record(crafted)
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {"seed", "data.sequence_length", "model.num_kv_heads"}
    assert "seed (record of the checkpoint): expected a whole number" in str(caught.value)


# What was legal before runs had a fingerprint; stored configurations have every key of that time.
EARLIER = sorted((Path(__file__).parents[1] / "golden" / "stored").glob("*/config.yml"))
EARLIER_SCHEDULES = {
    *("1f1b", "circular", "dualpipe_v", "eager_1f1b", "gpipe", "interleaved_1f1b"),
    *("lockstep_1f1b", "lockstep_zb", "v_half", "v_min", "zb_h1", "zb_h2", "zb_v"),
}


def test_load_every_key_and_schedule_of_an_earlier_version_stays_legal():
    assert len(EARLIER) == 2
    for path in EARLIER:
        keys = re.findall(r"^ *\w+: \S", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(keys) > 100
        assert load(path).config.run_name == path.parent.name
    assert SCHEDULES.keys() >= EARLIER_SCHEDULES


def test_load_judges_undecided_keys_alone_and_not_how_they_go_together(base):
    words = ["mesh.ici.stage=3", "pipeline.num_repeats=5", "mesh.ici.data=-1", "mesh.ici.fsdp=-1"]
    undecided = [key for key in OPTIONS if key.startswith(("mesh.", "pipeline."))]
    with pytest.raises(ConfigError):
        load(base, words)
    loaded = load(base, words, undecided)
    assert loaded.config.mesh.ici.stage == 3
    assert loaded.config.pipeline.num_repeats == 5
    simulated = load(base, ["mesh.simulated_devices=7"], undecided)
    assert simulated.config.mesh.simulated_devices == 7


def test_load_refuses_illegal_values_of_undecided_keys_and_broken_rules_of_others(base):
    undecided = ["pipeline.num_repeats", "pipeline.engine"]
    for word in ("pipeline.num_repeats=0", "pipeline.num_repeats=two", "model.num_kv_heads=3"):
        assert keys_refused(base, word, undecided=undecided) == {word.partition("=")[0]}
