"""Test `python -m maxpipe.schedule` for schedules by name and for configurations."""

import io
import re
import sys
from pathlib import Path

import pytest

from maxpipe.config.catalog import SCHEDULES
from maxpipe.schedule import main


@pytest.fixture
def output(capsys):

    def _output(*argv):
        assert main(argv) == 0
        return capsys.readouterr().out

    return _output


def test_schedule_that_follows_times_has_another_order_once_they_are_given(output, tmp_path):
    times = ("forward=1", "input_gradient=1.4", "weight_gradient=.9", "comm=.3")
    file, sizes = str(tmp_path / "published.csv"), ("stages=4", "microbatches=8")
    for name in ("zb_v", "zb_h2"):
        output(name, *sizes, "--csv", file)
        published, adapted = output(file, *times), output(name, *sizes, *times)
        output(name, *sizes, *times, "--csv", file)
        assert figure(output(file, *times), "makespan") == figure(adapted, "makespan")
        assert figure(adapted, "idle in a span") < figure(published, "idle in a span") - 0.1


def test_schedule_on_a_terminal_prints_colours_and_a_page_has_the_charts_of_all(
    output, monkeypatch, tmp_path
):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    html = tmp_path / "a.html"
    output("lockstep_1f1b", "gpipe", "repeats=2", "comm=0.1", "--html", str(html))
    page = html.read_text()
    assert page.count("<svg") == 2
    sizes = "4 stages, 8 microbatches, forward 1, backward 2, comm 0.1, head 0; times are of a who"
    assert sizes in page
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    assert main(["1f1b"]) == 0
    assert "\x1b[48;5;" in screen.getvalue()


def test_compare_lists_every_schedule_at_equal_sizes(output):
    lines = output("--compare", "stages=4", "microbatches=8", "repeats=2").splitlines()
    assert sorted(line.split()[0] for line in lines[1:-4]) == sorted(SCHEDULES)
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:-4]}
    assert cells["gpipe"][:5] == ["1", "33.0", "27.3%", "8.0", "48"]
    assert cells["lockstep_1f1b"][:5] == ["2", "28.5", "15.8%", "5.5", "112"]


def test_schedule_with_costs_uses_them_per_stage_and_per_backward_half(output):
    for times in ("forward=1,3", "forward=[1,3]"):
        slow = output("1f1b", "stages=2", "microbatches=4", times, "backward=2")
        assert "makespan        23\n" in slow
    split = output("zb_h1", "stages=2", "microbatches=4", "backward=1.5")
    assert "bubble          1 " in split
    parts = output("zb_h1", "stages=2", "microbatches=4", "input_gradient=2", "weight_gradient=0.5")
    assert "bubble          2.5 " in parts


# How the problems of a command begin.
MISTAKES = {
    "": ["name a schedule, one of circular, gpipe"],
    "gpipe stage=4": ["stage: unknown key; there are stages, microbatches, "],
    "gpipe repeats=2": ["repeats=2: schedule gpipe has one chunk per stage"],
    "gpipe overlap_slots=true": ["overlap_slots=true: no tick of schedule gpipe has an F and a B"],
    "gpipe forward=1,2,3": ["forward: [1.0, 2.0, 3.0]: give one number, or one per stage (4)"],
    "none.csv": ["schedule=none.csv: cannot read it: "],
    "gpipe --html /no/folder/x.html": ["--html: cannot write /no/folder/x.html: there is no direc"],
    "zb_v --plan": ["schedule=zb_v: "],  # a V, which the scheduled engine cannot run
    "solve --compare": ["--compare: solve compares with named schedules anyway"],
    "solve --seconds -1": ["--seconds: must be a number, at least 0"],
    "base mesh.ici.stage=1": ["mesh.ici.stage: one stage has no schedule to draw"],
    "base --compare": ["--compare: is for schedules by name"],
    # Several at once. How many times there must be is not known while the stages are wrong.
    "1f1b stages=0 forward=1,2 repeats=2 comm=-1": ["stages: ", "comm: ", "repeats=2: "],
    "2f2b nowhere.csv repeats=x --svg x.svg --seconds 3": [
        "--seconds: ",
        "--svg: ",
        "repeats: expected a whole number",
        "schedule='2f2b' ",
        "schedule=nowhere.csv: ",
    ],
    "solve 1f1b placement=ring lockstep=2 head=x stages=0 foo=1 forward=1,2": [
        "1f1b: ",
        "placement: 'ring' is not one of loop, v",
        "lockstep: '2' is not one of auto, true, false",
        "head: ",
        "stages: ",
        "foo: unknown key",
    ],
}


def test_mistakes_exit_with_2_and_are_named_by_their_keys_all_at_once(capsys):
    said = {}
    for words, problems in MISTAKES.items():
        assert main(words.split()) == 2, words
        captured = capsys.readouterr()
        assert captured.out == ""
        *lines, count = captured.err.splitlines()
        assert count.startswith(f"{len(lines)} problem"), words
        lines = [line.removeprefix("config error: ") for line in lines]
        is_same = [line[: len(start)] for line, start in zip(lines, problems, strict=False)]
        said[words] = is_same if len(lines) == len(problems) else lines
    assert said == MISTAKES


def test_a_table_of_a_file_is_the_schedule_and_has_its_sizes_and_its_ending(
    output, capsys, tmp_path
):
    path, sizes = tmp_path / "mine.csv", ("stages=3", "microbatches=5")
    output("zb_h1", *sizes, "--csv", str(path))
    before = path.read_text()
    assert output(str(path)).replace("mine:", "zb_h1:") == output("zb_h1", *sizes)
    (file := tmp_path / "mine").write_text(before)
    for words, message in (
        ([path, "stages=4"], "is for 3 stages, 5 microbatches and 1 repeats, but stages=4, micro"),
        ([path, "--svg", path], f"--svg: would replace {path}, which is read; name another"),
        (["gpipe", "--csv", path, "--html", path], "which --csv writes"),
        (["gpipe", "--csv", file], "give a name that ends in .csv"),
        ([file], "is neither a file NAME.csv nor one of"),
    ):
        assert main([*map(str, words)]) == 2
        assert message in capsys.readouterr().err
    assert path.read_text() == before
    output("gpipe", "--csv", f"{file}.CSV")
    assert output(f"{file}.CSV").startswith("mine")
    assert main(["gpipe", "--csv", "/dev/null", "--svg", "/dev/null"]) == 0


def test_plan_of_an_own_table_says_what_each_stage_does_in_a_tick(output, tmp_path):
    path = tmp_path / "mine.csv"
    sizes = ("stages=2", "microbatches=2")
    output("lockstep_1f1b", *sizes, "--csv", str(path))
    text = output(str(path), "--plan")
    assert "      1      1F0: a0 -> r0; head 0; 1B0: head r0" in text
    assert text == output("lockstep_1f1b", *sizes, "--plan")


SOLVE = ("solve", "stages=2", "microbatches=4", "input_gradient=1.4", "weight_gradient=.9")


def test_solve_prints_the_schedule_with_named_ones_and_the_bound(output, capsys, tmp_path):
    path = tmp_path / "best.csv"
    assert main([*SOLVE, "memory=2", "comm=.05", "--seconds", "1", "--csv", str(path)]) == 0
    captured = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1:] for line in captured.out.splitlines() if line}
    assert float(rows["solved"][1]) <= min(float(rows[name][1]) for name in ("zb_h1", "1f1b"))
    assert rows["solved"][3:] == ["2", "8", "mpmd"]
    assert "eager_1f1b" not in rows  # which has three in flight
    assert "bound: no free-running order of these sizes takes less than" in captured.out
    assert re.search(r"^\d+ s: makespan [0-9.]+$", captured.err, re.MULTILINE)
    drawn = output(str(path), "input_gradient=1.4", "weight_gradient=.9", "comm=.05")
    assert figure(drawn, "makespan") == float(rows["solved"][1])


def test_solve_in_lockstep_and_in_v_placement_runs_where_it_says(output, tmp_path, monkeypatch):
    monkeypatch.setattr("maxpipe.plan.solve.UNITS_TIMED", 5_000)
    path = tmp_path / "best.csv"
    text = output(*SOLVE, "lockstep=true", "--seconds", "0", "--csv", str(path))
    assert re.search(r"^solved .* scheduled, mpmd$", text, re.MULTILINE)
    assert "lockstep ticks" in output(str(path))
    text = output(*SOLVE, "placement=v", "memory=1", "--seconds", "0")
    assert text.startswith("solved: 2 stages, 4 microbatches, 2 repeats, ")
    assert re.search(r"^solved +2 .* mpmd$", text, re.MULTILINE)


CONFIGS = Path(__file__).parents[1] / "configs"
LARGE_HEAD = (str(CONFIGS / "models" / "qwen3-0.6b.yml"), "pipeline.schedule=1f1b")


def figure(text, name):
    (line,) = re.findall(rf"^{name} +(.*)$", text, re.MULTILINE)
    return float(line.split()[0])


def test_schedule_of_a_configuration_compares_automatic_with_uniform_stages(output):
    text = output(*LARGE_HEAD, "pipeline.layers_per_stage=auto")
    assert text.startswith(
        "1f1b [16,12]: 2 stages, 8 microbatches, 1 repeat, 18 free-running ticks\n"
    )
    assert "  stage 0       16 layers: F 16, B 48, " in text
    assert "  stage 1       12 layers: F 12, B 36, head 19.35, " in text
    assert figure(text, "slowest stage") == pytest.approx(12 + 36 + 19.35, abs=0.01)
    pattern = r"^uniform stages  14 layers each: makespan ([0-9.]+) \(\+9.3%\), bubble "
    (uniform,) = re.findall(pattern, text, re.MULTILINE)
    assert float(uniform) == pytest.approx(1.093 * figure(text, "makespan"), rel=1e-3)
    alone = output(*LARGE_HEAD, "pipeline.num_repeats=1")
    assert figure(alone, "makespan") == float(uniform)
    assert "uniform stages" not in alone


def test_schedule_of_manual_stages_uses_their_own_times_and_lists_every_chunk(output):
    text = output(*LARGE_HEAD, "pipeline.layers_per_stage=[20,8]")
    assert text.startswith("1f1b [20,8]: ")
    assert figure(text, "slowest stage") == 80
    sizes = ("mesh.ici.stage=3", "pipeline.layers_per_stage=[10,10,8]")
    text = output(*LARGE_HEAD, *sizes, "compile.topology=", "data.global_batch_size=72")
    assert "none: 28 layers do not divide into 3 chunks" in text
    text = output(LARGE_HEAD[0], "pipeline.schedule=zb_v", "pipeline.layers_per_stage=auto")
    assert text.startswith("zb_v [8,8,8,4]: ")
    assert "  stage 0       8 + 4 layers: " in text
    lockstep = output(str(CONFIGS / "base.yml"), "pipeline.layers_per_stage=[2,2]")
    assert "  stage 1       2 layers: F 2, B 6, head 0.2679\n" in lockstep


def test_schedule_with_layers_outside_on_mpmd_counts_them_on_their_stage(output):
    words = "pipeline.num_repeats=1", "pipeline.parallel_layers=20"
    for place, chunks in (("after", "[10,18]"), ("before", "[18,10]")):
        text = output(*LARGE_HEAD, *words, f"pipeline.outside_layers={place}")
        assert text == output(*LARGE_HEAD, f"pipeline.layers_per_stage={chunks}")


def test_schedule_with_a_topology_limits_automatic_stages_by_its_memory(output, capsys):
    words = [
        str(CONFIGS / "models" / "llama3-8b.yml"),
        "pipeline.schedule=zb_v",
        "pipeline.layers_per_stage=auto",
        "pipeline.num_microbatches=16",
    ]
    free, tight = output(*words, "compile.topology="), output(*words)
    assert free.startswith("zb_v [8,9,8,7]")
    assert "limit           95 GiB a device\n" in tight
    assert "GiB, which is too much\n" in tight
    assert main([*words, "compile.topology=v5e:2x4"]) == 2
    message = "no choice of stages fits 14.9 GiB a device (the chip's memory)"
    assert message in capsys.readouterr().err


def test_schedule_page_of_a_configuration_has_both_charts(output, capsys, tmp_path):
    page, svg = tmp_path / "stages.html", tmp_path / "stages.svg"
    words = [*LARGE_HEAD, "pipeline.layers_per_stage=auto"]
    assert main([*words, "--html", str(page), "--svg", str(svg)]) == 0
    assert capsys.readouterr() == ("", f"wrote {svg}\nwrote {page}\n")
    charts = re.findall(r'<text class="title"[^>]*>([^<]*)</text>', page.read_text())
    assert charts == ["1f1b [16,12]", "1f1b [14,14]"]
    assert "28 layers; the forward of a layer takes 1" in page.read_text()
    assert svg.read_text().count("<title>") == 2 * 2 * 8 + 8
