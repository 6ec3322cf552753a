"""The logical axis rules that the scheduled engine's program allows."""

import pytest
from helpers.engines import make_mesh, tiny

from maxpipe.builder import build_engine_inputs
from maxpipe.config import ConfigError
from maxpipe.config.sections.parallelism import DEFAULT_RULES
from maxpipe.pipeline.engines.scheduled.engine import ScheduledEngine


def inputs_with(rules):
    changed = [rule for rule in DEFAULT_RULES if rule[0] not in {name for name, _ in rules}] + rules
    values = {"sharding.logical_axis_rules": changed}
    config = tiny("schedule=lockstep_1f1b stage=2 fsdp=2 tensor=2", **values)
    return build_engine_inputs(config, make_mesh(config))


@pytest.mark.parametrize(
    ("rule", "remedy"),
    [
        (["activation_batch", []], "[activation_batch, [fsdp]]"),
        (["activation_batch", ["stage", "fsdp"]], "[activation_batch, [fsdp]]"),
        (["activation_length", ["stage"]], "[activation_length, [context]]"),
        (["activation_length", ["context", "stage"]], "[activation_length, [context]]"),
        (["stage", []], "[stage, [stage]]"),
        (["stage", ["fsdp"]], "[stage, [stage]]"),
        (["repeat", ["fsdp"]], "[repeat, []]"),
        (["layers_per_stage", ["fsdp"]], "[layers_per_stage, []]"),
        (["vocab", ["tensor", "fsdp"]], "from 'vocab' and give them to 'outer_embed'"),
    ],
    ids=str,
)
def test_check_rules_of_another_layout_names_rule_and_remedy(rule, remedy):
    rules = [rule, ["outer_embed", []]] if rule[0] == "vocab" else [rule]
    with pytest.raises(ConfigError) as error:
        ScheduledEngine(inputs_with(rules))
    assert "sharding.logical_axis_rules" in str(error.value)
    assert remedy in str(error.value)
