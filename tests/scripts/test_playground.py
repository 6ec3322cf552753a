"""The page docs/playground: its tables, and its figures in a browser next to the simulator's."""

import json
import random
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import pytest

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.plan.simulate import Costs, simulate

PAGE = Path(__file__).parents[2] / "docs" / "playground"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# Reads what is refused of an address, and the table of all schedules at every other one, then
# changes a schedule as a reader would.
SCRIPT = """<script>
location.hash = "schedule=1f1b&stages=5&head=9&stage=8";
update(keysOfAddress());
const read = () => document.getElementById("refused").innerText;
const refused = [document.forms.keys.elements.stages.value, ...read().split("\\n")];
const seen = ADDRESSES.map((address) => {
  location.hash = address;
  update(keysOfAddress());
  return [...document.querySelectorAll("#all tbody tr")].map((row) => row.innerText.split("\\t"));
});
const select = document.forms.keys.elements.schedule;
select.value = "zb_v";
select.dispatchEvent(new Event("input", {bubbles: true}));
refused.push(read());
const units = document.querySelectorAll("#chart rect title").length;
document.title = JSON.stringify([seen, location.hash, command.textContent, units, refused]);
</script></body>"""


def drawn_keys(seed):
    draw = random.Random(seed)
    keys = {"stages": draw.choice([2, 4, 8]), "microbatches": draw.choice([4, 8, 16, 32])}
    keys |= {"repeats": draw.choice([1, 2, 4]), "comm": draw.choice([0, 0.05, 0.3])}
    keys |= {name: draw.choice([0.5, 1, 1.35, 2]) for name in ("forward", "input_gradient")}
    return keys | {"weight_gradient": draw.choice([0.7, 1]), "head": draw.choice([0, 0.25, 1])}


def figures(name, keys):
    """Return repeats, makespan, bubble in per cent and microbatches held, by the simulator."""
    repeats = SCHEDULES[name].repeats_for(keys["repeats"])
    table = load_schedule(name, keys["stages"], keys["microbatches"], repeats)
    i, w = keys["input_gradient"] / repeats, keys["weight_gradient"] / repeats
    costs = Costs(keys["forward"] / repeats, i + w, i, w, keys["comm"], keys["head"])
    run = simulate(table, costs)
    held = run.peak_in_flight.max() / repeats
    return [repeats, run.makespan, 100 * run.bubble_fraction, held]


def test_tables_are_up_to_date():
    script = runpy.run_path(str(PAGE.parents[1] / "scripts" / "make_playground.py"))
    assert (PAGE / "tables.js").read_text() == script["text"]()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium installed")
def test_the_page_in_a_browser_shows_what_the_simulator_computes(tmp_path):
    drawn = [drawn_keys(seed) for seed in range(20)]
    for name in ("playground.js", "playground.css", "tables.js"):
        shutil.copy(PAGE / name, tmp_path)
    script = SCRIPT.replace("ADDRESSES", json.dumps([urlencode(keys) for keys in drawn]))
    text = (PAGE / "index.html").read_text().replace("</body>", script)
    (tmp_path / "index.html").write_text(text)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    options += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [CHROMIUM, *options, "--dump-dom", (tmp_path / "index.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    title = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1].replace("&amp;", "&")
    seen, address, words, units, refused = json.loads(title)
    for keys, rows in zip(drawn, seen, strict=True):
        assert {row[0] for row in rows} == {*SCHEDULES}
        makespans = [float(row[2]) for row in rows]
        assert makespans == sorted(makespans)
        for name, *cells in rows:
            shown = [float(cell.removesuffix("%")) for cell in cells]
            assert shown == pytest.approx(figures(name, keys), rel=1e-3, abs=0.051), (name, keys)
    last = drawn[-1]
    kept = {key: [str(value)] for key, value in last.items()} | {"schedule": ["zb_v"]}
    assert parse_qs(address[1:]).items() <= kept.items()
    assert "schedule=zb_v" in address
    assert words.startswith(f"python -m maxpipe.schedule zb_v stages={last['stages']} ")
    stages, head = "stages=5: only 2, 4, 8; 4 is shown", "head=9: only 0 to 2; 0 is shown"
    assert refused[:3] == ["4", stages, head]
    assert refused[3].startswith("stage: unknown, only schedule, stages, ")
    assert refused[4:] == [""]  # once a key is changed, which writes a legal address
    assert units == 3 * last["microbatches"] * last["stages"] * 2
