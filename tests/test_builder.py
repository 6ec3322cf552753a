"""Test the layouts, schedules and trainers built from configurations."""

import re

import jax
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny

from maxpipe import builder
from maxpipe.builder import build_trainer
from maxpipe.config import ConfigError, catalog
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.engines.sequential import SequentialEngine
from maxpipe.pipeline.layout import build_layout
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.training.trainer import SpmdTrainer

PIPELINE = {"mesh.ici.stage": 2, "model.num_layers": 8, "pipeline.num_microbatches": 4}


def batch_of(config, make):
    shape = config.data.global_batch_size, config.data.sequence_length
    batch = {name: make(shape, np.int32) for name in microbatches.ARRAYS}
    return batch | {"weights": make(shape, np.float32)}


class LossOfSeven(SequentialEngine):
    def loss_and_gradients(self, params, batch, key):
        metrics, gradients = super().loss_and_gradients(params, batch, key)
        return {"loss": 7 + 0 * metrics["loss"]}, gradients


def test_engine_of_another_package_is_built_and_trains(monkeypatch):
    entry = catalog.Engine(f"{__name__}:LossOfSeven", "always seven", has_stages=False)
    monkeypatch.setitem(catalog.ENGINES, "seven", entry)
    config = tiny(**{"pipeline.engine": "seven"})
    trainer = build_trainer(config, make_mesh(config))
    _, metrics = trainer.step(trainer.init(jax.random.key(0)), batch_of(config, np.ones))
    assert float(metrics["loss"]) == 7


def test_layout_of_layers_outside_on_mpmd_has_them_in_a_chunk():
    """Six layers, of which two are outside; in a V the first and the last chunk share a stage."""
    values = {"pipeline.schedule": "zb_v", "pipeline.parallel_layers": 4, "model.num_layers": 6}
    places = {"after": [[0], [3, 4, 5]], "before": [[0, 1, 2], [5]]}
    for place, layers in places.items():
        layout = build_layout(tiny(**PIPELINE | values | {"pipeline.outside_layers": place}))
        assert (layout.num_outside, layout.stage_layers(0)) == (0, layers)


@pytest.fixture
def in_file(tmp_path):

    def _in_file(schedule, repeats=1):
        values = PIPELINE | {"pipeline.schedule": schedule, "pipeline.num_repeats": repeats}
        (tmp_path / "mine.csv").write_text(to_csv(build_table(tiny(**values))))
        return values | {"pipeline.schedule": str(tmp_path / "mine.csv")}

    return _in_file


MPMD, SCHEDULED = {"pipeline.engine": "mpmd"}, {"pipeline.engine": "scheduled"}


def refusal(config):
    with pytest.raises(ConfigError) as caught:
        build_trainer(config, make_mesh(config))
    return str(caught.value)


def test_trainer_with_a_table_file_not_in_lockstep_needs_the_mpmd_engine(in_file):
    values = in_file("zb_v", 2)
    assert "pipeline.engine=mpmd runs it" in refusal(tiny(**values, **SCHEDULED))
    config = tiny(**values, **MPMD)
    decisions = []
    table = build_trainer(config, make_mesh(config), note=decisions.append).engine.table
    assert not any("read as an order" in decision for decision in decisions)
    assert (table.placement, table.kinds) == ("v", ("F", "I", "W"))
    assert build_layout(config).stage_layers(0) == [[0, 1], [6, 7]]


def test_trainer_with_a_split_backward_table_file_refuses_what_hides_products(in_file):
    values = in_file("zb_h1")
    scanned = tiny(**values, **MPMD, **{"pipeline.scan_layers_per_stage": True})
    assert "pipeline.scan_layers_per_stage: true hides the layers" in refusal(scanned)
    assert "remat_policy: full keeps no result" in refusal(tiny(**values, **SCHEDULED))
    config = tiny(**values, **SCHEDULED, **{"pipeline.remat_policy": "minimal"})
    assert isinstance(build_trainer(config, make_mesh(config)), SpmdTrainer)


def test_trainer_of_stages_that_are_no_whole_processes_is_refused(monkeypatch):
    stages = {"mesh.ici.stage": 3, "model.num_layers": 6, "pipeline.num_microbatches": 4}
    config = tiny(**PIPELINE | stages | {"pipeline.schedule": "zb_h1"})
    monkeypatch.setattr(builder, "processes_of", lambda mesh: frozenset({0, 1}))
    message = refusal(config)
    assert "mesh.ici.stage: 3 stages do not fit 2 processes" in message
    assert "a divisor of 2" in message


def test_trainer_that_offloads_without_memory_of_the_host_is_refused(monkeypatch):
    monkeypatch.setattr(builder, "has_host_memory", lambda device: False)
    for schedule in ("circular", "1f1b"):
        values = {"pipeline.schedule": schedule, "pipeline.remat_policy": "minimal_offloaded"}
        message = refusal(tiny(**PIPELINE, **values))
        assert "remat_policy: minimal_offloaded cannot run: cpu devices have no" in message
        assert message.endswith("use minimal")
    build_trainer(tiny(), make_mesh(tiny()))  # offloads nothing


@pytest.mark.parametrize(
    ("values", "scopes"),
    [
        ({"pipeline.engine": "sequential"}, {"embedding", "layer", "head", "optimizer"}),
        (PIPELINE | {"pipeline.schedule": "circular"}, {"stage", "layer", "head", "optimizer"}),
        (
            PIPELINE | {"pipeline.schedule": "lockstep_zb", "pipeline.remat_policy": "minimal"},
            {"phase_0", "forward", "backward", "weight_gradients", "transfer", "attention", "mlp"},
        ),
    ],
)
def test_train_step_operations_are_named_by_part_for_profiles(values, scopes):
    config = tiny(**values)
    trainer = build_trainer(config, make_mesh(config))
    batch = batch_of(config, jax.ShapeDtypeStruct)
    text = trainer.jitted_step.lower(trainer.abstract_state(), batch).as_text(debug_info=True)
    assert scopes <= words_of(re.findall(r'loc\("([^"]*/[^"]*)"', text))


def test_operations_of_units_on_the_mpmd_engine_are_named_by_part_for_profiles():
    config = tiny(**PIPELINE | {"pipeline.schedule": "1f1b", "model.num_layers": 2})
    trainer = build_trainer(config, make_mesh(config))
    for program in trainer.engine.compile():
        unit, text = program.name, program.compiled.as_text()
        named = words_of(re.findall(r'op_name="([^"]*/[^"]*)"', text))
        assert {str(unit), "layer", "attention", "mlp"} <= named
        # The head's backward belongs to the last forward, as in the table.
        assert ("embedding" in named, "head" in named) == (unit.chunk == 0, str(unit) == "F1")


def words_of(names):
    return {word for name in names for word in re.findall(r"\w+", name)}
