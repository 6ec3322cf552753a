"""`${other.key}` is followed; references to the environment are refused."""

import pytest

from maxpipe.config import ConfigError, load


def test_reference_gets_the_final_value(base):
    config = load(
        base, ["eval.every=${steps}", "run_name=run-${seed}-${model.dtype}", "seed=3"]
    ).config
    assert config.eval.every == 100
    assert config.run_name == "run-3-float32"


def test_reference_follows_references_and_defaults(base):
    config = load(
        base, ["eval.every=${checkpoint.every}", "checkpoint.every=${steps}", "steps=1e3"]
    ).config
    assert (config.eval.every, config.checkpoint.every) == (1000, 1000)
    assert load(base, ["model.norm_eps=${optimizer.eps}"]).config.model.norm_eps == 1e-8


def test_reference_inside_a_list_is_followed(base):
    assert load(
        base, ["telemetry.profile_steps=[10, '${steps}']"]
    ).config.telemetry.profile_steps == [
        10,
        100,
    ]


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:SECRET}",
        "x-${oc.env:SECRET,none}",
        "${oc.decode:${oc.env:SECRET}}",
        "${${run_name}:SECRET}",
        "${env:X}",
    ],
)
def test_reference_to_the_environment_is_refused(base, value, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    with pytest.raises(ConfigError, match=r"refused|nothing else is understood") as caught:
        load(base, [f"output_dir={value}"])
    assert "hunter2" not in str(caught.value)


def test_reference_to_the_environment_is_refused_in_files_and_lists(write):
    path = write(
        "run.yml", "pipeline: {layers_per_stage: ['${oc.env:HOME}']}\nbase: ${oc.env:HOME}\n"
    )
    with pytest.raises(ConfigError, match="secrets must not be"):
        load(path)


@pytest.mark.parametrize(
    "value", ["${nothing}", "${steps.x}", "${steps", "${optimizer.decay_steps}"]
)
def test_reference_that_leads_nowhere_is_refused(base, value):
    with pytest.raises(ConfigError, match="steps"):
        load(base, [f"steps={value}", "optimizer.decay_steps=${steps}"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${stpes}", r"\$\{stpes\}: unknown key; did you mean steps\?"),
        ("${optimizer.decay_steps}", "references go in a circle"),
    ],
)
def test_reference_that_leads_nowhere_says_why(base, value, expected):
    with pytest.raises(ConfigError, match=expected):
        load(base, [f"steps={value}", "optimizer.decay_steps=${steps}"])


def test_reference_to_a_section_is_refused(base):
    with pytest.raises(ConfigError, match="takes a value, not a section"):
        load(base, ["seed=${model.rope_scaling}"])
