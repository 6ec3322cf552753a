"""Test that presets have the published sizes, and commands that fit their chips and a laptop."""

import json
import re
import shlex
from pathlib import Path

import pytest
from helpers.published_configs import PUBLISHED

from maxpipe.config import load, resolve
from maxpipe.config.from_hf import read_shape
from maxpipe.hf.matching import shape_problems
from maxpipe.planning.flops import active_parameter_count, parameter_count

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
    """Return the arguments of each `python -m maxpipe.train` in the preset's opening comment."""
    comment = path_of(name).read_text().partition("\nbase:")[0]
    text = re.sub(r"\\\n#", "", comment)
    return [
        shlex.split(line) for line in re.findall(r"^# +python -m maxpipe\.train (.*)$", text, re.M)
    ]


def for_slice(name):
    """Resolve a preset for the number of chips that its comment names."""
    chips = int(re.search(r"\((\d+) chips\)", path_of(name).read_text())[1])
    return resolve(load(path_of(name)), chips)


def test_presets_all_have_a_published_size():
    assert {path.stem for path in PRESETS.glob("*.yml")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_has_the_published_parameter_count(name):
    assert parameter_count(for_slice(name).model) == PARAMETERS[name]
    assert f"{PARAMETERS[name]:,} parameters" in path_of(name).read_text().splitlines()[0]


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_has_the_shape_that_the_published_file_says(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    shape = read_shape(str(tmp_path))
    assert shape_problems(for_slice(name), shape, "") == []


# Parameters that a token uses, as the names of the models say them in thousands of millions
ACTIVE = {
    "deepseek-v3": 37_552_297_472,
    "mixtral-8x7b": 12_879_925_248,
    "qwen3-30b-a3b": 3_353_032_704,
    "gpt-oss-20b": 4_187_440_704,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_preset_with_experts_has_the_published_active_parameters(name):
    assert active_parameter_count(for_slice(name).model) == ACTIVE[name]
    assert f"{ACTIVE[name]:,} parameters" in path_of(name).read_text()


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_has_bfloat16_activations_and_float32_parameters(name):
    model = for_slice(name).model
    assert (model.dtype, model.param_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_on_its_slice_has_the_layout_in_the_comment(name):
    config = for_slice(name)
    pipeline = config.pipeline
    layout = (
        f"{config.mesh.ici.stage} stages x {config.mesh.ici.fsdp} fsdp,"
        f" {pipeline.num_repeats} repeats of {pipeline.num_layers_per_stage} layers per stage,"
        f" {pipeline.num_microbatches} microbatches"
    )
    assert layout in re.sub(r"\n# ", " ", path_of(name).read_text())


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_with_the_laptop_command_fits_four_simulated_devices(name):
    full, (own_path, *overrides) = commands_of(name)
    assert full[0] == own_path == f"configs/models/{name}.yml"
    config = resolve(
        load(path_of(name), overrides), load(path_of(name)).config.mesh.simulated_devices
    )
    assert config.pipeline.engine in ("scheduled", "circular")
    assert parameter_count(config.model) < 10_000_000
