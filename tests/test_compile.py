"""Test `python -m maxpipe.compile` for simulated devices and TPU slices, and its exit codes."""

import gzip
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.commands import exit_code
from helpers.compile_command import NARROW, QUICK, narrow_preset, report_of, run, tpu_aot

from maxpipe.compile import __main__ as command
from maxpipe.compile import checks
from maxpipe.compile.collectives import ASYNC_FUSION
from maxpipe.compile.hlo import executions, parse
from maxpipe.config import load, resolve
from maxpipe.devices.xla_flags import RECOMMENDED, added_to
from maxpipe.plan.estimate import estimate
from maxpipe.training.stored_step import read

ROOT = Path(__file__).parents[1]
PRESETS = sorted((ROOT / "configs" / "models").glob("*.yml"))
# The README's; the others are slow tests.
DEFAULT_PRESETS = {"llama3-8b"}
# The slices of v5p that the comments of the presets name, by number of chips.
SLICES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
SLICES |= {512: "8x8x8", 768: "8x8x12"}
BASE = "configs/base.yml"
SEQUENTIAL = ("mesh.ici.stage=1", "mesh.ici.fsdp=4", "pipeline.num_microbatches=1")
CIRCULAR, LOCKSTEP = ("pipeline.schedule=circular",), ("pipeline.schedule=lockstep_1f1b",)
PER_REPEAT = (*CIRCULAR, "pipeline.fsdp_gather=per_repeat")


def test_compile_with_unwritable_files_is_refused_before_compiling(tmp_path, capsys, monkeypatch):
    (tmp_path / "occupied").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "locked").mkdir()
    monkeypatch.setitem(sys.modules, "maxpipe.compile.topology", None)  # an import of it fails
    locked = tmp_path / "locked"  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path != locked)
    for place in ("missing/file", "occupied/file", "directory", "long" * 64, "locked/file"):
        file = tmp_path / place
        words = ["compile.topology=cpu", f"compile.save={file}", f"--json={file}", f"--hlo={file}"]
        assert exit_code(command.main, [str(ROOT / BASE), *words]) == 2
        error = capsys.readouterr().err
        for key in ("compile.save", "--json", "--hlo"):
            assert f"{key}: cannot write {file}: " in error
        assert "3 problems found" in error


def test_compile_without_libtpu_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(checks, "is_installed", lambda package: False)
    assert exit_code(command.main, [str(ROOT / BASE), "compile.topology=v5p:2x2x1"]) == 2
    assert "pip install -e '.[tpu]'" in capsys.readouterr().err
    assert exit_code(command.main, [str(ROOT / BASE), "compile.topology=v5q:2x2x1"]) == 2
    assert "there is no chip 'v5q' in the table; it has v4, v5e" in capsys.readouterr().err


def check_prediction(report, text):
    """Check that a report predicts its step from estimates that this libtpu writes."""
    predicted, seconds = report["predicted"], report["predicted_step_seconds"]
    assert predicted["unknown"] == []
    assert seconds == pytest.approx(sum(predicted["parts"].values()))
    assert seconds == pytest.approx(sum(phase["seconds"] for phase in predicted["phases"]))
    assert seconds > report["bounds"]["compute_seconds"]
    assert 0 < predicted["mfu"] < report["bounds"]["mfu"]
    assert all(predicted["parts"][part] > 0 for part in ("matrix products", "attention kernels"))
    exposed = sum(c["seconds"] for c in predicted["collectives"])
    assert predicted["parts"]["collectives"] == pytest.approx(exposed)
    assert f"from libtpu {predicted['libtpu']}'s cycle estimates" in text
    assert (predicted["units"] is None) == (report["engine"] == "sequential")
    if predicted["units"]:
        assert predicted["units"]["backward"] > predicted["units"]["forward"] > 0
        assert predicted["units"]["head"] > 0
        assert 0 < predicted["bubble"] < seconds
    if report["engine"] == "scheduled":
        # Two microbatches: a head in each tick with forwards and backwards, not so the embedding.
        taken, reached = Counter(), Counter()
        for conditional in predicted["conditionals"]:
            taken[conditional["scope"]] += conditional["taken"]
            reached[conditional["scope"]] += conditional["reached"]
        assert taken["head"] == taken["embedding"] == taken["embedding gradient"] == 2
        assert reached["embedding"] > 2


def check_profile(report, page, trace):
    assert f"{report['predicted_step_seconds']:.4g} s a step" in page
    for text in ("attention", "mlp", "head", "optimizer", "maxpipe/model/layers.py:"):
        assert text in page
    assert not re.search(r"(?:src|href)=|https?://", page)
    end = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    assert end == pytest.approx(1e6 * report["predicted_step_seconds"], rel=1e-3)


class TestTpu:
    pytestmark = tpu_aot

    @pytest.mark.parametrize(
        "path",
        [
            pytest.param(
                path, id=path.stem, marks=[] if path.stem in DEFAULT_PRESETS else [pytest.mark.slow]
            )
            for path in PRESETS
        ],
    )
    def test_compile_of_a_reduced_preset_fits_its_slice(self, tmp_path, path):
        config = load(path).config
        chips = int(re.search(r"\((\d+) chips\)", path.read_text())[1])
        stages = config.mesh.ici.stage
        sizes = f"pipeline.num_microbatches={stages}", f"data.global_batch_size={chips}"
        words = f"compile.topology=v5p:{SLICES[chips]}", *narrow_preset(config), *sizes
        report, _ = report_of(tmp_path, path, *words, environment=QUICK)
        assert report["fits"]
        assert report["num_devices"] == chips
        assert estimate(resolve(config, chips), None).total < report["memory"]["capacity_bytes"]
        assert 0 < report["bounds"]["mfu"] < 1
        assert {c["network"] for c in report["collectives"]} == {"ici"}

    @pytest.mark.parametrize(
        ("topology", "words"),
        [
            pytest.param("v5e:2x2", SEQUENTIAL, marks=pytest.mark.slow),
            pytest.param("v5p:2x2x1", CIRCULAR, marks=pytest.mark.slow),
            ("v6e:2x2", (*LOCKSTEP, "mesh.ici.fsdp=1", "mesh.ici.tensor=2")),
            # Minutes: the kernels are compiled for every span of iterations.
            pytest.param("v6e:2x2", PER_REPEAT, marks=pytest.mark.grid),
        ],
        ids=["sequential", "circular", "scheduled", "per_repeat"],
    )
    def test_compile_of_every_engine_uses_splash_attention_and_predicts_its_step(
        self, tmp_path, topology, words
    ):
        file = tmp_path / "step.hlo"
        small = (  # two blocks of queries, two of keys
            *(*NARROW, "model.head_dim=128", "model.num_layers=4", "pipeline.num_repeats=-1"),
            *("data.global_batch_size=16", "data.sequence_length=256"),
            "model.attention_block_size=128",
        )
        page, trace = tmp_path / "step.html", tmp_path / "step.json.gz"
        files = ("--hlo", file, "--profile", page, "--profile-trace", trace)
        words = (f"compile.topology={topology}", *small, *words, *files)
        report, text = report_of(tmp_path, BASE, *words, environment=QUICK)
        check_prediction(report, text)
        check_profile(report, page.read_text(), json.loads(gzip.decompress(trace.read_bytes())))
        assert "model.attention=splash: the kernel for tpu" in text
        kernels = " ".join(re.findall(r"splash_m[hq]a\w+", file.read_text()))
        assert "fwd" in kernels
        assert "dkv" in kernels

    def test_compile_with_recommended_flags_overlaps_transfers_and_gathers_with_computation(
        self, tmp_path
    ):
        file = tmp_path / "step.hlo"
        words = (
            *("compile.topology=v5e:2x2", "pipeline.num_microbatches=8"),
            *("data.global_batch_size=32", "pipeline.fsdp_gather=per_iteration"),
            "pipeline.fsdp_prefetch=false",  # which needs no flags
        )
        recommended = RECOMMENDED["v5e"]
        flags = {recommended.variable: added_to("", recommended.flags)}
        done = run(BASE, *words, "--hlo", file, environment=flags)
        assert done.returncode == 0, done.stderr
        module = parse(file.read_text())
        between, gathers = [], []
        for computation, start, runs in executions(module):
            if start.opcode == "collective-permute-start" and runs >= 8:
                rest = list(computation.instructions.values())
                rest = rest[rest.index(start) + 1 :]
                done = next(i for i, later in enumerate(rest) if start.name in later.operands)
                work = {"fusion", "custom-call", "while", "convolution"}
                between.append(work & {i.opcode for i in rest[:done]})
            if computation.name.startswith(ASYNC_FUSION) and start.opcode == "all-gather":
                opcodes = {i.opcode for i in computation.instructions.values()}
                gathers.append(opcodes & {"convolution", "fusion"})
        assert between
        assert all(between)
        assert len(gathers) >= 8
        assert all(gathers)

    @pytest.mark.parametrize(
        "words",
        [
            pytest.param(CIRCULAR, marks=pytest.mark.slow),
            LOCKSTEP,
            pytest.param(("mesh.ici.stage=1",), marks=pytest.mark.slow),
        ],
    )
    def test_compile_with_context_parallelism_gathers_keys_and_values(self, tmp_path, words):
        chips = "v5e:2x2" if "mesh.ici.stage=1" in words else "v5e:2x4"
        sizes = (
            *(f"compile.topology={chips}", "mesh.ici.context=2", "data.sequence_length=512"),
            *("model.head_dim=128", "model.attention_block_size=128"),
            # Layers that differ choose between two kernels.
            *("model.layer_pattern=[local,global]", "model.attention_window=128"),
            "model.attention_soft_cap=30",
        )
        report, text = report_of(tmp_path, BASE, *sizes, *words, environment=QUICK)
        assert "model.attention=splash" in text
        found = {(c["kind"], c["axes"]) for c in report["collectives"]}
        assert {("all-gather", "context"), ("reduce-scatter", "context")} <= found

    def test_compile_for_several_slices_sends_stages_over_dcn_and_stores_the_step(self, tmp_path):
        file = tmp_path / "step.bin"
        slices = ("compile.topology=v5e:2x2", "compile.num_slices=2", f"compile.save={file}")
        mesh = ("mesh.ici.stage=1", "mesh.ici.fsdp=4", "mesh.dcn.stage=2")
        report, text = report_of(tmp_path, BASE, *slices, *mesh)
        assert f"compile.load={file}" in text
        stored, _ = read(str(file))
        assert stored.origin["devices"] == "8 x TPU v5 lite"
        assert "loss" in stored.metrics
        assert report["num_devices"] == 8
        assert report["predicted_step_seconds"] > 0
        assert report["predicted"]["unknown"] == []
        assert re.search(r" GB/s, HBM \d+ GB/s, DCN [\d.]+ GB/s\n", text)
        assert {c["axes"] for c in report["collectives"] if c["network"] == "dcn"} >= {"stage"}
        assert all("stage" in c["axes"] for c in report["collectives"] if c["network"] == "dcn")

    def test_compile_that_does_not_fit_exits_with_3_and_lists_remedies(self, tmp_path):
        words = (
            *("configs/models/llama3-8b.yml", "compile.topology=v5e:2x2", "model.num_layers=4"),
            *("data.global_batch_size=32", "pipeline.num_repeats=1"),
            *("pipeline.num_microbatches=4", "pipeline.remat_policy=none"),
        )
        report, text = report_of(tmp_path, *words, code=3)
        assert not report["fits"]
        assert "too much on each device" in text
        assert any("pipeline.num_microbatches" in knob["words"] for knob in report["knobs"])
        assert "LIBTPU_INIT_ARGS" not in text  # flags that may take memory

    def test_compile_for_a_topology_unknown_to_libtpu_exits_with_2(self):
        done = run(BASE, "compile.topology=v9:2x2")
        assert done.returncode == 2
        assert "libtpu has no topology v9:2x2" in done.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("dispatch", ["ring", "all_to_all", "ragged"])
    def test_compile_of_shared_experts_sends_tokens_along_their_axis(self, tmp_path, dispatch):
        words = (
            *("compile.topology=v5p:2x2x1", *NARROW, "model.num_layers=1", "mesh.ici.stage=1"),
            *("mesh.ici.data=2", "mesh.ici.fsdp=1", "mesh.ici.expert=2"),
            *("model.moe.experts=8", "model.moe.mlp_dim=256", f"model.moe.dispatch={dispatch}"),
            "data.global_batch_size=16",
        )
        report, text = report_of(tmp_path, BASE, *words, environment=QUICK)
        assert "model.moe.kernel=megablox" in text
        kinds = {c["kind"] for c in report["collectives"] if c["axes"] == "expert"}
        tokens = {
            "ring": {"all-gather", "reduce-scatter"},
            "all_to_all": {"all-to-all"},
            "ragged": {"ragged-all-to-all"},  # numbers of rows are added up, as zeros of the others
        }
        # Gradients of weights without experts are summed over the axis.
        assert kinds == tokens[dispatch] | {"all-reduce"}
