"""The command: what it prints and writes, exit codes, and errors of model, topology and flags."""

import contextlib
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers.compile_command import NARROW, QUICK, report_of, tpu_aot
from helpers.hf_models import recorded

from maxpipe.config import load, resolve
from maxpipe.config.cli import CONFIG_ERROR
from maxpipe.devices.chips import GIB
from maxpipe.plan import __main__ as plan
from maxpipe.render import plan_text

BASE = Path("configs/base.yml").resolve()
PLAIN = ["--fix", "mesh.ici.tensor=1", "--fix", "mesh.ici.context=1"]
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
        for number in (1, 2):
            (directory / f"part-{number}.txt").write_text("words")
        text = ["data.source=text", "data.path=part-?.txt"]
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
    assert config.data.path == str(written / "part-?.txt")
    assert config.init_from == f"maxtext:{written / 'steps'}"
    assert config.compile.topology == "cpu"
    assert config.mesh.simulated_devices == 4
    assert config.model == resolve(load("base"), 4).model
    assert not any(".yml" in source for source in loaded.sources.values() if "best" not in source)


def test_rows_are_in_order_of_what_was_fixed_or_tried_without_seconds_of_an_unknown_machine(report):
    times = [row["relative_time"] for row in report["rows"]]
    assert times == sorted(times)
    assert times[0] == 1 <= report["own"]["relative_time"]
    assert report["predicted_step_seconds"] is None
    assert report["rows"][0]["reason"] == ""
    assert all(row["reason"] for row in report["rows"][1:])
    assert report["tried"] > sum(report["fallen"].values()) > 0
    keys = [row["keys"] for row in report["rows"]]
    assert {key["pipeline.remat_policy"] for key in keys} == {"full"}
    staged = [key for key in keys if key["pipeline.engine"] != "sequential"]
    assert {key["pipeline.schedule"] for key in staged} == {"lockstep_1f1b", "circular"}


def test_table_file_and_page_show_the_same_plan(written, report):
    lines = (written / "printed.txt").read_text().splitlines()
    fitting = report["tried"] - sum(report["fallen"].values())
    assert any(
        line.startswith(f"searched    {report['tried']:,} candidates in ")
        and line.endswith(f" s, {fitting:,} fit")
        for line in lines
    )
    (header,) = (line for line in lines if line.startswith("mesh "))
    assert "GiB  x fastest  by" in header
    assert "seconds" not in header
    (own,) = (line for line in lines if "your configuration" in line)
    assert re.search(r"^stage=2 fsdp=2 batch=16 .*; \+[\d.]+% per sequence: \w+$", own)
    comments = [x for x in (written / "best.yml").read_text().splitlines() if x.startswith("#")]
    assert comments[0].startswith("# python -m maxpipe.plan base --topology cpu:4")
    page = (written / "best.html").read_text()
    # A bar of time and one of memory for each row, and for the user's own.
    assert page.count('class="bar"') == 2 * (min(len(report["rows"]), 10) + 1)
    assert "http" not in page
    assert all(f">{row['relative_time']:.3f}<" in page for row in report["rows"][:10])


def test_the_command_has_no_secrets_in_the_page_and_the_file(tmp_path, capsys):
    page, file = tmp_path / "best.html", tmp_path / "best.yml"
    words = ["telemetry.mlflow=https://me:hunter2@host/x"]
    words += ["--html", str(page), "--write", str(file)]
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


def test_own_configuration_of_stages_is_a_row_or_says_why_not(capsys, tmp_path, monkeypatch):
    """A row where there is a closed form; a file's table need not suit the rest."""
    monkeypatch.chdir(tmp_path)
    Path("order.csv").write_text("0F0,0B0\n")
    for topology, schedule, words in (
        ("v6e:2x4", "1f1b", "  once  "),
        ("v6e:2x4", "order.csv", "a schedule from a file has no closed form"),
        ("v5p:2x2x2", "1f1b", "mpmd is priced on one host only"),  # it has two
    ):
        Path("own.yml").write_text(
            f"base: {BASE}\nmodel: {{dtype: bfloat16}}\nmesh: {{ici: {{stage: 2, fsdp: 4}}}}\n"
            f"pipeline: {{engine: mpmd, schedule: {schedule}, layers_per_stage: auto}}\n"
        )
        command = ["own.yml", "--topology", topology, "--no-compile", "--compare", *PLAIN]
        assert plan.main([*command, "--fix", "pipeline.remat_policy=full"]) == 0
        (own,) = (line for line in capsys.readouterr().out.splitlines() if "your conf" in line)
        assert words in own


def test_nothing_fits_says_what_would_and_writes_a_page_but_no_configuration(capsys, tmp_path):
    fixed = ["--fix", "pipeline.schedule=lockstep_1f1b", "--fix", "mesh.ici.context=1"]
    fixed += ["--no-compile"]
    best, page = tmp_path / "best.yml", tmp_path / "page.html"
    files = ["--write", str(best), "--html", str(page), "--compare"]
    assert plan.main(["llama3-405b", "--topology", "v5p:2x2x1", *fixed, *files]) == 3
    printed, shown = capsys.readouterr().out, page.read_text()
    assert f"not written {best}: nothing fits" in printed
    assert not best.exists()
    assert shown.count("<h2>") == 1  # no table where there is no row
    for text in (printed, shown):
        assert re.search(
            r"nothing fits: by closed forms the least is \S+ GiB a device, and 85", text
        )
        assert "what would fit:\n  more chips: --topology v5p:4x4x8\n" in text
        assert "your configuration: mesh.ici: stage=6 x fsdp=-1 makes 6" in text
    assert "none of these helps by itself: fewer tokens, offloading\n" in printed
    assert plan.main(["llama3-405b", "--topology", "v5p:4x4x8", *fixed]) == 0


def test_smallest_slice_and_larger_ones_are_listed_with_their_cost(capsys, tmp_path):
    words = ["qwen3-0.6b", "--topology", "v5e", "--smallest", "--no-compile", *PLAIN]
    words += ["--fix", "pipeline.schedule=lockstep_1f1b", "--tokens-per-step", "256Ki"]
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    assert plan.main([*words, "--json", str(file), "--html", str(page)]) == 0
    _, _, table = capsys.readouterr().out.partition("\nslice ")
    lines = [line for line in table.splitlines() if line.startswith("v5e:")]
    assert "\n".join(lines) in page.read_text()
    # Thousands have commas.
    slices, chips, batches, steps, costs = zip(
        *(line.replace(",", "").split()[:5] for line in lines), strict=True
    )
    assert slices[0] == "v5e:2x2"
    assert [*map(int, chips)] == sorted({*map(int, chips)})
    assert len(chips) > 2
    written = json.loads(file.read_text())["slice_costs"]
    for row, *found in zip(written, slices, chips, batches, steps, costs, strict=True):
        assert [row["topology"], str(row["chips"]), str(row["batch"])] == found[:3]
        step, cost = map(float, found[3:])
        assert row["chip_seconds"] == pytest.approx(cost, rel=1e-3)
        assert cost == pytest.approx(step * row["chips"] * 1e9 / 2**18, rel=1e-3)


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


def test_what_the_plan_decides_need_not_be_legal_in_the_file(tmp_path, capsys):
    bad, file = tmp_path / "bad.yml", tmp_path / "best.yml"
    for keys in (
        "mesh: {ici: {stage: 3}}",
        "pipeline: {num_repeats: 3, num_layers_per_stage: 5, layers_per_stage: [1, 2]}",
        "pipeline: {remat_policy: custom, remat_tensors: {context: device}}",
        "compile: {num_slices: 2}",
    ):
        bad.write_text(f"base: {BASE}\n{keys}\n")
        topology = "v5e:2x2" if keys.startswith("compile") else "cpu:4"
        words = ["--topology", topology, "--no-compile", "--try", "pipeline.schedule=circular"]
        assert plan.main([str(bad), *words, "--write", str(file), "--compare"]) == 0, keys
        assert "your configuration" in capsys.readouterr().out, keys
        written = load(str(file))
        slices = written.config.compile.num_slices
        resolve(written, 4 * slices, slices)
        file.rename(other := tmp_path / "other.yml")
    with pytest.raises(SystemExit):
        plan.main([str(bad), *words, "--write", str(other)])
    assert f"--write: {other} exists, and a run may need it" in capsys.readouterr().err


def test_what_is_searched_follows_the_words(monkeypatch):
    """Batches double, and have the fixed length; auto leaves gathers to the search."""
    requests = []
    monkeypatch.setattr("maxpipe.compile.plan_launch.launch", lambda r, *_: requests.append(r) or 0)

    def request_of(*words):
        assert plan.main([*FROM, *words]) == 0
        return requests.pop()

    assert request_of("--max-global-batch", "128").batches == (16, 32, 64, 128)
    fixed = ("--fix", "data.sequence_length=256", "--tokens-per-step", "4Ki")
    assert request_of(*fixed).batches == (16,)
    for word in ("data={sequence_length: 64}", "data.sequence_length =64"):
        request = request_of("--fix", word)
        assert request.config.data.sequence_length == request.written.data.sequence_length == 64
    plain = request_of()
    for flag in ("--fix", "--try"):
        assert request_of(flag, "pipeline.fsdp_gather=auto") == plain


GATE = "pipeline.remat_tensors.mlp_gate"
# What the command says, or nothing where the words are taken.
MISTAKES = {
    "base --topology v5q:2x2": "there is no chip 'v5q'",
    "base --topology v5p:4x4x5": "cubes of 4x4x4",
    "base --topology H100:64": "give 1 to 8 GPUs of one host",
    "base --topology cpu:2000": "give 1 to 1024 simulated devices",
    "base --topology v6e --smallest": None,
    "base --topology H100 --smallest": "--smallest is for TPUs",
    "base --smallest compile.topology=v5p:2x2x1": "compile.topology (command line): ",
    "base": "name the devices",
    "bse --topology cpu:4": "did you mean base",
    "base --topology H100:8 compile.num_slices=8": "compile.num_slices=8 joins",
    "base --topology v5e:4x4 compile.num_slices=2": None,
    "SMALL --tokens-per-step 250": "nearest: 256",
    "SMALL --max-global-batch 31": "a step has 16 sequences: give 32 to 16384",
    "FROM --max-global-batch 64 --fix data.global_batch_size=32": "--max-global-batch: data.global",
    "FROM --tokens-per-step 4Ki data.global_batch_size=32": "leave out --tokens-per-step",
    "SMALL --memory-margin 100%": "expected a share below 100%",
    "SMALL --write nowhere/best.yml": "there is no directory nowhere",
    "SMALL --json plan --html ./plan": "--html: would replace ./plan, which --js",
    "SMALL --compile 2": "--compile: there is no compiler at hand for cpu:4",
    "SMALL --try optimizer.name=adamw,lion": "--try takes what is searched, mesh.ici.data",
    "SMALL pipeline.num_repeats=2": "is what the plan decides",
    "SMALL --fix compile.topology=cpu": "follows from what the plan decides",
    "FROM pipeline.outside_layers=before": "pipeline.outside_layers: follows from what",
    "FROM --fix pipeline.engine=auto": "auto has no closed form; the plan tries sequential",
    "FROM --topology v5p:2x2x2 --try pipeline.schedule=zb_h1": "zb_h1: mpmd is priced on one host",
    "FROM --topology v5p:2x2x2 --fix pipeline.engine=mpmd": "mpmd is priced on one host only, wit",
    "FROM --try pipeline.num_repeats=1,-1": "the plan derives nothing: give numbers of at least 1",
    "FROM --fix model.lora.rank=4": "model.lora.rank: a plan counts all parameters",
    "FROM --fix 'pipeline={schedule: 1f1b, remat_layers: true}'": None,
    f"FROM --fix {GATE}=device": f"{GATE}: no policy that is tried reads it; add --fix",
    f"FROM {GATE}=device --try pipeline.remat_policy=full,custom": None,
    f"FROM --fix {GATE}=remat": None,
}


def test_mistakes_are_errors_before_anything_is_searched(capsys, monkeypatch):
    monkeypatch.setattr("maxpipe.compile.plan_launch.launch", lambda *a: 0)
    monkeypatch.setattr("maxpipe.plan.__main__.is_installed", lambda package: True)
    said = {}
    for words, message in MISTAKES.items():
        first, *others = shlex.split(words)
        with monkeypatch.context() as context, contextlib.suppress(SystemExit):
            if message is not None:
                context.setitem(sys.modules, "maxpipe.compile.plan_launch", None)  # it needs JAX
            said[words] = plan.main([*{"SMALL": SMALL, "FROM": FROM}.get(first, [first]), *others])
        said.setdefault(words, capsys.readouterr().err)
    wrong = {w: said[w] for w, m in MISTAKES.items() if (m not in said[w] if m else said[w] != 0)}
    assert wrong == {}


def test_words_with_which_nothing_is_legal_are_an_error_that_names_them(capsys):
    uneven = "data.global_batch_size: no multiple of pipeline.num_microbatches"
    for words, devices, reason in (
        (["--fix", "pipeline.num_microbatches=7"], "cpu:4", uneven),
        (["--fix", "mesh.ici.stage=3"], "cpu:4", "no mesh, engine and schedule has these values"),
        ([], "cpu:7", "7 devices: nothing is legal"),
    ):
        with pytest.raises(SystemExit, match=str(CONFIG_ERROR)):
            plan.main(["base", "--topology", devices, *words])
        message = capsys.readouterr().err
        assert f"{' '.join(words)}" in message
        assert reason in message


def test_simulated_devices_that_need_more_than_the_machine_has_free_are_a_warning(
    capsys, monkeypatch, tmp_path
):
    file, warnings = tmp_path / "plan.json", []
    for free in (8 * 2**20, 2**40):
        monkeypatch.setattr(plan_text, "free_memory", lambda free=free: free)
        assert plan.main([*SMALL, "--fix", "pipeline.engine=sequential", "--json", str(file)]) == 0
        printed = capsys.readouterr().out
        warnings += re.findall(r"4 x \S+ = (\S+) GiB, and (\S+) are free", printed)
    needed = 4 * json.loads(file.read_text())["rows"][0]["memory_bytes"]
    (warning,) = warnings
    assert [float(n) * GIB for n in warning] == pytest.approx([needed, 8 * 2**20], rel=1e-2)


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
