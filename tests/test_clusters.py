"""Test the examples in configs/clusters/, and the traffic of several slices over DCN."""

import re
from pathlib import Path

import pytest
from helpers.compile_command import NARROW, QUICK, narrow_preset, report_of, tpu_aot

from maxpipe.config import load, resolve
from maxpipe.config.slices import num_chips

CLUSTERS = sorted((Path(__file__).parents[1] / "configs" / "clusters").glob("*.yml"))
BASE = "configs/base.yml"
SLICES = [2, pytest.param(4, marks=pytest.mark.grid)]


def resolved(path):
    config = load(path).config
    chips, slices = num_chips(config.compile.topology), config.compile.num_slices
    return resolve(config, chips * slices, slices), chips


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_cluster_comment_states_commands_chips_layout_and_tokens(path):
    config, chips = resolved(path)
    comment = re.sub(r"\n# ?", " ", path.read_text().partition("\nbase:")[0])
    assert config.run_name == f"{config.run_name.removesuffix('-' + path.stem)}-{path.stem}"
    assert f"python -m maxpipe.compile configs/clusters/{path.name}" in comment
    assert f"python -m maxpipe.train configs/clusters/{path.name}" in comment
    assert f"{chips} chips" in comment
    stages = config.mesh.size("stage")
    pipeline = config.pipeline
    layout = (
        f"{stages} stages x {config.mesh.ici.fsdp} fsdp, {pipeline.num_repeats} repeats of"
        f" {pipeline.num_layers_per_stage} layers per stage,"
        f" {pipeline.num_microbatches} microbatches"
    )
    assert layout in comment
    tokens = config.data.global_batch_size * config.data.sequence_length / 1e6
    assert f"{tokens:.1f} million tokens a step" in comment


class TestTpu:
    pytestmark = tpu_aot

    @pytest.mark.parametrize(
        "path",
        [CLUSTERS[0], *(pytest.param(path, marks=pytest.mark.slow) for path in CLUSTERS[1:])],
        ids=lambda path: path.stem,
    )
    def test_cluster_step_at_reduced_size_compiles(self, tmp_path, path):
        config, chips = resolved(path)
        stages = config.mesh.size("stage")
        slices = config.compile.num_slices
        report, _ = report_of(
            tmp_path,
            path,
            *narrow_preset(config),
            f"pipeline.num_microbatches={2 * stages}",
            f"data.global_batch_size={2 * stages * config.mesh.ici.fsdp * config.mesh.ici.expert}",
            environment=QUICK,
        )
        assert report["fits"]
        assert (report["num_devices"], report["num_slices"]) == (chips * slices, slices)
        assert {c["network"] for c in report["collectives"]} == (
            {"ici", "dcn"} if slices > 1 else {"ici"}
        )

    @pytest.mark.parametrize("slices", SLICES)
    @pytest.mark.parametrize(
        ("schedule", "axis"),
        [
            pytest.param("circular", "stage", marks=pytest.mark.slow),
            ("lockstep_1f1b", "data"),
            pytest.param("sequential", "data", marks=pytest.mark.slow),
            pytest.param("circular", "data", marks=pytest.mark.slow),
            pytest.param("lockstep_1f1b", "stage", marks=pytest.mark.slow),
        ],
    )
    def test_engine_on_several_slices_sends_one_axis_over_dcn(
        self, tmp_path, schedule, axis, slices
    ):
        is_sequential = schedule == "sequential"
        inside = (1, 4) if axis == "stage" or is_sequential else (4, 1)
        report, text = report_of(
            tmp_path,
            BASE,
            *NARROW,
            "compile.topology=v5e:2x2",
            f"compile.num_slices={slices}",
            f"mesh.ici.stage={inside[0]}",
            f"mesh.ici.fsdp={inside[1]}",
            f"mesh.dcn.{axis}={slices}",
            "model.num_layers=4",
            f"pipeline.num_microbatches={1 if is_sequential else 4}",
            "data.global_batch_size=16",
            f"pipeline.{'engine' if is_sequential else 'schedule'}={schedule}",
            environment=QUICK,
        )
        assert_only_this_axis_leaves_the_slice(report, text, axis)


def assert_only_this_axis_leaves_the_slice(report, text, axis):
    crossing = [c for c in report["collectives"] if c["network"] == "dcn"]
    kinds = {"collective-permute"} if axis == "stage" else {"all-reduce", "reduce-scatter"}
    assert kinds & {c["kind"] for c in crossing}
    assert all(axis in c["axes"].split(",") for c in crossing)
    alone = sum(c["sent_bytes"] for c in crossing if c["axes"] == axis)
    assert alone > 0.9 * sum(c["sent_bytes"] for c in crossing)
    assert "DCN" in text
