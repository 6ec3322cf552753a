"""Test what the benchmarks run and report, at sizes too small to measure speed."""

import json
import re
import subprocess
import sys

import pytest
from helpers.scripts import SCRIPTS, load_script

from maxpipe.config import Config, replace, resolve
from maxpipe.config.model_facts import KERNELS

benchmark = load_script("benchmark/run")
benchmark_gpu = load_script("benchmark/gpu")


def printed(script, *words):
    done = subprocess.run(
        [sys.executable, SCRIPTS / "benchmark" / script, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=SCRIPTS.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_benchmark_cases_are_legal_and_those_of_engines_have_one_model_and_batch():
    configs = {
        name: resolve(replace(Config(), **values), benchmark.NUM_DEVICES)
        for name, values in benchmark.CASES.items()
    }
    for config in configs.values():
        assert config.model.head_dim * config.model.num_query_heads == config.model.embed_dim
    engines = [configs[name] for name in benchmark.GROUPS["engines"]]
    assert {config.pipeline.engine for config in engines} == {"sequential", "circular", "scheduled"}
    assert len({(str(config.model), str(config.data)) for config in engines}) == 1
    on_gpus = {name for name, kernel in KERNELS.items() if "gpu" in kernel.platforms}
    assert on_gpus == {*benchmark_gpu.ATTENTION}


@pytest.mark.slow
def test_benchmark_of_a_group_measures_every_round_and_writes_json(tmp_path):
    file = tmp_path / "out.json"
    text = printed("run.py", "--case", "tiny", "--rounds", "3", "--json", file)
    cases = json.loads(file.read_text())["cases"]
    assert [case["name"] for case in cases] == list(benchmark.GROUPS["tiny"])
    for case in cases:
        assert len(case["wall"]) == len(case["cpu"]) == 3
        assert case["compile_seconds"] > 0
        assert case["temp_bytes"] > 0
        assert f"| {case['name']} |" in text
    # All engines have the same loss after four steps from one model, batch and seed.
    losses = [case["loss"] for case in cases]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)


def test_benchmark_lists_every_case_and_refuses_others(capsys):
    assert benchmark.main(["--list"]) == 0
    text = capsys.readouterr().out
    names = (*benchmark.CASES, *benchmark_gpu.CASES, benchmark.STARTUP, benchmark.OVERHEAD)
    assert all(name in text for name in names)
    assert benchmark.main(["--case", "enginse"]) == 2
    assert "enginse" in capsys.readouterr().err


@pytest.mark.slow
def test_benchmark_gpu_without_a_gpu_exits_with_2_unless_it_needs_none(monkeypatch, capsys):
    assert benchmark.main(["--gpu", "--rounds", "1"]) == 2
    assert "GPU" in capsys.readouterr().err
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name, value in {"POLICIES": ("full",), "ATTENTION": ("dot_product",), "STEPS": 3}.items():
        monkeypatch.setattr(benchmark_gpu, name, value)
    rows = benchmark_gpu.run(1, lambda text: None, {"tiny": benchmark_gpu.TINY}, need_gpu=False)
    assert rows[0]["tokens_per_second"] > 0
    assert "| tiny | maxpipe, remat full, dot_product |" in benchmark_gpu.table(rows)


@pytest.mark.grid
@pytest.mark.parametrize("processes", [1, 2])
def test_benchmark_mpmd_prints_a_line_for_every_schedule_and_writes_traces(tmp_path, processes):
    words = ("--microbatches", 2, "--seconds", 0.001, "--schedules", "1f1b", "zb_v")
    text = printed("mpmd.py", *words, "--processes", processes, "--trace", tmp_path)
    lines = [line for line in text.splitlines() if not line.startswith("[Gloo]")]
    assert lines[0].endswith(f"{processes} processes")
    for name, line, arrivals, units, transfers in zip(
        ("1f1b", "zb_v"), lines[2::2], lines[3::2], (8, 24), (4, 8), strict=True
    ):
        row = line.split()
        assert row[:2] == [name, str(units)]
        assert len(row[-4].split("/")) == processes  # the CPU time of compiling, of each
        assert re.fullmatch(r"[+-]\d+\.\d%", row[-1])
        pattern = r"  (\d+) transfers to a stage with nothing to do.*; (\d+) to one that computed"
        assert sum(map(int, re.match(pattern, arrivals).groups())) == transfers
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        kinds = [event["tid"] for event in events]
        assert (kinds.count("units"), kinds.count("arrivals")) == (units, transfers)


# An MLP's parameter of all layers is larger than the largest tensor, which is the embedding.
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        pytest.param("--layers=24 --width=512", (509, 62), marks=pytest.mark.slow),
        pytest.param("--layers=32 --vocabulary=16000", (2173, 62), marks=pytest.mark.grid),
    ],
)
def test_reading_weights_takes_less_than_two_of_the_largest_tensors_besides_them(
    words, sizes, dtype
):
    pattern = r"parameters (\d+) MiB, besides (-?\d+) MiB, largest tensor (\d+) MiB, .* s\n"
    figures = re.fullmatch(pattern, printed("read_weights.py", *words.split(), f"--dtype={dtype}"))
    size, besides, largest = map(int, figures.groups())
    assert (size, largest) == sizes
    assert besides <= 2 * largest
