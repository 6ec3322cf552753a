"""Recommended XLA flags."""

import pytest

from maxpipe.devices.xla_flags import RECOMMENDED, advice


@pytest.mark.parametrize("platform", RECOMMENDED)
def test_flags_that_are_not_set_are_printed_with_their_variable(platform):
    recommended = RECOMMENDED[platform]
    (line,) = advice(platform, {recommended.variable: "--xla_other=1"})
    assert f'{recommended.variable}="{recommended.text()}"' in line


@pytest.mark.parametrize("platform", RECOMMENDED)
def test_nothing_is_said_once_they_are_set_even_otherwise(platform):
    recommended = RECOMMENDED[platform]
    assert advice(platform, {recommended.variable: recommended.text()}) == []
    assert (
        advice(platform, {recommended.variable: recommended.text().replace("true", "false")}) == []
    )


def test_cpus_need_none():
    assert advice("cpu", {}) == []
