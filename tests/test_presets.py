"""The model presets: shapes as published, and layouts that the chips named in them can run."""

import re
from pathlib import Path

import pytest
import yaml

from maxpipe.config.sections import ModelConfig, RopeScalingConfig
from maxpipe.telemetry.flops import parameter_count

PRESETS = Path(__file__).parents[1] / "configs" / "models"
PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
}


def load(name):
    return yaml.safe_load((PRESETS / f"{name}.yml").read_text())


def model_of(name):
    values = load(name)["model"]
    return ModelConfig(**values | {"rope_scaling": RopeScalingConfig(**values.get("rope_scaling", {}))})


def test_every_preset_is_covered():
    assert {path.stem for path in PRESETS.glob("*.yml")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count_is_the_published_one(name):
    assert parameter_count(model_of(name)) == PARAMETERS[name]
    assert f"{PARAMETERS[name]:,} parameters" in (PRESETS / f"{name}.yml").read_text().splitlines()[0]


@pytest.mark.parametrize("name", PARAMETERS)
def test_activations_are_bfloat16_and_parameters_float32(name):
    assert (model_of(name).dtype, model_of(name).param_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_file_opens_with_its_own_command(name):
    commands = re.findall(r"^# +python -m maxpipe\.train (\S+)", (PRESETS / f"{name}.yml").read_text(), re.M)
    assert commands == [f"configs/models/{name}.yml"] * 2


@pytest.mark.parametrize("name", PARAMETERS)
def test_layers_and_batch_divide_on_the_slice_it_is_sized_for(name):
    preset = load(name)
    chips = int(re.search(r"\((\d+) chips\)", (PRESETS / f"{name}.yml").read_text())[1])
    stages, pipeline = preset["mesh"]["ici"]["stage"], preset["pipeline"]
    assert chips % stages == 0
    assert preset["model"]["num_layers"] % (stages * pipeline["num_repeats"]) == 0
    assert pipeline["num_microbatches"] % stages == 0
    assert preset["data"]["global_batch_size"] % (pipeline["num_microbatches"] * (chips // stages)) == 0
