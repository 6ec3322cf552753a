"""Test that presets have the published sizes, and commands that fit their chips and a laptop."""

import functools
import json
import re
import shlex
from pathlib import Path

from maxpipe.config import load, resolve
from maxpipe.config.from_hf import read_shape
from maxpipe.hf.matching import shape_problems
from maxpipe.plan.flops import active_parameter_count, parameter_count

PRESETS = Path(__file__).parents[1] / "configs" / "models"
PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "deepseek-v3": 671_026_419_200,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "smollm3-3b": 3_075_098_624,
    "phi4-14b": 14_659_507_200,
    "gemma2-9b": 9_241_705_984,
    "gemma3-27b": 27_009_346_304,
    "olmo2-7b": 7_298_617_344,
    "olmo3-7b": 7_298_011_136,
    "granite3.3-8b": 8_170_864_640,
}


def path_of(name):
    return PRESETS / f"{name}.yml"


def commands_of(name):
    comment = path_of(name).read_text().partition("\nbase:")[0]
    text = re.sub(r"\\\n#", "", comment)
    return [
        shlex.split(line) for line in re.findall(r"^# +python -m maxpipe\.train (.*)$", text, re.M)
    ]


@functools.cache
def for_slice(name):
    chips = int(re.search(r"\((\d+) chips\)", path_of(name).read_text())[1])
    return resolve(load(path_of(name)), chips)


def test_presets_have_the_published_parameter_counts_and_say_them_first():
    assert {path.stem for path in PRESETS.glob("*.yml")} == {*PARAMETERS}
    assert {name: parameter_count(for_slice(name).model) for name in PARAMETERS} == PARAMETERS
    first = {name: path_of(name).read_text().splitlines()[0] for name in PARAMETERS}
    assert {n: t for n, t in first.items() if f"{PARAMETERS[n]:,} parameters" not in t} == {}


def test_presets_have_the_shape_that_the_published_files_say(tmp_path):
    published = json.loads((Path(__file__).parent / "golden" / "published.json").read_text())
    problems = {}
    for name in PARAMETERS:
        (tmp_path / "config.json").write_text(json.dumps(published[name]))
        problems[name] = shape_problems(for_slice(name), read_shape(str(tmp_path)), "")
    assert problems == {name: [] for name in PARAMETERS}


def test_presets_with_experts_have_the_published_active_parameters():
    # Parameters that a token uses, as the names of the models say them in thousands of millions
    active = {
        "deepseek-v3": 37_552_297_472,
        "mixtral-8x7b": 12_879_925_248,
        "qwen3-30b-a3b": 3_353_032_704,
        "gpt-oss-20b": 4_187_440_704,
    }
    assert {name: active_parameter_count(for_slice(name).model) for name in active} == active
    texts = {name: path_of(name).read_text() for name in active}
    assert [n for n, text in texts.items() if f"{active[n]:,} parameters" not in text] == []


def test_presets_on_their_slices_have_the_layouts_in_the_comments():
    unlike = {}
    for name in PARAMETERS:
        config = for_slice(name)
        pipeline = config.pipeline
        layout = (
            f"{config.mesh.ici.stage} stages x {config.mesh.ici.fsdp} fsdp,"
            f" {pipeline.num_repeats} repeats of {pipeline.num_layers_per_stage} layers per stage,"
            f" {pipeline.num_microbatches} microbatches"
        )
        if config.mesh.ici.stage == 1:
            experts = config.mesh.ici.expert
            layout = f"{config.mesh.ici.fsdp} fsdp" + f" x {experts} expert" * (experts > 1)
        if layout not in re.sub(r"\n# ", " ", path_of(name).read_text()):
            unlike[name] = layout
    assert unlike == {}


def test_presets_with_the_laptop_command_fit_their_simulated_devices():
    for name in PARAMETERS:
        full, (own_path, *overrides) = commands_of(name)
        assert full[0] == own_path == f"configs/models/{name}.yml"
        loaded = load(path_of(name), overrides)
        config = resolve(loaded, loaded.config.mesh.simulated_devices)
        assert config.pipeline.engine in ("scheduled", "circular"), name
        assert parameter_count(config.model) < 10_000_000, name
