from helpers.engines import make_mesh, tiny

from maxpipe.training.start_report import report


def report_of(decisions=(), step=0, **values):
    config = tiny(**values)
    return report(config, make_mesh(config), "runs/it", step, decisions)


def test_a_pipeline_is_described_by_its_stages_and_its_bubble():
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
    assert "bubble 11.1 %" in text  # 1 of 4 * 2 + 1 ticks
    assert "4 microbatches" in text


def test_without_a_pipeline_there_are_no_stages():
    text = "\n".join(report_of(**{"pipeline.engine": "sequential", "mesh.ici.fsdp": 4}))
    assert "sequential" in text
    assert "stage" not in text
    assert "bubble" not in text


def test_a_resumed_run_says_from_where():
    assert any("40" in line for line in report_of(step=40, steps=50))


def test_never_more_than_25_lines():
    decisions = [f"model.key{i}={i}: reason" for i in range(40)]
    lines = report_of(
        decisions, **{"mesh.ici.stage": 8, "model.num_layers": 16, "data.global_batch_size": 64}
    )
    assert len(lines) <= 25
    assert any(decisions[0] in line for line in lines)
