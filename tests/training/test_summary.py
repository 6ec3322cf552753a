import dataclasses

import pytest

from maxpipe.training.start_report import MAX_LINES, RunSummary, compress, start_summary

RUN = RunSummary(
    run_dir="runs/base",
    device_kind="cpu",
    num_devices=4,
    num_processes=1,
    is_simulated=True,
    mesh={"data": 1, "stage": 2, "fsdp": 2},
    num_parameters=8_552_704,
    parameter_bytes=4 * 8_552_704,
    stage_layers=[[0, 1, 4, 5], [2, 3, 6, 7]],
    schedule="circular, 2 repeats of 2 layers per stage",
    num_microbatches=4,
    bubble=1 / 9,
    data="python_stdlib, byte tokenizer, 4,096 tokens per step",
    steps=200,
    decisions=["model.head_dim=64: embed_dim / num_query_heads"],
)


def test_the_whole_report():
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


def test_without_a_pipeline_there_are_no_stages_and_no_bubble():
    sequential = dataclasses.replace(
        RUN, stage_layers=[], schedule="sequential", num_microbatches=1
    )
    report = "\n".join(start_summary(dataclasses.replace(sequential, resumed_step=100)))
    assert "none (sequential), 1 microbatch" in report
    assert "bubble" not in report
    assert "resumed after step 100" in report


def test_many_stages_and_decisions_stay_within_the_limit_and_say_what_is_missing():
    decisions = [f"key{i}={i}: because" for i in range(40)]
    run = dataclasses.replace(RUN, stage_layers=[[i] for i in range(64)], decisions=decisions)
    lines = start_summary(run)
    assert len(lines) == MAX_LINES
    assert any(line.startswith("  stage 63") for line in lines)
    shown = sum("because" in line for line in lines)
    assert f"{40 - shown} more" in lines[-1]


@pytest.mark.parametrize(
    ("count", "text"),
    [(8_030_261_248, "29.9 GiB"), (405_853_388_800, "1.48 TiB"), (1000, "0.00381 MiB")],
)
def test_parameter_bytes_have_a_fitting_unit(count, text):
    run = dataclasses.replace(RUN, num_parameters=count, parameter_bytes=4 * count)
    assert f"({text})" in "\n".join(start_summary(run))


@pytest.mark.parametrize(
    ("indices", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 8, 9, 12], "0-2, 8-9, 12"), (range(5), "0-4")],
)
def test_indices_become_ranges(indices, text):
    assert compress(indices) == text
