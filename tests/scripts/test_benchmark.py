"""Test what the benchmark runs and reports, at sizes too small to measure speed."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers.scripts import SCRIPTS, load_script

from maxpipe.config import Config, replace, resolve
from maxpipe.config.model_facts import KERNELS

benchmark = load_script("benchmark/run")
benchmark_gpu = load_script("benchmark/gpu")
benchmark_overhead = load_script("benchmark/overhead")


@pytest.mark.parametrize("name", benchmark.CASES)
def test_benchmark_case_is_a_legal_configuration(name):
    config = resolve(replace(Config(), **benchmark.CASES[name]), benchmark.NUM_DEVICES)
    assert config.model.head_dim * config.model.num_query_heads == config.model.embed_dim


def test_benchmark_engine_cases_have_the_same_model_and_batch():
    cases = benchmark.GROUPS["engines"].values()
    configs = [resolve(replace(Config(), **values), benchmark.NUM_DEVICES) for values in cases]
    assert {config.pipeline.engine for config in configs} == {"sequential", "circular", "scheduled"}
    assert len({(str(config.model), str(config.data)) for config in configs}) == 1


@pytest.mark.slow
def test_benchmark_of_a_group_measures_every_round_and_writes_json(tmp_path):
    file = tmp_path / "out.json"
    command = [
        sys.executable,
        SCRIPTS / "benchmark" / "run.py",
        "--case",
        "tiny",
        "--rounds",
        "3",
        "--json",
        file,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS.parent)
    assert done.returncode == 0, done.stderr
    cases = json.loads(file.read_text())["cases"]
    assert [case["name"] for case in cases] == list(benchmark.GROUPS["tiny"])
    for case in cases:
        assert len(case["wall"]) == len(case["cpu"]) == 3
        assert case["compile_seconds"] > 0
        assert case["temp_bytes"] > 0
        assert f"| {case['name']} |" in done.stdout
    # All engines have the same loss after four steps from one model, batch and seed.
    losses = [case["loss"] for case in cases]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)


def test_benchmark_ratio_is_the_median_within_rounds():
    def result(cpu):
        return benchmark.Result("x", {}, 0.0, 0.0, 0, 0, wall=cpu, cpu=cpu)

    # The machine is slow in the second round.
    first = result([1.0, 10.0, 2.0])
    second = result([2.0, 20.0, 2.0])
    assert benchmark.ratio(first, second) == 0.5


@pytest.mark.slow
def test_benchmark_overhead_reports_each_part_relative_to_the_step(monkeypatch):
    monkeypatch.setattr(benchmark_overhead, "SIZE", benchmark_overhead.SIZE | benchmark.TINY)
    monkeypatch.setattr(benchmark_overhead, "TURNS_PER_ROUND", 2)
    rows = benchmark_overhead.run(benchmark.Case, 1, lambda text: None)
    assert [len(row["seconds"]) for row in rows] == [2] * 6
    assert rows[0]["what"] == benchmark_overhead.STEP
    lines = benchmark_overhead.table(rows).splitlines()
    assert lines[2].startswith("| the step")
    assert lines[2].endswith("| 100.000 |")
    assert lines[5].startswith("| watchdog")


def test_benchmark_update_applies_a_non_finite_gradient_only_without_guard(monkeypatch):
    monkeypatch.setattr(benchmark_overhead, "SIZE", benchmark_overhead.SIZE | benchmark.TINY)
    for guard in (True, False):
        update = benchmark_overhead.Update(guard=guard)
        update._norm = np.float32(np.nan)
        update()
        (params, *_) = update._state
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)) == guard


def test_benchmark_with_an_unknown_case_exits_with_2(capsys):
    assert benchmark.main(["--case", "enginse"]) == 2
    assert "enginse" in capsys.readouterr().err


def test_benchmark_list_shows_every_case(capsys):
    assert benchmark.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert all(
        name in text
        for name in (*benchmark.CASES, *benchmark_gpu.CASES, benchmark.STARTUP, benchmark.OVERHEAD)
    )


@pytest.mark.slow
def test_benchmark_gpu_without_a_gpu_exits_with_2(capsys):
    assert benchmark.main(["--gpu", "--rounds", "1"]) == 2
    assert "GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_benchmark_gpu_without_need_of_a_gpu_runs_on_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(benchmark_gpu, "POLICIES", ("full",))
    monkeypatch.setattr(benchmark_gpu, "ATTENTION", ("dot_product",))
    monkeypatch.setattr(benchmark_gpu, "STEPS", 3)
    rows = benchmark_gpu.run(1, lambda text: None, {"tiny": benchmark_gpu.TINY}, need_gpu=False)
    assert rows[0]["tokens_per_second"] > 0
    assert "| tiny | maxpipe, remat full, dot_product |" in benchmark_gpu.table(rows)


def test_benchmark_gpu_measures_every_kernel_of_gpus():
    assert {name for name, kernel in KERNELS.items() if "gpu" in kernel.platforms} == {
        *benchmark_gpu.ATTENTION
    }


@pytest.mark.slow
def test_benchmark_torch_llama_starts_at_the_loss_of_uniform_predictions():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    shape = json.dumps(benchmark_gpu.TINY | {"steps": 3, "need_gpu": False})
    command = [sys.executable, SCRIPTS / "benchmark" / "torch_llama.py", shape, "--eager"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["loss"] == pytest.approx(4.16, abs=0.1)
