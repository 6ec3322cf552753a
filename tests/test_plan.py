"""The command: what it prints and writes, exit codes, and errors of model, topology and flags."""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.compile_command import NARROW, QUICK, report_of, tpu_aot
from helpers.hf_models import recorded

from maxpipe import plan
from maxpipe.config import load, resolve
from maxpipe.config.cli import CONFIG_ERROR
from maxpipe.config.options import get
from maxpipe.config.slices import num_chips
from maxpipe.devices.chips import GIB
from maxpipe.render import plan_notes

BASE = Path("configs/base.yml").resolve()
FEW = ["--fix", "pipeline.remat_policy=full", "--try", "pipeline.schedule=lockstep_1f1b,circular"]
FROM = ["base", "--topology", "cpu:4"]
SMALL = [*FROM, *FEW]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Plan once, in another directory; return the directory and what was printed."""
    directory = tmp_path_factory.mktemp("plan")
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(directory)
        (directory / "corpus.txt").write_text("words")
        text = ["data.source=text", "data.path=corpus.txt"]
        (directory / "steps").mkdir()
        text.append("init_from=maxtext:steps")
        files = ["--write", "best.yml", "--json", "best.json", "--html", "best.html"]
        assert plan.main([*SMALL, "--compare", "--tokens-per-step", "4Ki", *text, *files]) == 0
    (directory / "printed.txt").write_text(printed.getvalue())
    return directory


@pytest.fixture(scope="module")
def report(written):
    return json.loads((written / "best.json").read_text())


def test_written_file_is_complete_and_resolves_for_the_topology(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load(str(written / "best.yml"))
    config = resolve(loaded, 4)
    assert config.data.global_batch_size == 4096 // 128
    assert f"path: {written / 'corpus.txt'}\n" in (written / "best.yml").read_text()
    assert config.init_from == f"maxtext:{written / 'steps'}"
    assert config.compile.topology == "cpu"
    assert config.mesh.simulated_devices == 4
    assert config.model == resolve(load("base"), 4).model
    assert not any(".yml" in source for source in loaded.sources.values() if "best" not in source)


def test_the_command_has_no_secrets_in_the_page_and_the_file(tmp_path, capsys):
    page, file = tmp_path / "best.html", tmp_path / "best.yml"
    words = [
        "telemetry.mlflow=https://me:hunter2@host/x",
        "--html",
        str(page),
        "--write",
        str(file),
    ]
    assert plan.main([*SMALL, *words]) == 0
    shown = "telemetry.mlflow=https://***@host/x"
    assert shown in page.read_text()
    assert "hunter2" not in page.read_text()
    assert shown in file.read_text().splitlines()[0]
    assert "mlflow: https://me:hunter2@host/x" in file.read_text(), "training sends to it"
    wrong = ["--fix", words[0], "--fix", "model.num_query_heads=3"]
    with pytest.raises(SystemExit):
        plan.main([*FROM, *wrong])
    assert "hunter2" not in capsys.readouterr().err


def test_written_file_opens_with_its_command_prediction_and_versions(written):
    lines = (written / "best.yml").read_text().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert comments[0].startswith("# python -m maxpipe.plan base --topology cpu:4")
    text = "\n".join(comments)
    assert "speed of this machine is not known" in text
    assert "maxpipe" in text
    assert "base:" not in lines


def test_json_has_the_rows_in_order_and_no_seconds_of_an_unknown_machine(report):
    times = [row["relative_time"] for row in report["rows"]]
    assert times == sorted(times)
    assert times[0] == 1
    assert report["predicted_step_seconds"] is None
    assert report["rows"][0]["reason"] == ""
    assert all(row["reason"] for row in report["rows"][1:])
    assert report["tried"] > sum(report["fallen"].values()) > 0


def test_summary_counts_those_that_fit_and_those_left_out(written, report):
    summary = (written / "printed.txt").read_text()
    fitting = report["tried"] - sum(report["fallen"].values())
    assert f"searched    {report['tried']:,} candidates in " in summary
    assert f" s, {fitting:,} fit\n" in summary


def test_table_of_simulated_devices_has_multiples_and_no_seconds(written):
    printed = (written / "printed.txt").read_text()
    (header,) = (line for line in printed.splitlines() if line.startswith("mesh "))
    assert "GiB  x fastest  by" in header
    assert "seconds" not in header


def test_values_that_are_fixed_or_tried_are_the_only_ones(report):
    keys = [row["keys"] for row in report["rows"]]
    assert {key["pipeline.remat_policy"] for key in keys} == {"full"}
    staged = [key for key in keys if key["pipeline.engine"] != "sequential"]
    assert {key["pipeline.schedule"] for key in staged} == {"lockstep_1f1b", "circular"}


def test_own_configuration_is_a_row(report):
    assert report["own"]["keys"]["mesh.ici.stage"] == 2
    assert report["own"]["relative_time"] >= 1


def test_page_has_a_bar_for_each_part_and_loads_nothing(written, report):
    page = (written / "best.html").read_text()
    assert page.count("<svg") == 2
    shown = min(len(report["rows"]), 10)
    # Three parts of the time, and the memory, of those and of the user's own.
    assert page.count('height="20"') == 4 * (shown + 1)
    assert '<text x="0" y="357">your configuration: stage=2 fsdp=2 batch=16</text>' in page
    assert "http" not in page
    for row in report["rows"][:10]:  # multiples of the fastest row's
        assert f">{row['relative_time']:#.3g}</text>" in page


def test_page_of_simulated_devices_has_multiples_and_no_seconds(written):
    texts = re.findall(r'data-text="([^"]*GiB, [^"]*)"', (written / "best.html").read_text())
    assert len(texts) > 10
    assert all(re.search(r" GiB, [\d.e+]+ x fastest$", text) for text in texts)


def test_own_configuration_of_another_batch_shows_it_and_loses_per_sequence(written):
    lines = (written / "printed.txt").read_text().splitlines()
    (own,) = (line for line in lines if "your configuration" in line)
    chosen = next(line for line in lines if line.endswith("chosen") and " batch=" in line)
    assert own.startswith("stage=2 fsdp=2 batch=16  ")
    assert " batch=32  " in chosen
    assert re.search(r"your configuration; \+[\d.]+% per sequence: \w+$", own)


def test_own_configuration_that_is_not_legal_says_so_where_nothing_fits(capsys, tmp_path):
    page = tmp_path / "page.html"
    words = ["llama3-405b", "--topology", "v5p:2x2x1", "--no-compile", "--compare"]
    words += ["--fix", "pipeline.schedule=lockstep_1f1b", "--fix", "pipeline.engine=scheduled"]
    assert plan.main([*words, "--html", str(page)]) == 3
    reason = "your configuration: mesh.ici: stage=6 x fsdp=-1 makes 6"
    assert f"\n{reason}" in capsys.readouterr().out
    assert reason in page.read_text()


@pytest.mark.parametrize(
    ("topology", "schedule", "words"),
    [
        ("v6e:2x4", "1f1b", "  once  "),
        ("v6e:2x4", "order.csv", "a schedule from a file has no closed form"),
        # Two hosts.
        ("v5p:2x2x2", "1f1b", "pipeline.engine=mpmd: its transfers between hosts are not priced"),
    ],
)
def test_own_configuration_of_stages_that_a_run_would_choose_is_a_row_or_says_why_not(
    capsys, tmp_path, monkeypatch, topology, schedule, words
):
    """A row where there is a closed form; a file's table need not suit the rest."""
    monkeypatch.chdir(tmp_path)
    Path("order.csv").write_text("0F0,0B0\n")
    Path("own.yml").write_text(
        f"base: {BASE}\nmodel: {{dtype: bfloat16}}\nmesh: {{ici: {{stage: 2, fsdp: 4}}}}\n"
        f"pipeline: {{engine: mpmd, schedule: {schedule}, layers_per_stage: auto}}\n"
    )
    command = ["own.yml", "--topology", topology, "--no-compile", "--compare"]
    assert plan.main([*command, "--fix", "pipeline.remat_policy=full"]) == 0
    (own,) = (line for line in capsys.readouterr().out.splitlines() if "your conf" in line)
    assert words in own


def test_own_configuration_is_a_row_where_nothing_fits(capsys, tmp_path):
    page = tmp_path / "page.html"
    words = [*ON_FOUR, "--compare", "--html", str(page), "--tokens-per-step", "4Mi"]
    assert plan.main(words) == 3
    assert "  your configuration" in capsys.readouterr().out
    assert ">your configuration: stage=2 fsdp=2 batch=" in page.read_text()


@pytest.mark.parametrize(("free", "warns"), [(8 * 2**20, True), (2**40, False)])
def test_simulated_devices_that_need_more_than_the_machine_has_free_are_a_warning(
    free, warns, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(plan_notes, "free_memory", lambda: free)
    file = tmp_path / "plan.json"
    assert plan.main([*SMALL, "--fix", "pipeline.engine=sequential", "--json", str(file)]) == 0
    warning = re.search(r"4 x \S+ = (\S+) GiB, and (\S+) are free", capsys.readouterr().out)
    assert (warning is not None) == warns
    if warning:
        needed = 4 * json.loads(file.read_text())["rows"][0]["memory_bytes"]
        figures = [float(warning[1]) * GIB, float(warning[2]) * GIB]
        assert figures == pytest.approx([needed, free], rel=1e-2)


def test_memory_that_the_machine_does_not_say_is_all_of_it(capsys, monkeypatch):
    def unknown():
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(plan_notes, "free_memory", unknown)
    monkeypatch.setattr(plan_notes.os, "sysconf", {"SC_PHYS_PAGES": 2, "SC_PAGE_SIZE": 1024}.get)
    assert plan.main([*SMALL, "--fix", "pipeline.engine=sequential"]) == 0
    assert "and 1.91e-06 are free" in capsys.readouterr().out


@pytest.mark.parametrize(("remat", "says"), [("mlp_up=offload", True), ("mlp_up=device", False)])
def test_transfers_to_the_host_are_left_out_where_tensors_are_offloaded(remat, says, capsys):
    words = ["--fix", "pipeline.remat_policy=custom", "--fix", f"pipeline.remat_tensors.{remat}"]
    assert plan.main([*FROM, *words, "--fix", "pipeline.engine=sequential"]) == 0
    printed = capsys.readouterr().out
    assert ("transfers to the host's memory are not in these seconds" in printed) == says


MLP_GATE = "pipeline.remat_tensors.mlp_gate"


@pytest.mark.parametrize("policy", [[], ["--try", "pipeline.remat_policy=full,minimal"]])
@pytest.mark.parametrize("word", [["--fix", f"{MLP_GATE}=device"], [f"{MLP_GATE}=device"]])
def test_tensors_that_no_tried_policy_reads_are_refused(policy, word, capsys):
    with pytest.raises(SystemExit) as end:
        plan.main([*FROM, *word, *policy])
    assert end.value.code == CONFIG_ERROR
    (line,) = [line for line in capsys.readouterr().err.splitlines() if MLP_GATE in line]
    assert f"{' '.join(word)}: no policy that is tried reads it; add --fix" in line


@pytest.mark.parametrize(
    "words",
    [
        ["--fix", f"{MLP_GATE}=remat"],
        [f"{MLP_GATE}=device", "--try", "pipeline.remat_policy=full,custom"],
    ],
)
def test_tensors_that_are_not_saved_or_that_a_policy_reads_are_taken(words):
    assert plan.main([*FROM, *words, "--fix", "pipeline.engine=sequential"]) == 0


def test_written_file_is_trained_by_a_command_that_a_shell_can_read(capsys, tmp_path):
    file = tmp_path / "the best.yml"
    words = [*FROM, "--fix", "pipeline.engine=sequential", "--import", "json"]
    assert plan.main([*words, "--write", str(file)]) == 0
    _, _, command = capsys.readouterr().out.splitlines()[-1].partition(".yml: ")
    assert shlex.split(command) == [
        "python", "-m", "maxpipe.train", str(file), "--import", "json",
    ]  # fmt: skip


def test_nothing_fits_says_what_would_and_writes_a_page_but_no_configuration(capsys, tmp_path):
    command = ["llama3-405b", "--topology", "v5p:2x2x1", "--no-compile"]
    best, page = tmp_path / "best.yml", tmp_path / "page.html"
    files = ["--write", str(best), "--html", str(page)]
    assert plan.main([*command, "--fix", "pipeline.schedule=lockstep_1f1b", *files]) == 3
    printed = capsys.readouterr().out
    assert re.search(
        r"nothing fits: by closed forms the least is \S+ GiB a device, and 85\.", printed
    )
    assert "closed forms alone\n" in printed
    assert f"not written {best}: nothing fits" in printed
    assert re.search(r"gradients alone need [\d,]+ GiB, at least \d+ v5p: ", printed)
    assert not best.exists()
    text = page.read_text()
    assert "<h1>Plan for llama3-405b on v5p:2x2x1</h1>" in text
    assert "nothing fits: by closed forms the least is " in text
    assert "what would fit:\n  more chips: --topology v5p:4x4x8\n" in text
    assert text.count("<h2>") == 1  # no pictures where there is nothing to draw
    assert "none of these helps by itself: fewer tokens, offloading\n" in printed
    assert "trying      --topology v5p:4x4x8\n" in printed
    assert "what would fit:\n  more chips: --topology v5p:4x4x8\n" in printed
    larger = ["llama3-405b", "--topology", "v5p:4x4x8", "--no-compile"]
    assert plan.main([*larger, "--fix", "pipeline.schedule=lockstep_1f1b"]) == 0


def test_a_smaller_margin_is_a_remedy_with_which_the_plan_fits(capsys):
    words = ["llama3-8b", "--topology", "H100:2", "--no-compile", "data.packing=false"]
    assert plan.main([*words, "--memory-margin", "15%"]) == 3
    _, _, would_fit = capsys.readouterr().out.partition("what would fit:\n")
    margin = re.match(r"  less memory left free: --memory-margin (\d+%); closed forms", would_fit)
    assert "more chips: " in would_fit
    assert plan.main([*words, "--memory-margin", margin[1]]) == 0


# One microbatch, so that residuals grow with the batch.
ON_FOUR = ["qwen3-0.6b", "--topology", "v5e:2x2", "--no-compile", "--fix", "mesh.ici.fsdp=4"]
ON_FOUR += ["--fix", "pipeline.num_microbatches=1", "--fix", "pipeline.engine=sequential"]


def test_nothing_fits_says_with_how_many_tokens_it_would(capsys):
    assert plan.main([*ON_FOUR, "--tokens-per-step", "4Mi"]) == 3
    printed = capsys.readouterr().out
    fewer = re.search(r"fewer tokens: data.global_batch_size=(\d+), (\d+) tokens a step", printed)
    assert int(fewer[2]) == 4096 * int(fewer[1])
    assert plan.main([*ON_FOUR, "--tokens-per-step", fewer[2]]) == 0
    assert plan.main([*ON_FOUR, "--tokens-per-step", str(2 * int(fewer[2]))]) == 3


def test_smallest_slice_and_larger_ones_are_listed_with_their_cost(capsys, tmp_path):
    words = ["qwen3-0.6b", "--topology", "v5e", "--smallest", "--no-compile"]
    fixed = ["--fix", "pipeline.schedule=lockstep_1f1b", "--tokens-per-step", "256Ki"]
    files = {"--json": tmp_path / "plan.json", "--html": tmp_path / "plan.html"}
    assert plan.main([*words, *fixed, *(str(w) for f in files.items() for w in f)]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("slice "))
    rows = [line for line in lines[start + 1 :] if line.startswith("v5e:")]
    slices = [row.replace(",", "").split() for row in rows]  # thousands have commas
    chips = [int(row[1]) for row in slices]
    assert slices[0][0] == "v5e:2x2"
    assert chips == sorted(set(chips))
    assert len(chips) > 2
    assert [line.split() for line in lines[:start] if line.startswith("trying ")][
        -len(chips) :
    ] == [["trying", row[0]] for row in slices]
    costs = json.loads(files["--json"].read_text())["slice_costs"]
    assert [(cost["topology"], cost["chips"]) for cost in costs] == [
        (row[0], int(row[1])) for row in slices
    ]
    assert [cost["chip_seconds"] for cost in costs] == pytest.approx(
        [float(row[4]) for row in slices], rel=1e-3
    )
    assert [cost["batch"] for cost in costs] == [int(row[2]) for row in slices]
    assert "\n".join(lines[start : start + 1 + len(slices)]) in files["--html"].read_text()
    for _, count, _, step, cost in slices:
        assert float(cost) == pytest.approx(float(step) * int(count) * 1e9 / 2**18, rel=1e-3)


def test_smallest_of_several_slices_says_how_many(capsys):
    words = ["qwen3-0.6b", "--topology", "v5e", "--smallest", "--no-compile"]
    words += ["compile.num_slices=2", "--fix", "pipeline.engine=sequential"]
    assert plan.main([*words, "--fix", "mesh.ici.tensor=1", "--fix", "mesh.ici.context=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("slice "))
    count, times, topology, chips, *_ = lines[start + 1].split()
    assert (count, times, int(chips)) == ("2", "x", 2 * num_chips(topology))


def test_written_file_of_a_hugging_face_model_is_of_the_same_model(tmp_path):
    """Its shape is in the folder; how it is computed and trained, and padding, are in the file."""
    folder, file = tmp_path / "model", tmp_path / "best.yml"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(recorded("qwen3")["config"]))
    words = [f"model.from_hf={folder}", "model.quantisation=int8", "model.z_loss=1e-4"]
    words += ["model.attention=dot_product", "model.dropout=0.1", "model.vocab_size=128"]
    fixed = ["--fix", "pipeline.engine=sequential", "--write", str(file)]
    assert plan.main([*FROM, *fixed, *words]) == 0
    assert "num_layers" not in file.read_text()
    written, given = load(str(file)), load("base", [*words, "model.logit_tiles=1"])
    assert written.config.model == given.config.model
    assert written.config.model.vocab_size == 128


def test_engines_without_a_fixed_value_are_left_out_and_counted(capsys, tmp_path):
    file = tmp_path / "plan.json"
    fixed = {"pipeline.schedule": "lockstep_1f1b", "pipeline.num_repeats": 2}
    fixed |= {"pipeline.fsdp_gather": "per_iteration"}
    words = [word for key, value in fixed.items() for word in ("--fix", f"{key}={value}")]
    assert plan.main([*FROM, *words, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows
    assert all(row["keys"] | fixed == row["keys"] for row in rows)
    assert " left out: --fix pipeline.schedule: no stages\n" in capsys.readouterr().out


def test_unrolled_layers_are_fixed_where_engines_take_them_and_others_are_counted(capsys):
    assert plan.main([*FROM, "--fix", "pipeline.scan_layers=false"]) == 0
    printed = capsys.readouterr().out
    assert " left out: --fix pipeline.scan_layers: not for the circular engine\n" in printed
    assert "lockstep" not in printed


@pytest.mark.parametrize(
    "keys",
    [
        "mesh: {ici: {stage: 3}}",
        "mesh: {ici: {data: -1, fsdp: -1}}",
        "pipeline: {num_repeats: 3, num_layers_per_stage: 5, layers_per_stage: [1, 2]}",
        "pipeline: {remat_policy: custom, remat_tensors: {context: device}}",
        "pipeline: {fsdp_gather: per_repeat, schedule: lockstep_1f1b}",
        "compile: {num_slices: 2}",
    ],
)
def test_what_the_plan_decides_need_not_be_legal_in_the_file(keys, tmp_path, capsys):
    bad, file = tmp_path / "bad.yml", tmp_path / "best.yml"
    bad.write_text(f"base: {BASE}\n{keys}\n")
    devices = ["--topology", "v5e:2x2" if keys.startswith("compile") else "cpu:4", "--no-compile"]
    few = ["--try", "pipeline.schedule=circular"]
    assert plan.main([str(bad), *devices, *few, "--write", str(file), "--compare"]) == 0
    assert "your configuration" in capsys.readouterr().out
    written = load(str(file))
    slices = written.config.compile.num_slices
    resolve(written, 4 * slices, slices)


def test_files_that_were_read_are_not_replaced(tmp_path, capsys):
    base, file = tmp_path / "base.yml", tmp_path / "own.yml"
    base.write_text("steps: 5\n")
    file.write_text("base: base.yml\n")
    for read in (base, file):
        with pytest.raises(SystemExit) as end:
            plan.main([str(file), *FROM[1:], "--write", str(read)])
        assert end.value.code == CONFIG_ERROR
        assert f"would replace {read}, which is read" in capsys.readouterr().err
    assert file.read_text() == "base: base.yml\n"


def test_nothing_fits_on_eight_gpus_and_no_more_are_proposed(tmp_path, capsys):
    file = tmp_path / "plan.json"
    words = ["llama3-405b", "--topology", "H100:8", "--fix", "pipeline.schedule=lockstep_1f1b"]
    assert plan.main([*words, "--json", str(file)]) == 3
    assert json.loads(file.read_text())["remedies_in_vain"] == ["fewer tokens", "offloading"]
    printed = capsys.readouterr().out
    assert "nothing fits" in printed
    assert printed.endswith("none of these helps by itself: fewer tokens, offloading\n")


def test_kinds_of_remedies_for_which_there_was_no_time_are_named(tmp_path, capsys, monkeypatch):
    file = tmp_path / "plan.json"
    monkeypatch.setattr("maxpipe.planning.search.remedies.SECONDS", 0.0)
    assert plan.main([*ON_FOUR, "--tokens-per-step", "4Mi", "--json", str(file)]) == 3
    first, *_ = json.loads(file.read_text())["remedies_unfinished"]
    assert re.fullmatch(r"fewer tokens from data.global_batch_size=\d+ on", first)
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"not tried to the end, for lack of time: {first}, ")


def test_batches_double_up_to_the_largest_that_is_asked_for(monkeypatch):
    requests = []
    monkeypatch.setattr("maxpipe.compiling.plan.launch", lambda r, *_: requests.append(r) or 0)
    assert plan.main([*FROM, "--max-global-batch", "128"]) == 0
    assert requests[0].batches == (16, 32, 64, 128)


def test_batches_are_of_the_length_that_is_fixed(monkeypatch):
    requests = []
    monkeypatch.setattr("maxpipe.compiling.plan.launch", lambda r, *_: requests.append(r) or 0)
    fixed = ["--fix", "data.sequence_length=256", "--tokens-per-step", "4Ki"]
    assert plan.main([*FROM, *fixed]) == 0
    assert requests[0].batches == (16,)


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("optimizer={name: muon}", "optimizer.name", "muon"),
        ("optimizer.name =muon", "optimizer.name", "muon"),
        ("data={sequence_length: 64, prefetch: 3}", "data.sequence_length", 64),
    ],
)
def test_keys_that_are_not_searched_are_fixed_however_they_are_written(
    word, key, value, monkeypatch
):
    requests = []
    monkeypatch.setattr("maxpipe.compiling.plan.launch", lambda r, *_: requests.append(r) or 0)
    assert plan.main([*FROM, "--fix", word]) == 0
    assert get(requests[0].config, key) == get(requests[0].written, key) == value


@pytest.mark.parametrize("flag", ["--fix", "--try"])
def test_gather_mode_auto_is_left_to_the_search(flag, monkeypatch):
    requests = []

    def launch(request, *_):
        requests.append(request)
        return 0

    monkeypatch.setattr("maxpipe.compiling.plan.launch", launch)
    for words in ([], [flag, "pipeline.fsdp_gather=auto"]):
        assert plan.main([*FROM, *words]) == 0
    without, auto = requests
    assert auto == without


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["base", "--topology", "v5q:2x2"], "there is no chip 'v5q'"),
        (["base", "--topology", "v5p128"], "there is no chip 'v5p128'; did you mean v5p-128?"),
        (["base", "--topology", "8xH100"], "there is no chip '8xH100'; did you mean H100:8?"),
        (["base", "--topology", "v5p:2x2"], "grids of v5p have 3 dimensions"),
        (["base", "--topology", "v5p:4x4x5"], "cubes of 4x4x4"),
        (["base", "--topology", "H100:x"], "give the number of GPUs"),
        (["bse", "--topology", "cpu:4"], "did you mean base"),
        (["base"], "name the devices"),
        (["base", "--topology", "cpu:eight"], "give the number of devices, such as cpu:8"),
        (["base", "--topology", "cpu:-4"], "give the number of devices, such as cpu:8"),
        (["base", "--topology", "cpu:0"], "give the number of devices, such as cpu:8"),
        (["base", "--topology", "v5e:4x5"], "a host holds 2x2 chips; usual slices: v5e-16"),
        (["base", "--topology", "v6e:1x7"], "a host holds 2x2 chips"),
        (["base", "--topology", "v5p:3x3x3"], "a host holds 2x2 chips"),
        (["base", "--topology", "v5e:1x1"], None),
        ([*SMALL, "--tokens-per-step=-128"], "nearest: 128"),
        ([*SMALL, "--tokens-per-step", "250"], "nearest: 256"),
        ([*SMALL, "--memory-margin", "100%"], "expected a share below 100%"),
        ([*SMALL, "--tokens-per-step", "100"], "give a multiple of data.sequence_length=128"),
        ([*SMALL, "--max-global-batch", "16"], "after the 16 sequences of a step, the next"),
        ([*SMALL, "--fix", "pipeline.num_repeat=1"], "unknown key"),
        ([*SMALL, "--try", "optimizer.name=adamw,lion"], "the plan searches mesh.ici.data"),
        ([*SMALL, "pipeline.num_repeats=2"], "is what the plan decides"),
        ([*SMALL, "--write", "nowhere/best.yml"], "there is no directory nowhere"),
        *[
            ([*SMALL, "--fix", f"{key}={value}"], "follows from what the plan decides")
            for key, value in (
                ("pipeline.num_layers_per_stage", "2"),
                ("pipeline.outside_layers", "before"),
                ("compile.topology", "cpu"),
                ("compile.save", "step"),
                ("mesh.simulated_devices", "2"),
            )
        ],
        ([*FROM, "--fix", "pipeline.schedule=lockstep_1f1"], "did you mean lockstep_1f1b?"),
        ([*FROM, "--fix", "pipeline.schedule=my.csv"], "from a file has no closed form"),
        ([*FROM, "--fix", "pipeline.engine=auto"], "the plan tries engines by name"),
        ([*FROM, "--fix", "mesh.ici.fsdp=-1"], "--fix mesh.ici.fsdp: the plan derives nothing"),
        ([*FROM, "--try", "pipeline.num_repeats=1,-1"], "the plan derives nothing from -1"),
        ([*FROM, "--try", "pipeline.fsdp_gather=auto,once"], "auto stands for every mode"),
        ([*FROM, "--fix", "seed=1", "--fix", "seed=2"], "--fix seed: is given twice"),
        ([*FROM, "--fix", "telemetry.profile_steps=[1,x]"], "--fix telemetry.profile_steps: expec"),
        ([*FROM, "--fix", "pipeline.layers_per_stage=[1,3]"], "follows from what the plan decides"),
        ([*SMALL, "--write", "folder/"], "cannot write folder/: it is a directory"),
        ([*SMALL, "--html", "-"], "cannot write -: a dash is no file"),
        ([*SMALL, "--fix", "pipeline.schedule=circular"], "give one of them"),
        (
            [*FROM, "--max-global-batch", "64", "--fix", "data.global_batch_size=32"],
            "--max-global-batch: data.global_batch_size is given already",
        ),
        (
            [*FROM, "--tokens-per-step", "4Ki", "data.global_batch_size=32"],
            "leave out --tokens-per-step",
        ),
        (["base", "--topology", "v7", "--smallest"], None),
        (["base", "--smallest", "compile.topology=v5p:2x2x1"], "compile.topology (command line): "),
        (
            ["base", "--smallest", "compile.topology=v5p:2x2x1"],
            "--smallest is for TPUs, of a kind: --topo",
        ),
        (["base", "--topology", ""], "--topology: is empty"),
        ([*SMALL, "--tokens-per-step", ""], "--tokens-per-step: is empty"),
        ([*SMALL, "--tokens-per-step", "4mi"], "--tokens-per-step: expected a whole number"),
        ([*SMALL, "--tokens-per-step", "1e12"], "data.global_batch_size must be at most 16777216"),
        ([*SMALL, "--max-global-batch", "1Ki"], None),
        ([*SMALL, "--max-global-batch", "1Kib"], "--max-global-batch: expected a whole number"),
        ([*SMALL, "--max-global-batch", "31"], "the next batch to try has 32; give at least that"),
        ([*SMALL, "--memory-margin", ""], "--memory-margin: is empty"),
        ([*SMALL, "--memory-margin", "20%"], "simulated devices do not have; leave it out"),
        ([*SMALL, "--max-global-batch", "1e14"], "1024 times the 16 sequences of a step, 16384"),
        ([*SMALL, "--no-compile", "--compile", "2"], "contradicts --compile 2"),
        ([*SMALL, "--no-compile", "--compile", "0"], None),
        (
            [*SMALL, "--json", "plan", "--html", "./plan"],
            "--html: would replace ./plan, which --js",
        ),
        (["base", "--topology", "H100:8", "compile.num_slices=8"], "compile.num_slices=8 joins"),
        (["base", "--topology", "H100:64"], "at most 8 GPUs"),
        ([*FROM, "--fix", "compile.num_slices=2"], "compile.num_slices=2 joins slices"),
        (["base", "--topology", "v5e:4x4", "compile.num_slices=2"], None),
        ([*FROM, "--fix", "model.embed_dim=255"], "model.embed_dim (--fix): 255 is not divisible"),
        ([*FROM, "--fix", "model.num_kv_heads=3"], "model.num_kv_heads (--fix): 3 does not"),
        ([*FROM, "--fix", "model.num_query_heads=3"], "with --fix model.num_query_heads=3): "),
        ([*FROM, "--fix", "model.moe.dispatch=all_to_all"], "model.moe.dispatch (--fix): "),
        (
            [*FROM, "--fix", "pipeline={schedule: 1f1b, remat_layers: true}"],
            "sets keys that the plan searches and others; give --fix for each of them",
        ),
        ([*FROM, "--fix", "pipeline={schedule: 1f1b, num_microbatches: 8}"], None),
        ([*FROM, "--fix", "model.lora.rank=4"], "model.lora.rank: a plan counts all parameters"),
        ([*FROM, "model.num_layers=3"], None),
        ([*FROM, "pipeline.outside_layers=before"], "pipeline.outside_layers: follows from what"),
        ([*FROM, "compile.topology=v5p:2x2x1"], "compile.topology: follows from what the plan"),
        ([*FROM, "mesh.simulated_devices=8"], "mesh.simulated_devices: follows from what the plan"),
        (["base", "--topology", "cpu", "mesh.simulated_devices=8"], None),
        (["base", "compile.topology=CPU", "mesh.simulated_devices=8"], None),
        ([*SMALL, "--write", ""], "--write: is empty"),
        ([*SMALL, "--json", "/dev/null", "--html", "/dev/null"], None),
        (["base", "--topology", "v5p:1x1x1"], "v5p:1x1x1: a host holds 2x2 chips"),
        (["base", "--topology", "v9", "--smallest"], "there is no kind of TPU 'v9'"),
        ([*SMALL, "--compile", "-1"], "must be at least 0"),
        ([*SMALL, "--compile", "2"], "--compile: there is no compiler at hand for cpu:4"),
        ([*SMALL, "--probe", "2"], "--probe: there is no compiler at hand for cpu:4"),
        ([*SMALL, "--no-compile", "--probe", "2"], "--no-compile: contradicts --probe 2"),
        ([*SMALL, "--compile", "0", "--probe", "2"], "--probe: is followed by whole steps"),
        ([*SMALL, "--fix", "mesh.ici.stage=3"], "it must divide 4 devices; legal here: 1, 2, 4"),
        (["base", "--topology", "v5e"], "a slice of it, such as v5e:4x4; with --smallest"),
        (["base", "--topology", "v6e", "--smallest"], None),
        (["base", "--topology", "H100", "--smallest"], "--smallest is for TPUs"),
    ],
)
def test_mistakes_are_errors_before_anything_is_searched(words, message, capsys, monkeypatch):
    monkeypatch.setattr("maxpipe.compiling.plan.launch", lambda *a: 0)
    monkeypatch.setattr("maxpipe.compiling.compilable.is_installed", lambda package: True)
    if message is None:
        assert plan.main(words) == 0
        return
    monkeypatch.setitem(sys.modules, "maxpipe.compiling.plan", None)  # which imports JAX
    with pytest.raises(SystemExit) as end:
        plan.main(words)
    assert end.value.code == CONFIG_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["base", "--topology", "v5q:2x2"], ["bse", *FROM[1:]]])
def test_mistakes_are_answered_without_jax(words):
    program = (
        "import sys\nfrom maxpipe import plan\ntry:\n    plan.main(sys.argv[1:])\n"
        "except SystemExit as end:\n    print(end.code, 'jax' in sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=True
    )
    assert ended.stdout == f"{CONFIG_ERROR} False\n"


@pytest.mark.parametrize(
    "words", [["--fix", "pipeline.num_microbatches=7"], ["--try", "pipeline.num_microbatches=5,7"]]
)
def test_values_with_which_nothing_is_legal_are_an_error_that_names_them(words, capsys):
    with pytest.raises(SystemExit) as end:
        plan.main([*FROM, *words])
    assert end.value.code == CONFIG_ERROR
    message = capsys.readouterr().err
    assert f"{' '.join(words)}: nothing is legal; most are left out for: " in message
    assert "no multiple of pipeline.num_microbatches" in message


def test_nothing_legal_on_several_hosts_is_not_blamed_on_what_no_value_changes(capsys):
    """Most candidates are those of the mpmd engine, which no number of microbatches makes legal."""
    words = ["llama3-8b", "--topology", "v5p:2x2x2", "--no-compile"]
    with pytest.raises(SystemExit) as end:
        plan.main([*words, "--fix", "pipeline.num_microbatches=7", "--fix", "mesh.ici.tensor=1"])
    assert end.value.code == CONFIG_ERROR
    assert (
        "most are left out for: data.global_batch_size: no multiple of" in capsys.readouterr().err
    )


def test_devices_on_which_nothing_is_legal_are_an_error(capsys):
    """Neither rows nor layers divide over seven devices."""
    with pytest.raises(SystemExit) as end:
        plan.main(["base", "--topology", "cpu:7", "--no-compile"])
    assert end.value.code == CONFIG_ERROR
    message = capsys.readouterr().err
    assert "7 devices: nothing is legal; most are left out for: " in message
    assert "give --topology another number of them" in message


def test_layers_outside_the_pipeline_tiles_and_another_batch_are_said(capsys):
    words = ["base", "--topology", "cpu:4", "--no-compile", "model.num_layers=9"]
    fixed = ["mesh.ici.stage=4", "pipeline.schedule=lockstep_1f1b", "model.logit_tiles=4"]
    fixed += ["pipeline.num_repeats=2"]
    flags = [word for key in fixed for word in ("--fix", key)]
    batch = load("base").config.data.global_batch_size
    length = load("base").config.data.sequence_length
    assert plan.main([*words, *flags, "--tokens-per-step", str(2 * batch * length)]) == 0
    printed = capsys.readouterr().out
    header, row = (
        re.split(" {2,}", line) for line in printed.splitlines() if re.match("mesh|stage=4", line)
    )
    cells = dict(zip(header, row, strict=False))
    assert (cells["V"], cells["tiles"]) == ("2 +1", "4")
    assert f"{2 * batch} sequences a step are 2 times the file's {batch}, so with " in printed


def test_values_that_are_given_twice_are_tried_once(tmp_path):
    counts = []
    for values in ("2", "2,2"):
        file = str(tmp_path / "plan.json")
        words = ["--try", f"pipeline.num_microbatches={values}", "--json", file]
        assert plan.main([*SMALL, *words]) == 0
        counts.append(json.loads(Path(file).read_text())["tried"])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("paths", ["part-?.txt", "part-[12].txt", "part-1.txt, part-2.txt"])
def test_written_paths_are_absolute_whatever_names_the_files(paths, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        Path(f"part-{number}.txt").write_text("words")
    data = ["data.source=text", f"data.path={paths}"]
    assert plan.main([*SMALL, *data, "--write", "best.yml"]) == 0
    written = load(str(tmp_path / "best.yml")).config.data.path.split(",")
    assert written == [str(tmp_path / part.strip()) for part in paths.split(",")]


def test_a_value_of_a_mesh_that_is_no_number_of_devices_is_one_error(capsys):
    with pytest.raises(SystemExit):
        plan.main([*FROM, "--try", "mesh.ici.data=0"])
    assert capsys.readouterr().err.endswith("1 problem found\n")


def test_candidates_left_out_are_counted_only_where_there_are_some(capsys):
    words = ["--fix", "mesh.ici.stage=4", "--try", "pipeline.schedule=gpipe,1f1b,lockstep_1f1b"]
    repeats = ["--try", "pipeline.num_repeats=3", "--no-compile"]
    plan.main(["llama3-8b", "--topology", "v5e:4x4", *words, *repeats])
    assert " 0 left out" not in capsys.readouterr().out


class TestTpu:
    pytestmark = tpu_aot

    def test_written_file_compiles_elsewhere_to_the_plans_prediction(self, tmp_path, monkeypatch):
        """Everything is real: the search, the compiled finalist and the file."""
        (tmp_path / "planned").mkdir()
        file, report = tmp_path / "planned/best.yml", tmp_path / "planned/best.json"
        sizes = [word for word in NARROW if not word.startswith("pipeline.")]
        few = ["--fix", "mesh.ici.stage=2", "--fix", "mesh.ici.fsdp=2"]
        few += ["--try", "pipeline.schedule=lockstep_1f1b,circular", "--compile", "1"]
        for key, value in QUICK.items():
            monkeypatch.setenv(key, value)
        files = ["--write", str(file), "--json", str(report)]
        assert plan.main(["base", "--topology", "v5p:2x2x1", *few, *files, *sizes]) == 0
        planned = json.loads(report.read_text())
        assert planned["rows"][0]["basis"] == "compiled"
        monkeypatch.chdir(tmp_path)
        compiled, _ = report_of(tmp_path, file)
        assert compiled["fits"]
        step = planned["predicted_step_seconds"]
        assert compiled["predicted_step_seconds"] == pytest.approx(step, rel=0.01)
        parts = planned["rows"][0]["proof"]["parts"]
        assert sum(parts.values()) == pytest.approx(step)
        assert parts["bubble"] > 0
