"""`python -m maxpipe.compile` for the mpmd engine: its stages' programs, memory and verdict."""

import json
import re

import jax
import pytest
from helpers.commands import exit_code
from helpers.compile_command import QUICK, report_of, tpu_aot
from helpers.runs import last_words

from maxpipe.compile import __main__ as command
from maxpipe.compile import report as report_module
from maxpipe.compile.report import size
from maxpipe.config import load, resolve
from maxpipe.devices import chips
from maxpipe.pipeline.engines.mpmd.staged import UnitCompiler
from maxpipe.plan.auto_stages import bubble_fraction

SMALL = [
    *("compile.topology=cpu", "mesh.simulated_devices=8", "mesh.ici.data=2"),
    *("model.num_layers=2", "model.embed_dim=16", "model.mlp_dim=32"),
    *("model.num_query_heads=2", "model.num_kv_heads=2", "model.tie_embeddings=true"),
    *("data.sequence_length=16", "pipeline.schedule=zb_h1", "pipeline.layers_per_stage=auto"),
]
SLICED = (
    *("compile.topology=v5e:2x2", "pipeline.schedule=1f1b", "pipeline.engine=mpmd"),
    *("pipeline.num_repeats=1", "pipeline.num_microbatches=2", "data.global_batch_size=16"),
    *("model.num_layers=2", "model.embed_dim=256", "model.mlp_dim=256", "model.vocab_size=512"),
    *("model.num_query_heads=2", "model.num_kv_heads=2", "model.head_dim=128"),
    *("data.sequence_length=128", "mesh.ici.stage=1", "mesh.dcn.stage=2", "mesh.ici.fsdp=4"),
)
LARGE = [
    *("pipeline.schedule=circular", "pipeline.layers_per_stage=[]", "pipeline.num_repeats=1"),
    *("model.embed_dim=16384", "model.mlp_dim=106496", "model.num_query_heads=128"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("programs")
    flags = ["--programs", str(directory), "--json", str(directory / "report.json")]
    assert command.main(["configs/base.yml", *SMALL, *flags]) == 0
    return directory


def test_every_computation_is_there_as_sliced_and_as_compiled(written):
    files = sorted(str(path.relative_to(written)) for path in written.glob("*/*.*"))
    kinds = ("F", "I", "W", "reduce")
    names = [f"stage_{stage}/{kind}{stage}" for stage in range(2) for kind in kinds]
    sliced = [f"{name}{suffix}" for name in names for suffix in (".txt", ".hlo")]
    assert files == sorted([*sliced, "stage_0/update0.hlo", "stage_1/update1.hlo"])
    paths = "stage_0/F0.txt", "stage_1/W1.txt", "stage_1/I1.hlo"
    forward, late, hlo = ((written / path).read_text() for path in paths)
    # As sliced, with where values come from and go.
    assert "  reads  ['params']['embed']['embedding'] f32[320,8]\n" in forward
    assert "  writes F0.1 f32[2,16,16] for F1, I1\n" in forward
    assert "sharding_constraint[P(None, None, None)]" in forward
    assert "  reads  I1.1 f32[2,16,32]\n" in late
    assert "  adds to gradient of ['params']['chunks'][1]['mlp']['gate'] f32[1,8,32]\n" in late
    assert "dot_general" in late
    # As compiled for the stage's own devices, each with two rows of a microbatch of eight.
    heading = hlo.partition("\n")[0]
    assert heading.startswith("HloModule jit_I1, ")
    assert "num_partitions=4" in heading
    assert "f32[1,2,16,16]" in heading


def test_programs_that_cannot_be_written_are_one_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    out = f"{tmp_path}/file/out"
    assert exit_code(command.main, ["configs/base.yml", *SMALL, f"--programs={out}"]) == 2
    assert f"--programs: cannot write to {out}: Not a directory" in capsys.readouterr().err


def test_the_report_has_memory_by_stage_and_units(written):
    report = json.loads((written / "report.json").read_text())
    assert report["fits"] is None  # the memory of simulated devices is not known
    assert report["predicted_step_seconds"] is None
    config = load("configs/base.yml", [*SMALL, "pipeline.layers_per_stage=[1,1]"])
    assert report["bubble"] == pytest.approx(bubble_fraction(resolve(config, 8)))
    names = ["F0", "F1", "I1", "W1", "I0", "W0", "reduce0", "reduce1"]
    names += ["update0", "update1"]
    assert [program["name"] for program in report["programs"]] == names
    totals = []
    for number, stage in enumerate(report["stages"]):
        units = stage["in_flight_bytes"] + stage["working_bytes"]
        totals.append(stage["state_bytes"] + max(units, stage["reduction_bytes"]))
        # Parameters, Adam's two moments and gradients of a layer: float32, on four devices.
        layer = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
        assert stage["state_bytes"] > 4 * 4 * layer / 4
        assert stage["in_flight_bytes"] > 0
        programs = [p for p in report["programs"] if p["stage"] == number]
        *units, update = programs
        assert stage["working_bytes"] == max(p["temp_bytes"] + p["program_bytes"] for p in units)
        assert update["arguments_bytes"] > 4 * 4 * layer / 4
        # The summed gradients, which are there next to those of this device's rows
        assert stage["reduction_bytes"] > 4 * layer / 4
    assert len(totals) == 2
    assert report["memory"]["needed_bytes"] == max(totals)


def test_the_report_has_the_keys_of_a_step_in_one_program(tmp_path, written, capsys):
    """Of a model whose arrays would not fit this machine: the compiler needs shapes only."""
    report = json.loads((written / "report.json").read_text())
    file = tmp_path / "report.json"
    words = last_words([*SMALL, *LARGE])
    assert command.main(["configs/base.yml", *words, "--json", str(file)]) == 0
    assert "verdict" in capsys.readouterr().out
    other = json.loads(file.read_text())
    assert report.keys() > other.keys()
    for key in ("device_kind", "num_devices", "num_slices", "mesh", "knobs"):
        assert report[key] == other[key]
    assert report["compile_seconds"] > 0
    of_one_program = ["flops", "collectives", "links", "compile_times", "gains"]
    lacking = [key for key in other if report[key] is None and other[key] is not None]
    assert lacking == of_one_program
    assert other["flops"] > other["model_flops"] > 0
    assert 4 * other["memory"]["parameters_bytes"] > 40e9  # split over stages and fsdp
    assert other["memory"]["temp_bytes"] > 0
    assert other["memory"]["capacity_bytes"] is other["fits"] is None
    axes = {(c["kind"], axis) for c in other["collectives"] for axis in c["axes"].split(",")}
    assert {("collective-permute", "stage"), ("all-gather", "fsdp")} <= axes


def test_the_report_counts_collectives_by_program_and_step(written):
    """Units gather and scatter over fsdp; sums over data are taken once, of what devices have."""
    report = json.loads((written / "report.json").read_text())
    found = {
        program["name"]: {(c["kind"], c["axes"]): c for c in program["collectives"]}
        for program in report["programs"]
    }
    runs = {program["name"]: program["runs"] for program in report["programs"]}
    assert [runs[name] for name in ("F0", "W1", "reduce1")] == [2, 2, 1]
    for name, collectives in found.items():
        sums = [axes for kind, axes in collectives if kind == "all-reduce"]
        assert name.startswith("reduce") == any("data" in axes for axes in sums)
    assert ("all-gather", "fsdp") in found["F0"]
    assert ("reduce-scatter", "fsdp") in found["W1"]
    for number, stage in enumerate(report["stages"]):
        programs = [p for p in report["programs"] if p["stage"] == number]
        assert stage["collectives"]
        for total in stage["collectives"]:
            key = total["kind"], total["axes"]
            having = [p for p in programs if key in found[p["name"]]]
            parts = sum(p["runs"] * found[p["name"]][key]["bytes"] for p in having)
            assert total["bytes"] == pytest.approx(parts)


def test_offloaded_residuals_are_counted_on_the_host_and_while_a_unit_has_them(
    tmp_path, capsys, monkeypatch
):
    """A device has 2 rows of 16 tokens, in float32, and a layer of width 16, which do not fit."""
    words = ["pipeline.remat_policy=minimal_offloaded", "pipeline.schedule=1f1b"]
    path = tmp_path / "report.json"
    monkeypatch.setattr(report_module, "device_memory", lambda devices: 1000.0)
    assert command.main(last_words(["configs/base.yml", *SMALL, *words, "--json", str(path)])) == 3
    report = json.loads(path.read_text())
    column = 4 * 2 * 16
    # Queries, keys, values, attention and its output projection; a gate and its factor are twice as
    # wide.
    moved = column * (5 * 16 + 2 * 32)
    programs = {program["name"]: program for program in report["programs"]}
    assert {programs[name]["offloaded_bytes"] for name in ("F0", "F1", "B0", "B1")} == {moved}
    for number, in_flight in ((0, 2), (1, 1)):
        stage = report["stages"][number]
        kinds = "temp_bytes", "program_bytes", "offloaded_bytes"
        units = (p for p in programs.values() if p["stage"] == number)
        used = max(sum(unit[kind] for kind in kinds) for unit in units)
        assert stage["host_bytes"] == in_flight * moved
        assert stage["working_bytes"] == used + moved
        # Inputs of chunks, and what has arrived for others.
        assert stage["in_flight_bytes"] <= (in_flight + 2) * column * 16
    assert report["fits"] is False
    assert "pipeline.num_microbatches=4" in {knob["words"] for knob in report["knobs"]}
    printed = capsys.readouterr().out
    for text in (f", offloaded {size(moved)};", "does NOT fit: ", "pipeline.num_microbatches=4 "):
        assert text in printed


def compiler_says(monkeypatch, message, program=""):
    """Let the compiler give up every program, or the one of this name."""
    compile_any = UnitCompiler.compile

    def give_up(self, lowered, mesh):
        if f"@jit_{program}" in lowered.as_text():
            raise jax.errors.JaxRuntimeError(message)
        return compile_any(self, lowered, mesh)

    monkeypatch.setattr(UnitCompiler, "compile", give_up)


TOO_LARGE = "RESOURCE_EXHAUSTED: memory required (24.90G) exceeds available HBM (15.75G)"


def test_a_computation_that_the_compiler_refuses_is_named_in_one_error(monkeypatch, capsys):
    compiler_says(monkeypatch, "INVALID_ARGUMENT: Slice is empty.\nStack trace")
    assert exit_code(command.main, ["configs/base.yml", *SMALL]) == 2
    error = capsys.readouterr().err
    message = "the compiler refuses program F0 of the mpmd engine: INVALID_ARGUMENT: Slice is empty"
    assert message in error
    assert "Stack trace" not in error


def test_a_computation_that_does_not_fit_ends_with_3_and_former_files_are_gone(
    tmp_path, monkeypatch, capsys
):
    compiler_says(monkeypatch, TOO_LARGE)
    monkeypatch.setattr(chips, "chip_for", lambda kind: chips.chip_of("v5e"))
    (tmp_path / "stage_7").mkdir()
    for name in ("F7.txt", "notes.txt", "F7.md", "F7x.hlo"):
        (tmp_path / "stage_7" / name).touch()
    words = [*SMALL, "model.quantisation=fp8"]
    assert command.main(["configs/base.yml", *words, "--programs", str(tmp_path)]) == 3
    printed = capsys.readouterr().out
    assert "does NOT fit: F0 needs 24.9 GiB of 14.9 GiB; later programs were not" in printed
    assert re.search("what would help, by estimate:\n.* saves ", printed)
    assert "has no units for fp8: model.quantisation=fp8 is slower than bfloat16" in printed
    left = {path.name for path in (tmp_path / "stage_7").iterdir()}
    assert left == {"notes.txt", "F7.md", "F7x.hlo"}


def test_only_the_named_units_are_compiled_until_one_does_not_fit(tmp_path, monkeypatch, capsys):
    file = tmp_path / "report.json"
    words = [*SMALL, "pipeline.schedule=1f1b", "--json", str(file)]

    def report(units, code):
        named = last_words(["configs/base.yml", *words, "--units", units])
        assert command.main(named) == code
        return json.loads(file.read_text())

    # F1 and B0 read what F0 and B1 write, which are not there.
    found = report("B0,F1", 0)
    assert [(unit["name"], unit["stage"]) for unit in found["units"]] == [("F1", 1), ("B0", 0)]
    assert {unit["seconds"] for unit in found["units"]} == {None}
    assert (found["fits"], found["too_large"]) == (True, None)
    assert "no time, working " in capsys.readouterr().out
    compiler_says(monkeypatch, TOO_LARGE, program="B1")
    found = report("B1,F1", 3)
    large = {"name": "B1", "needed": pytest.approx(24.9 * 2**30), "available": 15.75 * 2**30}
    assert (found["fits"], found["too_large"]) == (False, large)
    assert [unit["name"] for unit in found["units"]] == ["F1"]
    assert "verdict     does not fit: B1 needs 24.9 GiB of 15.8 GiB" in capsys.readouterr().out


class TestTpu:
    pytestmark = tpu_aot

    @pytest.mark.parametrize(
        "mesh",
        [
            pytest.param(("compile.num_slices=2",), marks=pytest.mark.slow),
            # Each stage has two slices of four.
            ("compile.num_slices=4", "mesh.dcn.data=2"),
        ],
        ids=["one_slice", "two_slices"],
    )
    def test_stages_in_slices_of_their_own_send_over_the_network_between_them(self, tmp_path, mesh):
        words = (*SLICED, *mesh)
        report, _ = report_of(tmp_path, "configs/base.yml", *words, environment=QUICK)
        assert report["fits"]
        # Activations [rows of a microbatch, 128, 256] of a device, at 3.125 GB/s
        rows = 16 / 2 / (4 if report["num_devices"] == 8 else 8)
        seconds = 4 * rows * 128 * 256 / 3.125e9
        assert report["schedule_words"].endswith(f"comm={seconds:.4g}")
        networks = {c["network"] for stage in report["stages"] for c in stage["collectives"]}
        assert networks == ({"ici"} if report["num_devices"] == 8 else {"ici", "dcn"})

    def test_stages_across_a_network_of_unknown_bandwidth_have_no_predicted_step(self, tmp_path):
        words = (*SLICED, "compile.num_slices=2", "compile.topology=v4:2x2x1")
        report, text = report_of(tmp_path, "configs/base.yml", *words, environment=QUICK)
        assert report["predicted_step_seconds"] is None
        assert "no step time: transfers between stages, over a network of unknown bandwi" in text
        assert all(program["predicted_seconds"] > 0 for program in report["programs"][:4])

    def test_a_unit_that_does_not_fit_is_named_with_what_would_help(self, tmp_path):
        words = (
            *("configs/models/llama3-8b.yml", "compile.topology=v5e:2x2", "model.num_layers=4"),
            *("data.global_batch_size=32", "mesh.ici.stage=2", "mesh.ici.data=1"),
            *("mesh.ici.fsdp=2", "pipeline.schedule=1f1b", "pipeline.num_repeats=1"),
            *("pipeline.num_microbatches=2", "pipeline.remat_policy=none"),
        )
        report, text = report_of(tmp_path, *words, code=3, environment=QUICK)
        assert report["too_large"] == "F0"
        assert "does NOT fit: F0 needs" in text
        assert any("pipeline.num_microbatches" in knob["words"] for knob in report["knobs"])
        assert "LIBTPU_INIT_ARGS" not in text
