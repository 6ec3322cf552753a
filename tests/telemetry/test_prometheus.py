"""What Prometheus reads of a run, over HTTP."""

import math
import socket
import urllib.error
import urllib.request

import pytest
from helpers.runs import rows, write_config
from prometheus_client.parser import text_string_to_metric_families

import maxpipe
from maxpipe.config import Config, ConfigError, replace
from maxpipe.devices.cluster import free_port
from maxpipe.telemetry.prometheus import serving
from maxpipe.telemetry.recorder import Recorder

LOCAL = "127.0.0.1"


def scrape(port):
    """Return the names and labels of metrics, without the prefix and the run's name -> value."""
    with urllib.request.urlopen(f"http://{LOCAL}:{port}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels.pop("run") for sample in samples} == {"tiny"}
    values = {
        (sample.name.removeprefix("maxpipe_"), *sample.labels.items()): sample.value
        for sample in samples
    }
    assert len(values) == len(samples)
    return values


def of(values, *names):
    return tuple(values[name,] for name in names)


COUNTS = ("tokens_total", "skipped_steps_total", "checkpoints_total")


@pytest.fixture
def words(tmp_path):
    options = {"steps": 4, "checkpoint": "{every: 2}", "eval": "{every: 2, batches: 1}"}
    mesh = ["mesh.ici.fsdp=8", "mesh.ici.stage=1", "model.num_layers=2", "pipeline.num_repeats=1"]
    port = f"telemetry.metrics_port={free_port()}"
    return [*write_config(tmp_path, **options), *mesh, port]


def test_scrape_has_the_newest_row_and_counts_of_this_process_until_the_run_ends(words, capsys):
    for last, trained in ((3, 3), (4, 1)):
        config = maxpipe.load_config(*words, f"stop_after={last}")
        port = config.telemetry.metrics_port
        scraped = {}
        run = maxpipe.Run(config)
        run.train(lambda step, _, all=scraped, port=port: all.update({step: scrape(port)}))
        values, written = scraped[last], rows(run.directory)
        assert of(values, *COUNTS) == (trained * 8 * 32, 0, last == 3)
        (row,) = [row for row in written if row["step"] == last and "loss" in row]
        names = ("step", "loss", "grad_norm", "learning_rate", "step_seconds")
        assert of(values, *names) == tuple(row[name] for name in names)
        assert ("mfu",) not in values  # of a CPU
        if last == 3:
            (row,) = [row for row in written if "eval_loss" in row]
            assert of(values, "eval_loss", "checkpoint_step") == (row["eval_loss"], 2)
        with pytest.raises(urllib.error.URLError, match="refused"):
            scrape(port)
        assert f"metrics     http://{LOCAL}:{port}/metrics\n" in capsys.readouterr().out


def test_scrape_labels_layers_stages_and_sources_and_has_what_is_not_finite(tmp_path):
    port = free_port()
    with serving("tiny", LOCAL, port) as prometheus:
        config = replace(Config(), **{"model.first_dense_layers": 1})
        facts = {"start_step": 5, "tokens_per_step": 10, "peak_seconds": 0.25}
        recorder = Recorder(config, tmp_path, **facts, prometheus=prometheus)
        assert of(scrape(port), "step", *COUNTS) == (5, 0, 0, 0)
        recorder.step(6, math.nan, 1.0, 1e-3, 0.5, [0.5, 0.25], skipped=1, expert_load_max=[2.0])
        recorder.evaluation(5, 0.5, by_source={"text:a/*#1": 0.25})
        recorder.checkpoint(6)
        values = scrape(port)
        recorder.close()
    assert math.isnan(values["loss",])
    assert of(values, "step", "mfu", "eval_loss") == (6, 0.5, 0.5)
    assert of(values, *COUNTS, "checkpoint_step") == (10, 1, 1, 6)
    assert values["stage_seconds", ("stage", "1")] == 0.25
    layers = {labels[0] for name, *labels in values if name == "expert_load_max"}
    assert layers == {("layer", "1")}
    assert values["eval_loss_of_source", ("source", "text:a/*#1")] == 0.25


def test_port_or_host_that_cannot_be_used_is_refused_before_anything_is_written(words, tmp_path):
    config = maxpipe.load_config(*words)
    port = config.telemetry.metrics_port
    taken = rf"telemetry.metrics_port: .* at {LOCAL}:{port}: Address already in use; .* free port"
    run = maxpipe.Run(config)
    with socket.create_server((LOCAL, port)), pytest.raises(ConfigError, match=taken):
        run.train()
    assert not (tmp_path / "runs").exists()
    wrong = r"telemetry.metrics_host: .*; name an address of process 0's host"
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match=wrong), serving("tiny", host, port):
            pass
