"""Test the lines of the start report."""

import re

from helpers.engines import make_mesh, tiny

from maxpipe.training import start_report
from maxpipe.training.start_report import MAX_LINES, compress, format_memory, report

PIPELINE = {"mesh.ici.stage": 2, "pipeline.num_repeats": 2, "pipeline.num_microbatches": 4}
PIPELINE["model.num_layers"] = 8


def report_of(*decisions, step=0, **values):
    config = tiny(**values)
    return report(config, make_mesh(config), "runs/it", step, "", decisions)


def test_report_of_a_pipeline_has_these_lines():
    decisions = ["model.head_dim=64: why", "eval.batches has no effect with eval.every=0", "a=1: b"]
    lines = report_of(*decisions, **PIPELINE)
    (pipeline,) = (line for line in lines if line.startswith("pipeline"))
    bubble = float(re.search(r", 4 microbatches, bubble ([0-9.]+) %$", pipeline)[1])
    assert 9 < bubble < 100 / 9  # 1 of 4 * 2 + 1 ticks, but for the head, which all share
    (parameters,) = (line for line in lines if line.startswith("parameters"))
    assert re.fullmatch(r"parameters  [\d,]+ \([\d.]+ MiB\)", parameters)
    config = tiny(**PIPELINE)
    data = config.data.global_batch_size, config.data.sequence_length
    assert lines == [
        f"run         runs/it, {config.steps} steps, fresh",
        "note        eval.batches has no effect with eval.every=0",
        "devices     2 x cpu simulated on one machine, 1 process",
        "mesh        stage=2",
        parameters,
        pipeline,
        "  stage 0   layers 0-1, 4-5",
        "  stage 1   layers 2-3, 6-7",
        f"data        {config.data.source}, byte tokens, {data[0]} x {data[1]} = "
        f"{data[0] * data[1]} a step",
        "chosen      model.head_dim=64: why",
        "chosen      a=1: b",
    ]


def test_report_without_a_pipeline_has_no_stages_and_no_bubble():
    text = "\n".join(report_of(step=100))
    assert "none (sequential), 1 microbatch\n" in text
    assert "resumed after step 100" in text
    assert "bubble" not in text


def test_report_with_many_decisions_is_cut_and_counts_the_missing(monkeypatch):
    monkeypatch.setattr(start_report, "MAX_STAGES", 3)
    decisions = [f"key{i}={i}: because" for i in range(40)]
    stages = {"mesh.ici.stage": 4, "model.num_layers": 4, "pipeline.num_microbatches": 4}
    lines = report_of(*decisions, **stages)
    assert len(lines) == MAX_LINES
    stages = [line[:11].strip() for line in lines if line.startswith("  ")]
    assert stages == ["stage 0", "...", "stage 3"]
    shown = sum("because" in line for line in lines)
    assert f"{40 - shown} more" in lines[-1]


def test_report_names_a_stage_that_takes_much_longer_than_the_others():
    values = {"mesh.ici.stage": 2, "pipeline.engine": "mpmd", "pipeline.schedule": "zb_h1"}
    values |= {"model.num_layers": 8, "model.vocab_size": 512}
    text = "\n".join(report_of(**values))
    assert re.search(
        r"  slowest   stage 1 with the head, \d+ % above the mean; pipeline.layers", text
    )
    assert "slowest" not in "\n".join(report_of(**PIPELINE))


def test_texts_of_numbers():
    texts = {(): "", (3,): "3", (0, 1, 2, 8, 9, 12): "0-2, 8-9, 12", (*range(5),): "0-4"}
    assert {indices: compress(indices) for indices in texts} == texts
    sizes = {32_121_044_992: "29.9 GiB", 1_623_415_555_200: "1.48 TiB", 4000: "0.00381 MiB"}
    assert {size: format_memory(size) for size in sizes} == sizes
