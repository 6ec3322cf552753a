"""Test the predicted comparison with MaxText on a Python that answers from files."""

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace

import jax
import pytest
from helpers.hand_timed import HLO, mesh
from helpers.scripts import load_script

from maxpipe.compile.prediction.constants import Constants
from maxpipe.compile.prediction.predict import basis_of, time_program
from maxpipe.config import load, resolve
from maxpipe.devices.chips import chip_of

script = load_script("benchmark/predict_maxtext")


def test_words_for_maxpipe_are_a_legal_configuration_of_16_layers():
    base = "base"
    for case in script.CASES.values():
        for words in case.maxpipe.values():
            config = resolve(load(base, [*script.MAXPIPE_MODEL, *words]), 8)
            assert config.model.num_layers == 16
            assert config.pipeline.num_layers_per_stage * config.pipeline.num_repeats in (2, 4, 16)


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_case_prints_rows_with_ratios_to_maxtext(monkeypatch, capsys):
    commands = []

    def report(trainer, command, file):
        commands.append((trainer, command))
        seconds = 0.4 if trainer == "maxtext" else 0.3
        seconds -= 0.1 if "remat_policy=minimal" in " ".join(command) else 0.0
        parts = dict.fromkeys(script.PARTS, 0.1)
        constants = asdict(Constants("v5p", 1.75e9, 459e12, 0.5, 2.765e12, 9e10, None))
        predicted = {"parts": parts, "libtpu": "0.0.46", "constants": constants}
        memory = {"temp_bytes": 5 * 2**20}
        return {"predicted_step_seconds": seconds, "predicted": predicted, "memory": memory}

    monkeypatch.setattr(script, "report", report)
    peer = script.Peer("python", "base.yml", {})
    assert script.compare(peer, "fsdp").startswith("libtpu 0.0.46: v5p at 1.75 GHz")
    assert [line.split("|")[2:4] + line.split("|")[-3:-1] for line in lines(capsys)] == [
        [" MaxText ", " 0.4 ", " 5 ", " 1.000 "],
        [" MaxText, minimal, unrolled ", " 0.3 ", " 5 ", " 0.750 "],
        [" sequential ", " 0.3 ", " 5 ", " 0.750 "],
        [" sequential, minimal ", " 0.2 ", " 5 ", " 0.500 "],
        [" sequential, save_dot_except_mlp, unrolled ", " 0.3 ", " 5 ", " 0.750 "],
        [" sequential, minimal, unrolled ", " 0.2 ", " 5 ", " 0.500 "],
        [" sequential, none, unrolled ", " 0.3 ", " 5 ", " 0.750 "],
    ]
    (_, theirs), _, (_, ours), *_ = commands
    assert theirs[1:3] == [script.__file__, "--inside"]
    assert theirs[4:6] == ["maxtext.trainers.pre_train.train_compile", "base.yml"]
    assert "ici_fsdp_parallelism=8" in theirs
    assert ours[:3] == ["python", "-m", "maxpipe.compile"]


def test_program_compiled_inside_is_walked_and_reported(monkeypatch, tmp_path):
    text = (HLO / "step.hlo").read_text(encoding="utf-8")
    sizes = {"argument": 4, "output": 5, "alias": 4, "temp": 9, "generated_code": 1}
    memory = SimpleNamespace(
        **{f"{name}_size_in_bytes": size for name, size in sizes.items()}, peak_memory_in_bytes=12
    )
    short = text.replace('"known_trip_count":{"n":"3"}', '"known_trip_count":{"n":"1"}')
    programs = {
        name: SimpleNamespace(as_text=lambda hlo=hlo: hlo, memory_analysis=lambda: memory)
        for name, hlo in (("step", text), ("init", short))
    }
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: programs[self])
    module = SimpleNamespace(
        main=lambda words: [jax.stages.Lowered.compile(name) for name in programs]
    )
    monkeypatch.setitem(sys.modules, "fake_maxtext", module)
    monkeypatch.setattr(script, "mesh_of", lambda compiled: mesh())
    monkeypatch.setattr("maxpipe.compile.prediction.predict.compiler_version", lambda: "1.2")
    file = tmp_path / "report.json"
    seconds = {
        name: time_program(
            program.as_text(), mesh(), chip_of("v5p"), basis_of(mesh(), chip_of("v5p"))
        ).seconds
        for name, program in programs.items()
    }
    script.compile_inside(file, "fake_maxtext", ["base.yml"])
    content = json.loads(file.read_text())
    assert content["memory"] == {"temp_bytes": 7}
    assert content["predicted_step_seconds"] == seconds["step"] > seconds["init"]


def test_command_without_a_report_fails_with_its_output(tmp_path, monkeypatch):
    ended = SimpleNamespace(returncode=2, stdout="no such key\n", stderr="")
    monkeypatch.setattr(script.subprocess, "run", lambda *a, **k: ended)
    with pytest.raises(script.Failed, match=r"ended with 2:\nno such key"):
        script.report("maxtext", ["python"], tmp_path / "report.json")
