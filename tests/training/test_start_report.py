"""Test the lines of the start report."""

import dataclasses
import re

from helpers.engines import make_mesh, tiny

from maxpipe.training.start_report import (
    MAX_LINES,
    Decisions,
    RunSummary,
    compress,
    report,
    start_summary,
)

RUN = RunSummary(
    run_dir="runs/base",
    device_kind="cpu",
    num_devices=4,
    num_processes=1,
    is_simulated=True,
    mesh={"data": 1, "stage": 2, "fsdp": 2},
    num_parameters=8_552_704,
    num_active=8_552_704,
    num_trained=8_552_704,
    parameter_bytes=4 * 8_552_704,
    stage_layers=[[0, 1, 4, 5], [2, 3, 6, 7]],
    schedule="circular, 2 repeats of 2 layers per stage",
    num_microbatches=4,
    bubble=1 / 9,
    data="python_stdlib, byte tokenizer, 4,096 tokens per step",
    steps=200,
    decisions=["model.head_dim=64: embed_dim / num_query_heads"],
)


def test_start_summary_of_a_pipeline_has_these_lines():
    assert start_summary(RUN) == [
        "run         runs/base, 200 steps, fresh",
        "devices     4 x cpu simulated on one machine, 1 process",
        "mesh        stage=2 x fsdp=2",
        "parameters  8,552,704 (32.6 MiB)",
        "pipeline    circular, 2 repeats of 2 layers per stage, 4 microbatches, bubble 11.1 %",
        "  stage 0   layers 0-1, 4-5",
        "  stage 1   layers 2-3, 6-7",
        "data        python_stdlib, byte tokenizer, 4,096 tokens per step",
        "chosen      model.head_dim=64: embed_dim / num_query_heads",
    ]


def test_start_summary_has_notes_after_the_run_and_choices_last():
    decisions = ["model.head_dim=64: why", "eval.batches has no effect with eval.every=0", "a=1: b"]
    lines = start_summary(dataclasses.replace(RUN, decisions=decisions))
    assert lines[1] == "note        eval.batches has no effect with eval.every=0"
    assert lines[-2:] == ["chosen      model.head_dim=64: why", "chosen      a=1: b"]


def test_start_summary_without_a_pipeline_has_no_stages_and_no_bubble():
    sequential = dataclasses.replace(
        RUN, stage_layers=[], schedule="sequential", num_microbatches=1
    )
    report = "\n".join(start_summary(dataclasses.replace(sequential, resumed_step=100)))
    assert "none (sequential), 1 microbatch" in report
    assert "bubble" not in report
    assert "resumed after step 100" in report


def test_start_summary_with_many_decisions_is_cut_and_counts_the_missing():
    decisions = [f"key{i}={i}: because" for i in range(40)]
    run = dataclasses.replace(RUN, stage_layers=[[i] for i in range(64)], decisions=decisions)
    lines = start_summary(run)
    assert len(lines) == MAX_LINES
    assert any(line.startswith("  stage 63") for line in lines)
    shown = sum("because" in line for line in lines)
    assert f"{40 - shown} more" in lines[-1]


def test_start_summary_shows_parameter_bytes_in_a_fitting_unit():
    for count, text in [
        (8_030_261_248, "29.9 GiB"),
        (405_853_388_800, "1.48 TiB"),
        (1000, "0.00381 MiB"),
    ]:
        run = dataclasses.replace(
            RUN, num_parameters=count, num_active=count, parameter_bytes=4 * count
        )
        assert f"({text})" in "\n".join(start_summary(run))


def test_compress_of_indices_returns_ranges():
    texts = {(): "", (3,): "3", (0, 1, 2, 8, 9, 12): "0-2, 8-9, 12", (*range(5),): "0-4"}
    assert {indices: compress(indices) for indices in texts} == texts


def test_decisions_are_logged_only_after_the_report_has_taken_them():
    logged = []
    decisions = Decisions(logged.append)
    decisions.add("model.attention=splash: the kernel for tpu")
    assert decisions.take(["steps=3: given"]) == [
        "steps=3: given",
        "model.attention=splash: the kernel for tpu",
    ]
    assert logged == []
    decisions.add("data.prefetch=8: late")
    assert logged == ["data.prefetch=8: late"]


def report_of(decisions=(), step=0, **values):
    config = tiny(**values)
    return report(config, make_mesh(config), "runs/it", step, "", decisions)


def test_report_of_a_pipeline_shows_stages_and_bubble():
    values = {
        "mesh.ici.stage": 2,
        "pipeline.num_repeats": 2,
        "pipeline.num_microbatches": 4,
        "model.num_layers": 8,
    }
    text = "\n".join(report_of(**values))
    assert "stage=2" in text
    assert "layers 0-1, 4-5" in text
    assert "layers 2-3, 6-7" in text
    bubble = float(re.search(r"bubble ([0-9.]+) %", text)[1])
    assert 9 < bubble < 100 / 9  # 1 of 4 * 2 + 1 ticks, but for the head, which all share
    assert "4 microbatches" in text
    assert "slowest" not in text


def test_report_names_a_stage_that_takes_much_longer_than_the_others():
    values = {"mesh.ici.stage": 2, "pipeline.engine": "mpmd", "pipeline.schedule": "zb_h1"}
    values |= {"model.num_layers": 8, "model.vocab_size": 512}
    text = "\n".join(report_of(**values))
    assert re.search(r"  slowest   stage 1, \d+ % above the mean; pipeline.layers", text)
