"""Figures of a probe come from a process of its own, once."""

from pathlib import Path

from helpers.compile_command import tpu_aot

from maxpipe.compile import probe_process
from maxpipe.compile.probe_process import (
    fingerprint,
    probe_figures,
    stored_figures,
)
from maxpipe.config import Config
from maxpipe.config.options import update
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.probes import Probe, Probing, UnitFigures
from maxpipe.plan.search.request import shared_config

PROBE = Probe(Config(), 1, 4, "once", splits_backward=False)


def answering(monkeypatch, answer):
    """Answer the compiler's process with this; return the words of each call."""
    calls = []

    def run(words, note):
        file, *others = words
        assert Path(file).read_text() == PROBE.text()
        calls.append(others)
        return answer

    monkeypatch.setattr(probe_process, "report_of", run)
    return calls


def report():
    units = [
        {"name": name, "seconds": 0.5, "working_bytes": 7, "unknown": []} for name in PROBE.units
    ]
    return {"units": units, "too_large": None}


def test_a_probe_is_compiled_once_and_then_read_from_the_cache(monkeypatch, tmp_path):
    calls = answering(monkeypatch, report())
    expected = dict.fromkeys(PROBE.units, UnitFigures(0.5, 7.0))
    for _ in range(2):
        assert probe_figures(PROBE, tmp_path, print) == expected
    assert calls == [["--units", "F1,B1,F3,B3"]]
    assert stored_figures(PROBE, tmp_path) == expected
    assert [file.name for file in tmp_path.iterdir()] == [f"{fingerprint(PROBE)}.json"]


class TestTpu:
    pytestmark = tpu_aot

    def test_a_tiny_model_is_probed(self, tmp_path):
        changes = {
            "model.num_layers": 4,
            "model.attention": "dot_product",
            "data.global_batch_size": 8,
            "eval.every": 0,
        }
        config = update(Config(), changes)
        machine = machine_of("v5e:2x2", 1, config)
        shared = shared_config(config, machine)
        lockstep = {
            "mesh.ici.stage": 2,
            "mesh.ici.data": 2,
            "mesh.ici.fsdp": 1,
            "pipeline.engine": "scheduled",
            "pipeline.schedule": "lockstep_1f1b",
            "pipeline.num_microbatches": 4,
            "pipeline.num_repeats": 1,
        }
        probing = Probing(update(shared, lockstep), Facts(shared), machine)
        figures = probe_figures(probing.probe, tmp_path, print)
        assert not isinstance(figures, str), figures
        assert [*figures] == ["F1", "F3", "B3", "B1"]
        # The backward computes the forward again; the last chunk has the head, too.
        assert figures["B1"].seconds > figures["F1"].seconds > 0
        assert figures["F3"].seconds + figures["B3"].seconds > (
            figures["F1"].seconds + figures["B1"].seconds
        )
        assert probing.seconds(figures).step > 4 * (figures["F1"].seconds + figures["B1"].seconds)
        assert probing.memory(figures) > 0
