"""`maxpipe.runs`: figures, differences and curves of runs, from what they have written."""

import errno
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.commands import exit_code

import maxpipe
from maxpipe import runs
from maxpipe.comparison import page
from maxpipe.comparison.page import page_html, run_data
from maxpipe.comparison.recorded import _names, differing_keys, read_runs
from maxpipe.config import identity, resolve, to_yaml

BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
CHROMIUM = next(filter(None, BROWSERS), None)


def write_run(root, *words, steps=6, losses=None, evaluations=(3, 6), end="\n"):
    """Write what a run with a step time of 2 s would have written."""
    root.mkdir(parents=True)
    config = maxpipe.load_config("base", f"run_name={root.name}", *words)
    resolved = resolve(config, 4)
    derived = identity.differing_keys(resolved, config)
    (root / "config.yml").write_text(to_yaml(resolved, derived=derived))
    tokens = config.data.global_batch_size * config.data.sequence_length
    rows = []
    for step in range(1, steps + 1):
        loss = 6 - 0.5 * step if losses is None else losses[step - 1]
        seconds = 2.0 if step > 1 else 60.0
        row = {"step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "mfu": 0.25}
        rows.append(row | {"step_seconds": seconds, "tokens_per_second": tokens / seconds})
        if step in evaluations:
            rows.append({"step": step, "eval_loss": 6.5 - 0.5 * step, "eval_bits_per_byte": 1.25})
    rows.append({"step": steps, "goodput": 0.9, "seconds_in_step": 70.0, "seconds_in_data": 0.1})
    (root / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + end)
    return root


@pytest.fixture
def two(tmp_path):
    write_run(tmp_path / "runs" / "run-2", "steps=8", "optimizer.learning_rate=1e-4")
    write_run(tmp_path / "runs" / "run-10", "steps=6", "model.tie_embeddings=true")
    return tmp_path / "runs"


def printed(capsys, *words):
    assert runs.main([*map(str, words)]) == 0
    return capsys.readouterr().out


def test_ls_has_a_line_with_the_figures_of_each_run_in_natural_order(two, capsys, monkeypatch):
    monkeypatch.chdir(two.parent)
    header, *lines = printed(capsys, "ls").splitlines()
    assert " ".join(header.split()) == "run step loss eval loss best eval bits/byte tokens/s MFU"
    # 16 x 128 tokens in 2 s; the first step, with compilation, does not count.
    assert [line.split() for line in lines] == [
        ["run-2", "6/8", "3.0000", "3.5000", "3.5000", "@6", "1.2500", "1.02k", "25.0%"],
        ["run-10", "6/6", "3.0000", "3.5000", "3.5000", "@6", "1.2500", "1.02k", "25.0%"],
    ]


def test_change_midway_is_marked_and_derived_keys_do_not_count_as_differences(two, capsys):
    with (two / "run-2" / "metrics.jsonl").open("a") as file:
        row = {"step": 4, "changed": "optimizer.learning_rate", "before": 3e-3, "now": 1e-4}
        file.write(json.dumps(row) + "\n")
    write_run(two / "wide", "model.vocab_size=640")
    for text in (printed(capsys, "compare", two), printed(capsys, "show", two / "run-2")):
        assert "0.003 to step 4, 0.0001" in text
        assert "unpadded_vocab_size" not in text
    assert "0.003 to step 4, 0.0001" in page_html(read_runs([str(two)]))


def test_run_that_ended_with_steps_that_are_not_finite_says_so(tmp_path, capsys):
    for column in ["loss", "grad_norm"]:
        root = tmp_path / column
        file = write_run(root / "run", steps=3, evaluations=()) / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows[1][column] = None  # which is over
        file.write_text("\n".join(map(json.dumps, rows)))
        assert "not finite" not in printed(capsys, "ls", root)
        rows[2][column] = None
        file.write_text("\n".join(map(json.dumps, rows)))
        assert "not finite" in printed(capsys, "ls", root)
        assert "loss        not finite" in printed(capsys, "show", root / "run")


def test_lost_configurations_are_not_called_the_same(two, capsys):
    for num_lost in [1, 2]:
        (two / ("run-2", "run-10")[num_lost - 1] / "config.yml").unlink()
        text = printed(capsys, "compare", two)
        assert "without a readable config.yml: run-2" in text
        assert "are the same" not in text + page_html(read_runs([str(two)]))


def test_ls_takes_live_damaged_and_empty_runs(two, capsys):
    write_run(two / "torn", end='\n{"step": 7, "loss": 1')
    (two / "torn" / "config.yml").write_text("{")
    with (two / "torn" / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n[]\n{"step": "x", "loss": 9}\n{"step": 7, "loss": 1%s}\n' % (b"0" * 400))
        file.write(b'{"step": 8, "loss": null}\n')
    (two / "begun" / "config_history").mkdir(parents=True)
    (two / "begun" / "config.yml").write_text(to_yaml(maxpipe.load_config("base")))
    lines = {line.split()[0]: line.split()[1:] for line in printed(capsys, "ls", two).splitlines()}
    assert lines["begun"] == ["0/200", "-", "-", "-", "-", "-", "-"]
    assert " ".join(lines["torn"]) == "8/? not finite 3.5000 3.5000 @6 1.2500 1.02k 25.0%"


def test_ls_leaves_out_what_it_may_not_read_and_says_so(two, capsys, monkeypatch):
    # Root, as which tests may run, is refused nothing.
    (two / "secret").mkdir()
    refused = two / "secret", two / "run-10" / "metrics.jsonl"
    for name in ("iterdir", "open"):
        method = getattr(Path, name)

        def call(path, *args, method=method, **options):
            if path in refused:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return method(path, *args, **options)

        monkeypatch.setattr(Path, name, call)
    assert runs.main(["ls", str(two)]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["6/8", "0/6"]
    assert err.splitlines() == [f"warning: {p} is left out: Permission denied" for p in refused]


def test_runs_of_one_name_are_told_apart_by_the_path_before_it_and_each_is_read_once(tmp_path):
    assert _names([Path("/base"), Path("/a/base")]) == ["/base", "a/base"]
    write_run(tmp_path / "a" / "base")
    write_run(tmp_path / "b" / "base")
    assert [run.name for run in read_runs([str(tmp_path)])] == ["a/base", "b/base"]
    (tmp_path / "link").symlink_to(tmp_path / "b")
    names = ("a/base", "b/base", "link/base", "b/../a/base")
    read = read_runs([str(tmp_path / name) for name in names])
    assert [run.root for run in read] == [tmp_path / "a" / "base", tmp_path / "b" / "base"]


def test_show_has_all_about_a_run(two, capsys):
    text = printed(capsys, "show", two / "run-2")
    figures = "step +6/8", "best eval +3.5000 @6", "tokens +12,288", "s/step +2"
    keys = "optimizer.learning_rate +0.0001", "model.embed_dim +128"
    for pattern in (*figures, "time spent +step 1:10$", *keys):
        assert re.search(rf"^  {pattern}", text, re.MULTILINE), pattern
    shown = {line.split()[0] for line in text.splitlines() if "." in line}
    # What has its default, or was derived.
    assert not shown & {"optimizer.beta2", "pipeline.engine", "model.unpadded_vocab_size"}


def test_tokens_are_those_of_the_batches_at_each_step(tmp_path, capsys):
    root = write_run(tmp_path / "ramp", "data.batch_ramp=[[0,4],[2,8],[4,16]]")
    # 4, 4, 8, 8, 16 and 16 sequences of 128 tokens.
    assert re.search(r"^  tokens +7,168$", printed(capsys, "show", root), re.MULTILINE)
    curves = run_data(*read_runs([str(root)]))
    assert curves["tokens"] == [512, 1024, 2048, 3072, 5120, 7168]
    assert curves["evaluation"]["tokens"] == [2048, 7168]


def test_compare_lists_the_keys_that_differ(two, capsys):
    figures, differences = printed(capsys, "compare", two / "run-2", two / "run-10").split("\n\n")
    assert figures == printed(capsys, "ls", two).rstrip()
    assert [line.split() for line in differences.splitlines()] == [
        ["key", "run-2", "run-10"],
        ["steps", "8", "6"],
        ["model.tie_embeddings", "false", "true"],
        ["optimizer.learning_rate", "0.0001", "0.003"],
    ]


def test_compare_names_the_engine_and_no_value_without_effect(tmp_path, capsys):
    write_run(tmp_path / "zb", "pipeline.schedule=zb_h1", "pipeline.num_repeats=1")
    write_run(tmp_path / "flat", "mesh.ici.stage=1", "mesh.ici.fsdp=4", "steps=6")
    differences = printed(capsys, "compare", tmp_path / "zb", tmp_path / "flat").split("\n\n")[1]
    rows = {line.split()[0]: line.split()[1:] for line in differences.splitlines()}
    assert rows["pipeline.engine"] == ["mpmd", "sequential"]
    assert rows["pipeline.schedule"] == ["zb_h1", "-"]
    assert "pipeline.num_repeats" not in printed(capsys, "show", tmp_path / "flat")
    write_run(tmp_path / "other", "mesh.ici.stage=1", "mesh.ici.fsdp=4", "pipeline.schedule=zb_h1")
    assert "schedule" not in printed(capsys, "compare", tmp_path / "flat", tmp_path / "other")


def test_compare_of_long_names_has_a_line_for_each_run(tmp_path, capsys):
    for rate in ("1e-3", "1e-4"):
        root = tmp_path / f"a_run_with_a_very_long_name_{rate}"
        write_run(root, f"optimizer.learning_rate={rate}")
    differences = printed(capsys, "compare", tmp_path).split("\n\n")[1].splitlines()
    assert differences[0].split() == ["run", "optimizer.learning_rate"]
    assert [line.split()[1] for line in differences[1:]] == ["0.0001", "0.001"]


def test_compare_of_equal_configurations_says_so_and_a_key_that_is_lacking_is_its_default(
    tmp_path, capsys
):
    for name in ("a", "b"):
        write_run(tmp_path / name)
    assert "the configurations are the same" in printed(capsys, "compare", tmp_path)
    (tmp_path / "b" / "config.yml").write_text("steps: 200\n")  # of an earlier version
    assert "seed" not in differing_keys(read_runs([str(tmp_path)]))
    assert "model.embed_dim" in differing_keys(read_runs([str(tmp_path)]))


def test_runs_with_bad_words_end_with_2_and_one_line(two, capsys):
    (two.parent / "empty").mkdir()
    for words, message in [
        (["ls", "{}/none"], "DIR: there is no directory"),
        (["ls", "{}/empty"], "empty holds no run"),
        (["compare", "{}/runs/run-2"], "run-2 is one run; name another"),
        (["plot", "{}/runs", "--html", "{}/none/x.html"], "--html: cannot write"),
    ]:
        assert exit_code(runs.main, [word.format(two.parent) for word in words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.endswith("1 problem found\n")
        assert len(error.splitlines()) == 2


def test_plot_writes_a_page_that_needs_nothing_but_itself(two, tmp_path, capsys):
    write_run(two / "x").rename(two / "a<b>&'c'")
    runs.main(["plot", str(two), "--html", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"""<[^>]*(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest""", text)
    assert "a&lt;b&gt;&amp;&#x27;c&#x27;" in text
    assert "a<b>" not in text
    assert capsys.readouterr().err == f"wrote {tmp_path}/page.html\n"
    runs.main(["plot", str(two), "--html", str(tmp_path / "page.html")])
    assert "in place of an earlier file" in capsys.readouterr().err


def test_page_of_a_long_run_keeps_its_spikes(tmp_path):
    losses = [3.0] * 20_000
    losses[12_345], losses[777], losses[5] = 9.0, 1.0, None
    write_run(tmp_path / "long", steps=20_000, losses=losses, evaluations=())
    text = page_html(read_runs([str(tmp_path)]))
    assert re.findall(r'data-metric="(\w*loss)"', text) == ["loss"]
    data = run_data(*read_runs([str(tmp_path)]))
    assert len(data["step"]) <= 3 * page.MOST_BUCKETS + 1
    assert {9.0, 1.0} <= {*data["loss"]}
    assert data["step"] == sorted(data["step"])
    assert (data["step"][0], data["step"][-1]) == (1, 20_000)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium installed")
def test_page_can_be_hovered_zoomed_and_its_runs_hidden(two, tmp_path):
    script = """<script>
    addEventListener("load", async () => {
      const frame = () => new Promise((done) => setTimeout(done, 100));
      while (!charts.length) await frame();
      const send = (name, share) => {
        const box = charts[0].over.getBoundingClientRect();
        charts[0].over.dispatchEvent(new MouseEvent(name, {bubbles: true, movementX: 9,
          clientX: box.x + share * box.width, clientY: box.y + 50}));
      };
      const range = (chart) => [chart.scales.x.min, chart.scales.x.max];
      const lines = () => charts[0].series.slice(1).filter(({show}) => show).length;
      send("mousemove", 0.6);
      await frame();
      const seen = {hover: tip.textContent, lines: lines()};
      send("mousemove", 0.5);
      send("mousedown", 0.5);
      send("mousemove", 0.9);
      send("mouseup", 0.9);
      await frame();
      seen.zoomed = charts.map(range);
      document.querySelector('[data-run="0"]').click();
      seen.hidden = lines();
      reset.click();
      along.value = "tokens";
      along.dispatchEvent(new Event("change"));
      await frame();
      seen.tokens = range(charts[0]);
      document.title = JSON.stringify(seen);
    });
    </script></body>"""
    path = tmp_path / "page.html"
    path.write_text(page_html(read_runs([str(two)])).replace("</body>", script))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--run-all-compositor-stages-before-draw", "--virtual-time-budget=5000"]
    command += ["--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    seen = json.loads(re.search(r"<title>(.*)</title>", dom)[1])
    assert seen["lines"] == 2
    # 60 % of the way from step 1 to 6 is step 4.
    assert seen["hover"].splitlines() == ["run-2: 4 at step 4", "run-10: 4 at step 4"]
    assert len(seen["zoomed"]) == 6
    for zoomed in seen["zoomed"]:
        assert zoomed == pytest.approx([3.5, 5.5], abs=0.05)
    assert seen["hidden"] == 1
    assert seen["tokens"] == [2048, 6 * 2048]
