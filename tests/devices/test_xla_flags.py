"""Recommended XLA flags."""

import pytest

from maxpipe.devices.xla_flags import RECOMMENDED, advice


@pytest.mark.parametrize("platform", RECOMMENDED)
def test_advice_names_unset_flags_with_their_variable(platform):
    recommended = RECOMMENDED[platform]
    (line,) = advice(platform, {recommended.variable: "--xla_other=1"})
    assert f'{recommended.variable}="{recommended.text()}"' in line


@pytest.mark.parametrize("platform", RECOMMENDED)
def test_advice_is_empty_if_flags_are_set_to_any_value(platform):
    recommended = RECOMMENDED[platform]
    assert advice(platform, {recommended.variable: recommended.text()}) == []
    assert (
        advice(platform, {recommended.variable: recommended.text().replace("true", "false")}) == []
    )


def test_advice_for_cpus_is_empty():
    assert advice("cpu", {}) == []
