"""Runs with adapters: what is trained, what is stored, and how they go on."""

import numpy as np
import pytest
from helpers.runs import assert_same_run, output_dir, run, saved, train, write_config

pytestmark = pytest.mark.slow
LORA = ["model.lora.rank=4", "model.lora.dropout=0.2", "optimizer.learning_rate=1e-2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    words = write_config(tmp_path_factory.mktemp("runs"))
    root = output_dir(words)
    train([*words, "run_name=base", "steps=1"])
    said = train([*words, *LORA, "run_name=adapted", f"init_from=run:{root}/base", "steps=4"])
    assert "of them trained" in said
    return [*words, *LORA], root


def test_base_keeps_its_bits_and_has_no_moments(runs):
    _, root = runs
    before, after = saved(root / "base", 1), saved(root / "adapted", 4)
    base = [name for name in before if name.startswith("params.")]
    assert base
    for name in base:
        assert before[name].tobytes() == after[name].tobytes(), name
    added = {name for name in after if name.startswith("params.")} - {*base}
    moved = [name for name in added if np.abs(after[name]).max() > 0 and name.endswith(".b")]
    assert len(moved) == 7  # they begin at 0
    moments = {name.partition(".layers.")[2] for name in after if ".mu." in name}
    assert moments == {name.partition(".layers.")[2] for name in added}


def test_resumed_run_has_the_bits_of_one_that_was_not_stopped(runs):
    words, root = runs
    more = [*words, "run_name=stopped", f"init_from=run:{root}/base", "steps=4"]
    train([*more, "stop_after=2"])
    train(more)
    assert_same_run(root / "stopped", root / "adapted", 4)


def test_run_with_adapters_is_no_base_of_another(runs):
    words, root = runs
    ended = run([*words, "run_name=third", f"init_from=run:{root}/adapted"])
    assert ended.code == 2
    assert f"python -m maxpipe.export {root}/adapted --hf NEW merges them" in ended.err
