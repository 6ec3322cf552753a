"""Figures of a probe come from a process of its own, once."""

from pathlib import Path

import pytest
from helpers.compile_command import tpu_aot

from maxpipe.compiling import probe_process
from maxpipe.compiling.probe_process import (
    figures_directory,
    fingerprint,
    probe_figures,
    stored_figures,
    unwritable,
)
from maxpipe.compiling.units import TooLarge
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

    def run(words, note):
        file, *others = words
        assert Path(file).read_text() == PROBE.text()
        calls.append(others)
        return answer

    monkeypatch.setattr(probe_process, "report_of", run)
    return calls


def report(unknown=()):
    units = [
        {"name": name, "seconds": 0.5, "working_bytes": 7, "unknown": list(unknown)}
        for name in PROBE.units
    ]
    return {"units": units, "too_large": None}


def entry(unit):
    """Return a file of the cache with the same figures of every unit, as JSON."""
    return "{" + ", ".join(f'"{name}": {unit}' for name in PROBE.units) + "}"


def test_a_probe_is_compiled_once_and_then_read_from_the_cache(monkeypatch, tmp_path):
    calls = answering(monkeypatch, report())
    expected = dict.fromkeys(PROBE.units, UnitFigures(0.5, 7.0))
    for _ in range(2):
        assert probe_figures(PROBE, tmp_path, print) == expected
    assert calls == [["--units", "F1,B1,F3,B3"]]
    assert stored_figures(PROBE, tmp_path) == expected
    assert [file.name for file in tmp_path.iterdir()] == [f"{fingerprint(PROBE)}.json"]


def test_without_a_cache_every_plan_compiles_its_probes(monkeypatch, tmp_path):
    calls = answering(monkeypatch, report())
    for _ in range(2):
        assert not isinstance(probe_figures(PROBE, None, print), str)
    assert len(calls) == 2
    assert stored_figures(PROBE, None) is None


DAMAGED = ["null", '"half"', "NaN", "Infinity", "-1.0", "1" + 400 * "0", "[]", "{}"]


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"F1": {}}', '{"F1": {"seconds": 1}}'),
        *(entry(f'{{"seconds": {value}, "working": 1}}') for value in DAMAGED),
        *(entry(f'{{"seconds": 1, "working": {value}}}') for value in DAMAGED),
    ],
)
def test_a_damaged_entry_is_compiled_anew(monkeypatch, tmp_path, content):
    calls = answering(monkeypatch, report())
    (tmp_path / f"{fingerprint(PROBE)}.json").write_text(content)
    assert probe_figures(PROBE, tmp_path, print)["F1"] == UnitFigures(0.5, 7.0)
    assert len(calls) == 1


def test_a_sound_entry_is_read(tmp_path):
    content = entry('{"seconds": 1, "working": 2.5}')
    (tmp_path / f"{fingerprint(PROBE)}.json").write_text(content)
    assert stored_figures(PROBE, tmp_path) == dict.fromkeys(PROBE.units, UnitFigures(1.0, 2.5))


def test_an_entry_that_cannot_be_written_leaves_nothing_behind(monkeypatch, tmp_path):
    def fail(self, target):
        raise OSError("no space left")

    answering(monkeypatch, report())
    monkeypatch.setattr(Path, "replace", fail)
    assert probe_figures(PROBE, tmp_path, print)["F1"] == UnitFigures(0.5, 7.0)
    assert not [*tmp_path.iterdir()]


def test_a_directory_that_cannot_be_made_says_why(tmp_path):
    assert unwritable(tmp_path / "cache" / "probes") == ""
    (tmp_path / "file").touch()
    assert unwritable(tmp_path / "file" / "probes") == "Not a directory"


def test_variants_of_a_users_own_are_imported_and_their_figures_are_not_kept(monkeypatch, tmp_path):
    calls = answering(monkeypatch, report())
    probe_figures(PROBE, None, print, ["mine", "yours"])
    assert calls == [["--units", "F1,B1,F3,B3", "--import", "mine", "--import", "yours"]]
    assert figures_directory(tmp_path, ()) == tmp_path / "probes"
    assert figures_directory(tmp_path, ["mine"]) is None
    monkeypatch.setattr(probe_process.metadata, "entry_points", lambda group: [group])
    assert figures_directory(tmp_path, ()) is None


def test_a_unit_that_does_not_fit_is_the_answer_and_not_kept(monkeypatch, tmp_path):
    sizes = {"name": "B1", "needed": 3e11, "available": 1e11}
    answering(monkeypatch, {"units": [], "too_large": sizes})
    assert probe_figures(PROBE, tmp_path, print) == TooLarge("B1", 3e11, 1e11)
    assert not [*tmp_path.iterdir()]


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
    for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS", "JAX_ENABLE_X64", "TPU_LIBRARY_PATH"):
        with monkeypatch.context() as context:
            context.setenv(name, "another")
            assert fingerprint(PROBE) != own
    for function in ("versions", "source_digest"):
        with monkeypatch.context() as context:
            context.setattr(probe_process, function, lambda: "another")
            assert fingerprint(PROBE) != own
    monkeypatch.setattr(probe_process.metadata, "version", lambda name: f"another {name}")
    assert fingerprint(PROBE) != own


def test_what_does_not_change_the_figures_keeps_the_entry(monkeypatch):
    own = fingerprint(PROBE)
    monkeypatch.setenv("HOME", "/another")
    other = update(PROBE.config, {"seed": 3, "optimizer.learning_rate": 0.5})
    assert fingerprint(PROBE._replace(config=other)) == own


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
