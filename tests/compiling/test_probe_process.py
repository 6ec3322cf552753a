"""Figures of a probe come from a process of its own, once."""

import dataclasses

import pytest
from helpers.compile_command import tpu_aot

from maxpipe.compiling import probe_process
from maxpipe.compiling.probe_process import fingerprint, probe_figures, stored_figures
from maxpipe.config import Config
from maxpipe.config.options import update
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.machine import machine_of
from maxpipe.planning.search.probes import Probe, Probing, UnitFigures
from maxpipe.planning.search.request import shared_config

PROBE = Probe(Config(), 1, 4, "once", splits_backward=False)


def answering(monkeypatch, answer):
    """Answer the compiler's process with this; return the words of each call."""
    calls = []

    def run(text, words, note):
        assert text == PROBE.text()
        calls.append(words)
        return answer

    monkeypatch.setattr(probe_process, "run_compile", run)
    return calls


def report(unknown=()):
    units = [
        {"name": name, "seconds": 0.5, "working_bytes": 7, "unknown": list(unknown)}
        for name in PROBE.units
    ]
    return {"units": units}


def test_a_probe_is_compiled_once_and_then_read_from_the_cache(monkeypatch, tmp_path):
    calls = answering(monkeypatch, report())
    expected = dict.fromkeys(PROBE.units, UnitFigures(0.5, 7.0))
    for _ in range(2):
        assert probe_figures(PROBE, tmp_path, print) == expected
    assert calls == [["--units", "F1,B1,F3,B3"]]
    assert stored_figures(PROBE, tmp_path) == expected


def test_without_a_cache_every_plan_compiles_its_probes(monkeypatch, tmp_path):
    calls = answering(monkeypatch, report())
    for _ in range(2):
        assert not isinstance(probe_figures(PROBE, None, print), str)
    assert len(calls) == 2
    assert stored_figures(PROBE, None) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"F1": {}}', '{"F1": {"seconds": 1}}'])
def test_a_damaged_entry_is_compiled_anew(monkeypatch, tmp_path, content):
    calls = answering(monkeypatch, report())
    (tmp_path / f"{fingerprint(PROBE)}.json").write_text(content)
    assert not isinstance(probe_figures(PROBE, tmp_path, print), str)
    assert len(calls) == 1


def test_a_failure_is_said_and_not_kept(monkeypatch, tmp_path):
    answering(monkeypatch, "config error: broken")
    assert probe_figures(PROBE, tmp_path, print) == "config error: broken"
    assert not [*tmp_path.iterdir()]


def test_units_without_a_time_are_no_probe(monkeypatch, tmp_path):
    answering(monkeypatch, report(["kernels whose work is unknown: k"]))
    assert probe_figures(PROBE, tmp_path, print) == "kernels whose work is unknown: k"
    assert stored_figures(PROBE, tmp_path) is None


def test_what_changes_the_figures_changes_the_entry(monkeypatch):
    own = fingerprint(PROBE)
    wider = update(PROBE.config, {"model.embed_dim": 128})
    assert fingerprint(PROBE._replace(config=wider)) != own
    assert fingerprint(PROBE._replace(splits_backward=True)) != own
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=98304")
    assert fingerprint(PROBE) != own
    monkeypatch.undo()
    monkeypatch.setattr(probe_process, "versions", lambda: "maxpipe 0")
    assert fingerprint(PROBE) != own


def test_what_does_not_change_the_figures_keeps_the_entry():
    other = update(PROBE.config, {"seed": 3, "optimizer.learning_rate": 0.5})
    assert fingerprint(PROBE._replace(config=dataclasses.replace(other))) == fingerprint(PROBE)


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
