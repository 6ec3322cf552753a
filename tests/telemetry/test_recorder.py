import io
import json
import math

from maxpipe.config import Config, replace
from maxpipe.telemetry.profiling import PHASES
from maxpipe.telemetry.recorder import Recorder


def recorder(tmp_path, *, steps=20, log_every=10, required=False, dense_layers=0, **options):
    values = {"telemetry.log_every": log_every, "telemetry.required": required}
    values |= {"steps": steps, "model.first_dense_layers": dense_layers}
    options = {"start_step": 0, "tokens_per_step": 4096, "peak_seconds": None} | options
    return Recorder(replace(Config(), **values), tmp_path / "run", **options)


def rows(tmp_path):
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line]


def logged_scalars(directory):
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(directory.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(value.tag, event.step) for value in event.summary.value]
            at += 12 + length + 4
    return found


def test_recorder_writes_every_step_whatever_log_every_is(tmp_path):
    r = recorder(tmp_path, log_every=10, peak_seconds=0.2)
    for step in range(1, 13):
        r.step(step, 5.0 / step, 1.5, 3e-4, 0.5, skipped=0)
    r.evaluation(11, 800.0)
    r.evaluation(12, 2.25, bits_per_byte=3.0)
    r.close()
    written = rows(tmp_path)
    assert [row["step"] for row in written] == [*range(1, 13), 11, 12]
    speed = {"step_seconds": 0.5, "tokens_per_second": 8192.0, "mfu": 0.4}
    third = {"step": 3, "loss": 5.0 / 3, "grad_norm": 1.5, "learning_rate": 3e-4, "skipped": 0}
    assert written[2] == third | speed
    assert written[-2] == {"step": 11, "eval_loss": 800.0, "eval_perplexity": None}
    last = {"step": 12, "eval_loss": 2.25, "eval_perplexity": math.exp(2.25)}
    assert written[-1] == last | {"eval_bits_per_byte": 3.0}


def test_recorder_has_losses_of_sources_everywhere_and_the_largest_on_the_console(tmp_path, capsys):
    losses = {"a": 2.0, "b": 1.0, "c": math.nan, "d": 3.0, "text:x/*": 5.0}
    r = recorder(tmp_path, steps=9)
    r.evaluation(9, 2.25, by_source=losses)
    r.evaluation(9, 2.25, bits_per_byte=3.0)
    r.close()
    row, _ = rows(tmp_path)
    names = {f"eval_loss/{name}": loss for name, loss in losses.items()} | {"eval_loss/c": None}
    assert row == {"step": 9, "eval_loss": 2.25, "eval_perplexity": math.exp(2.25), **names}
    shown = "a 2.0000  c nan  d 3.0000  text:x/* 5.0000  and 1 lower"  # nan comes first
    assert f"eval loss 2.2500  perplexity 9.488  {shown}\n" in capsys.readouterr().out
    tags = {tag for tag, _ in logged_scalars(tmp_path / "run" / "tensorboard")}
    tags.remove("eval/loss/text_x/_")  # as tensorboardX writes it
    names = ("loss", "perplexity", "bits_per_byte", "loss/a", "loss/b", "loss/d")
    assert tags == {f"eval/{name}" for name in names}


def test_recorder_tensorboard_has_first_tenth_and_last_step(tmp_path, capsys):
    r = recorder(tmp_path, steps=13)
    for step in range(1, 14):
        r.step(step, 5.0, 1.5, 3e-4, 0.5, skipped=int(step == 10), balance_loss=0.0625)
    r.close()
    scalars = logged_scalars(tmp_path / "run" / "tensorboard")
    for name in ("loss", "balance_loss"):
        assert [step for tag, step in scalars if tag == f"train/{name}"] == [1, 10, 13]
    assert [step for tag, step in scalars if tag == "train/skipped"] == [10]
    assert rows(tmp_path)[0]["balance_loss"] == 0.0625
    assert "loss 5.0000  balance_loss 0.0625  lr" in capsys.readouterr().out


def test_recorder_writes_figures_of_layers_as_a_list_and_as_scalars_in_a_group(tmp_path, capsys):
    r = recorder(tmp_path, steps=1, dense_layers=1)
    figures = {"expert_load_max": [1.5] * 10, "idle_experts": [2.0], "dropped_assignments": [0.25]}
    r.step(1, 5.0, 1.5, 3e-4, 0.5, **figures)
    r.close()
    (row,) = rows(tmp_path)
    assert row["expert_load_max"] == [None, *[1.5] * 10]
    assert row["idle_experts"] == [None, 2.0]
    tags = {tag for tag, _ in logged_scalars(tmp_path / "run" / "tensorboard")}
    assert {tag for tag in tags if not tag.startswith("train/")} == {
        *(f"expert_load_max/layer_{i:02}" for i in range(1, 11)),
        "idle_experts/layer_1",
        "dropped_assignments/layer_1",
    }
    assert "max load 1.50x (layer 10)  dropped 25.0% (layer 1)  lr" in capsys.readouterr().out


def test_recorder_writes_seconds_of_stages_and_names_a_slow_process(tmp_path, capsys):
    r = recorder(tmp_path, stage_processes=[frozenset({0}), frozenset({1})])
    for step in range(1, 20):
        r.step(step, 5.0, 1.5, 3e-4, 0.5, stage_seconds=[0.5, 0.1])
    r.close()
    assert rows(tmp_path)[3]["stage_seconds"] == [0.5, 0.1]
    tags = {tag for tag, _ in logged_scalars(tmp_path / "run" / "tensorboard")}
    assert {"stage_seconds/stage_0", "stage_seconds/stage_1"} <= tags
    assert not any(tag.startswith("train/stage_seconds") for tag in tags)
    assert capsys.readouterr().out.count("warning: process 0 is slow") == 1


def test_recorder_log_every_0_writes_metrics_file_only(tmp_path, capsys):
    r = recorder(tmp_path, log_every=0)
    r.step(1, 5.0, 1.5, 3e-4, 0.5)
    r.close()
    assert rows(tmp_path)[0]["mfu"] is None  # of an unknown peak
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert capsys.readouterr().out == ""


def test_recorder_other_process_writes_prints_and_sends_nothing(tmp_path, capsys):
    r = recorder(tmp_path, is_main=False)
    r.step(1, 5.0, 1.5, 3e-4, 0.5)
    r.evaluation(1, 2.0)
    r.print_line("hello")
    r.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def fill_disk(recorder):
    recorder._metrics.writer._file = io.FileIO("/dev/full", "a")


def test_recorder_of_files_that_cannot_be_written_warns_once_and_goes_on(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("in the way")
    r = recorder(tmp_path)
    r.step(1, 5.0, 1.5, 3e-4, 0.5)
    sound = r._metrics.writer._file
    fill_disk(r)
    for step in (2, 3):
        r.step(step, 5.0, 1.5, 3e-4, 0.5)
    r._metrics.writer._file = sound
    r.step(4, 5.0, 1.5, 3e-4, 0.5)
    r.evaluation(4, 2.0)
    r.time_account(4, dict.fromkeys(PHASES, 1.0))
    r.close()
    said = capsys.readouterr().out
    assert said.count("warning: ") == 2
    assert "metrics.jsonl cannot be written: No space left on device; training continues" in said
    assert "tensorboard cannot be written: " in said
    assert [row["step"] for row in rows(tmp_path)] == [1, 4, 4, 4]
