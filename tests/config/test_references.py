"""`${other.key}` is followed; references to the environment are refused."""

import pytest

from maxpipe.config import ConfigError, load


def test_reference_gets_the_final_value_through_references_defaults_and_lists(base):
    words = ["eval.every=${steps}", "run_name=run-${seed}-${model.dtype}", "seed=3"]
    words += ["telemetry.profile_steps=[10, '${steps}']", "model.norm_eps=${optimizer.eps}"]
    config = load(base, words).config
    assert (config.eval.every, config.run_name) == (100, "run-3-float32")
    assert (config.telemetry.profile_steps, config.model.norm_eps) == ([10, 100], 1e-8)
    words = ["eval.every=${checkpoint.every}", "checkpoint.every=${steps}", "steps=1e3"]
    config = load(base, words).config
    assert (config.eval.every, config.checkpoint.every) == (1000, 1000)


def test_reference_to_the_environment_is_refused(base, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    for value in (
        "${oc.env:SECRET}",
        "x-${oc.env:SECRET,none}",
        "${oc.decode:${oc.env:SECRET}}",
        "${${run_name}:SECRET}",
        "${env:X}",
    ):
        with pytest.raises(ConfigError, match="all else is refused") as caught:
            load(base, [f"output_dir={value}"])
        assert "hunter2" not in str(caught.value)


def test_reference_that_leads_nowhere_is_refused(base):
    table = {
        "${stpes}": r"\$\{stpes\}: unknown key; did you mean steps\?",
        "${optimizer.decay_steps}": "references go in a circle",
        "${nothing}": "steps",
        "${steps.x}": "no section",
        "${steps": "steps",
        "${model.rope_scaling}": "takes a value, not a section",
    }
    for value, expected in table.items():
        with pytest.raises(ConfigError, match=expected):
            load(base, [f"steps={value}", "optimizer.decay_steps=${steps}"])
