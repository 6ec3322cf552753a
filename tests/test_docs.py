"""Every command in the README and in docs/ is run, page by page.

What is shortened or left out is listed here.
"""

import functools
import inspect
import json
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from helpers.commands import command as command_of
from helpers.commands import exit_code
from helpers.compile_command import tpu_aot
from helpers.documentation import (
    COMMANDS,
    PAGES,
    REPOSITORY,
    TEXT,
    commands,
    fences,
    lay_out,
    own_variants_forgotten,
)
from helpers.training_process import TINY, TINY_MODEL

from maxpipe import train
from maxpipe.config import load
from maxpipe.config.cli import CONFIG_ERROR
from maxpipe.config.options import OPTIONS, SECTIONS
from maxpipe.model.kernels.dot_product import DotProduct
from maxpipe.model.program import ModelProgram
from maxpipe.supervise.council import Status
from maxpipe.supervise.ending import INTERRUPTED, PREEMPTED
from maxpipe.supervise.failure import FAILED
from maxpipe.supervise.process import HUNG, STATUS_FILE
from maxpipe.training.loop import DIVERGED

ENDINGS = PAGES["docs/troubleshooting.md"]
FIRST_RUN = "python -m maxpipe.train configs/base.yml"
# The first run as it is, except for its size and the devices that are there.
SMALL = [
    *TINY_MODEL,
    "steps=2",
    "eval.every=2",
    "eval.batches=1",
    "checkpoint.every=1",
    "mesh.simulated_devices=0",
    "mesh.ici.fsdp=4",
]
# Quicker to compile than stages.
ONE_STAGE = [
    *(word for word in SMALL if not word.startswith(("eval.", "mesh."))),
    "eval.every=0",
    "mesh.simulated_devices=0",
    "mesh.ici.stage=1",
    "mesh.ici.fsdp=8",
]
# Runs that other commands read: the command that makes each, and what makes it small.
RUNS = {
    "runs/mine": [
        next(c for c in commands(PAGES["docs/families.md"]) if "run_name=mine" in c),
        *TINY[len(TINY_MODEL) :],
        *ONE_STAGE[-3:],
        "steps=1",
    ],
    "runs/adapter": [
        next(c for c in commands(PAGES["docs/finetuning.md"]) if "model.lora" in c),
        *ONE_STAGE,
    ],
    "runs/finetune": ["python -m maxpipe.train configs/finetune.yml", *ONE_STAGE],
}
COMPARED = ("dense", "of_experts", "bfloat16", "int8", "fp8")  # runs whose losses a page draws
# Only the configuration is checked: test_documented_runs.py makes the runs, and test_configs.py
# compiles.
CONFIGURATION_ONLY = {"maxpipe.train", "maxpipe.compile"}
MORE_WORDS = {
    "maxpipe.data show": ["--seconds=0.05"],
    "maxpipe.generate": ["--max-tokens=20"],
    "maxpipe.evaluate": ["--help"],  # tasks need lm-eval and a network
    "maxpipe.plan": ["--compile", "0"],
    "maxpipe.tokenize encode": ["--tokenizer=byte"],  # runs before the tokenizer is trained
}
BENCHMARK = "scripts/benchmark"
# With other words, since they measure for minutes or need MaxText; they have tests of their own.
SCRIPTS = {
    f"{BENCHMARK}/compare_maxtext.py": ["--help"],
    f"{BENCHMARK}/faults.py": ["--help"],
    f"{BENCHMARK}/mpmd.py": ["--help"],
    f"{BENCHMARK}/plan_accuracy.py": ["--help"],
    f"{BENCHMARK}/predict_maxtext.py": ["--help"],
    f"{BENCHMARK}/replicas.py": ["--help"],
    f"{BENCHMARK}/run.py": ["--list"],
    f"{BENCHMARK}/tables.py": ["--help"],
    f"{BENCHMARK}/read_weights.py": ["--layers=2", "--width=64", "--vocabulary=320"],
    "examples/gpipe.py": ["--help"],
    "examples/own_model_mpmd.py": ["--help"],
}
# Run by tests of their own, in tests/scripts, tests/examples and below.
ELSEWHERE = {
    "scripts/launch/local.sh",
    "scripts/launch/tpu_vm.sh",
    "sbatch",
    "scripts/follow.py",
    "scripts/generate_docs.py",
    f"{BENCHMARK}/tune_flags.py",
    "examples/same_loss.py",
    "examples/train_in_python.py",
    "begin.py",
    "rates.py",
    "own_model.py",
}
NEEDS_LIBTPU = "memory_shares.py"
# Installing, testing and drawing are the business of other programs.
OTHERS = {"pip", "pytest", "tensorboard", "docker", "mkdocs"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("docs")
    lay_out(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert train.main([*FIRST_RUN.split()[3:], *SMALL]) == 0
        shutil.copytree("runs/base", "runs/longer")  # docs/comparing.md compares it
        (directory / "runs" / "base" / STATUS_FILE).write_text(
            json.dumps(Status("trains")._asdict())
        )
        for name in COMPARED:
            shutil.copytree(directory / "runs" / "base", directory / "runs" / name)
        yield directory


@pytest.fixture(scope="module")
def runs_of_pages(place):

    @functools.cache
    def make(name):
        command, *sizes = RUNS[name]
        assert train.main([*shlex.split(command)[3:], *sizes]) == 0
        assert (place / name / "checkpoints").is_dir()

    return make


def test_readme_has_the_first_run_and_at_most_150_lines():
    assert FIRST_RUN in commands(PAGES["README.md"])
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_pages_in_order_are_those_of_the_overview_and_say_first_what_one_can_do_after_them():
    navigation = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    (in_order,) = (part["In this order"] for part in navigation if "In this order" in part)
    entries = [entry for part in in_order for entry in part.items()]
    row = re.compile(r"^\| (\d+\. )\[(.*?)\]\((\w+\.md)\) \|", re.MULTILINE)
    listed = [(number + title, page) for number, title, page in row.findall(PAGES["docs/index.md"])]
    assert listed == entries
    assert len(entries) <= 10
    for _, page in entries:
        assert PAGES[f"docs/{page}"].split("\n\n")[1].startswith("After this page you "), page


def test_programs_that_are_run_otherwise_are_still_shown():
    programs = {*SCRIPTS, *ELSEWHERE, *OTHERS, *MORE_WORDS, *CONFIGURATION_ONLY}
    assert [name for name in programs if not any(name in command for command in COMMANDS)] == []


@pytest.mark.parametrize("page", sorted({*COMMANDS.values()}))
def test_commands_of_a_page_run(page, place, runs_of_pages, capfd):
    failed = {}
    for command in [command for command, first in reversed(COMMANDS.items()) if first == page]:
        if NEEDS_LIBTPU in command:
            continue  # run by the test below
        for name in RUNS:
            if name in shlex.split(command) or command == RUNS[name][0]:
                runs_of_pages(name)
        if (code := run(shlex.split(command), place)) != 0:
            failed[command] = (code, capfd.readouterr())
    assert failed == {}


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=tpu_aot) for c in COMMANDS if NEEDS_LIBTPU in c]
)
def test_command_for_a_tpu_runs(command, place):
    assert run(shlex.split(command), place) == 0


def run(words, place):
    """Run a command in this process; return its exit code, or what is wrong."""
    named = [word for word in words if re.match(r"(configs|scripts|examples|docs|tests)/", word)]
    if missing := [word for word in named if not (place / word).exists()]:
        return missing
    script = next((word for word in words[:2] if word in SCRIPTS), None)
    if any(word in ELSEWHERE for word in words[:2]) or words[0] in OTHERS:
        return 0
    if script:
        return exit_code(run_script, [script, *SCRIPTS[script]])
    if words[:3] == ["python", "-m", "maxpipe.supervise"] and "--" in words:
        words = words[words.index("--") + 1 :]  # what it would start
    if words[:2] == ["python", "-m"]:
        return exit_code(run_module, words[2], words[3:])
    if words[0] == "python":
        return exit_code(run_script, words[1:])
    return f"say in this file how to run {words[0]}"


def run_module(module, words):
    more = MORE_WORDS.get(f"{module} {words[0]}", MORE_WORDS.get(module, []))
    if module in CONFIGURATION_ONLY and not {"--help", "--print-config"} & {*words}:
        more = ["--print-config"]
    with own_variants_forgotten():
        return command_of(module.removeprefix("maxpipe.")).main([*words, *more])


def run_script(words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.syspath_prepend(str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def test_scripts_of_the_python_page_train(place, capsys):
    for script in ("begin.py", "rates.py"):
        run_script([script, *ONE_STAGE])
    printed = capsys.readouterr().out
    assert re.search(r"^2 \d\.\d+$", printed, re.MULTILINE)
    assert "(1, 3, 320)\n" in printed
    for rate in ("1e-3", "3e-3"):
        assert re.search(
            rf"^learning rate {rate}: last loss \d.* after step 2$", printed, re.MULTILINE
        )
        assert (place / "runs" / f"rate-{rate}" / "checkpoints" / "2").is_dir()


def test_one_way_rule_lists_every_package():
    rule = PAGES["docs/architecture.md"].partition("## Dependencies point one way")[2]
    rooms = set(re.findall(r"\w+", fences("text", rule)[0])) - {"commands"}
    packages = {path.parent.name for path in (REPOSITORY / "maxpipe").glob("*/__init__.py")}
    assert rooms == packages | {"builder"}


def calls(text):
    matches = re.findall(r"^(?:\| `)?(\w+)\(([^)]*)\)", text, re.MULTILINE)
    return {name: arguments.split(", ") for name, arguments in matches}


def test_architecture_has_the_functions_of_the_model():
    section = PAGES["docs/architecture.md"].partition("**ModelProgram**")[2]
    functions = calls(fences("text", section)[0])
    assert functions == {
        name: [*inspect.signature(getattr(ModelProgram, name)).parameters][1:]  # without self
        for name in ("embed", "block", "head_loss", "logits")
    }


def test_extending_has_the_methods_of_an_attention_kernel():
    section = PAGES["docs/extending.md"].partition("## An attention kernel")[2]
    methods = calls(section.partition("\n## ")[0])
    public = [name for name in vars(DotProduct) if not name.startswith("_")]
    assert methods == {
        name: [*inspect.signature(getattr(DotProduct, name)).parameters] for name in public
    }


def test_every_exit_code_has_a_meaning_and_a_remedy():
    table, _, rest = ENDINGS.partition("## How a run ends")[2].partition("## What to do")
    troubleshooting = rest.partition("\n## ")[0]
    for code in (FAILED, CONFIG_ERROR, DIVERGED, PREEMPTED, HUNG, INTERRUPTED, 134):
        assert re.search(rf"^\| {code} \| .+ \| .+ \|$", table, re.MULTILINE), code
        assert f"- **{code}**" in troubleshooting


NAMES_OF_FILES = {"metrics.jsonl", "config.yml", "constraints.txt", "tokenizer.json"}


def test_keys_that_pages_name_exist():
    sections = {key.partition(".")[0] for key in OPTIONS if "." in key}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)[=`]", TEXT)
    keys = {key for key in named if key.partition(".")[0] in sections} - NAMES_OF_FILES
    assert keys - {*OPTIONS, *SECTIONS} == set()


def test_extras_that_are_installed_exist():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"\.\[(\w+)\]", TEXT))
    assert named
    assert named <= set(project["optional-dependencies"])


def test_yaml_of_pages_is_a_configuration(tmp_path):
    shutil.copy(REPOSITORY / "configs" / "base.yml", tmp_path)
    for text in fences("yaml"):
        (tmp_path / "page.yml").write_text(f"base: base.yml\n{text}")
        load(str(tmp_path / "page.yml"))


def test_files_that_pages_name_exist():
    named = re.findall(r"`((?:maxpipe|scripts|examples|configs|tests|docs)/[\w/.-]+)`", TEXT)
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_links_lead_to_files_and_headings():
    broken = []
    for page, text in PAGES.items():
        links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text)
        assert links or page != "README.md"
        for name, heading in links:
            path = (REPOSITORY / page).parent / name if name else REPOSITORY / page
            text = path.read_text(encoding="utf-8") if heading and path.is_file() else ""
            titles = {slug(title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
            if not path.is_file() or (heading and heading not in titles):
                broken.append(f"{page}: {name}#{heading}")
    assert broken == []


def slug(title):
    return re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
