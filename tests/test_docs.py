"""Every command in the README and in docs/ is run, page by page.

What is shortened or left out is listed here.
"""

import inspect
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import asdict

import pytest
from helpers.compile_command import tpu_aot
from helpers.documentation import (
    COMMANDS,
    PAGES,
    REPOSITORY,
    TEXT,
    commands,
    fences,
    inline_commands,
    lay_out,
)
from helpers.training_process import TINY, TINY_MODEL

from maxpipe import evaluate, export, runs, schedule, supervise, tokenize, train
from maxpipe.checkpoint import __main__ as checkpoint
from maxpipe.compile import __main__ as compile_command
from maxpipe.config import load
from maxpipe.config.cli import CONFIG_ERROR
from maxpipe.config.options import OPTIONS, SECTIONS
from maxpipe.data import __main__ as data
from maxpipe.generate import __main__ as generate
from maxpipe.model.kernels.dot_product import DotProduct
from maxpipe.model.program import ModelProgram
from maxpipe.plan import __main__ as plan
from maxpipe.supervision.council import Status
from maxpipe.supervision.failure import FAILED
from maxpipe.supervision.progress import STATUS_FILE
from maxpipe.supervision.signals import INTERRUPTED, PREEMPTED
from maxpipe.supervision.watchdog import HUNG
from maxpipe.training.loop import DIVERGED

OPERATIONS = PAGES["docs/operations.md"]
MAINS = {
    "maxpipe.train": train.main,
    "maxpipe.generate": generate.main,
    "maxpipe.evaluate": evaluate.main,
    "maxpipe.export": export.main,
    "maxpipe.compile": compile_command.main,
    "maxpipe.plan": plan.main,
    "maxpipe.runs": runs.main,
    "maxpipe.tokenize": tokenize.main,
    "maxpipe.schedule": schedule.main,
    "maxpipe.checkpoint": checkpoint.main,
    "maxpipe.data": data.main,
    "maxpipe.supervise": supervise.main,
}
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
# A run from a folder of Hugging Face, which the commands after it export.
IMPORT = next(line for line in commands(PAGES["docs/families.md"]) if "run_name=mine" in line)
IMPORTED_RUN = "runs/mine"
# A run with adapters, likewise.
ADAPTER = next(line for line in commands(PAGES["docs/finetuning.md"]) if "model.lora" in line)
ADAPTED_RUN = "runs/adapter"
FINETUNE = "python -m maxpipe.train configs/finetune.yml"
FINETUNED_RUN = "runs/finetune"
COMPARED = ("dense", "of_experts", "bfloat16", "int8", "fp8")  # runs whose losses a page draws
SMALL_IMPORT = [*TINY[len(TINY_MODEL) :], *SMALL[-2:], "steps=1"]
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
LAUNCH, BENCHMARK = "scripts/launch", "scripts/benchmark"
TPU_VM = f"bash {LAUNCH}/tpu_vm.sh create name --zone z --type v5p-8 --dry-run"
SCRIPTS = {
    f"{LAUNCH}/local.sh": ["bash", f"{LAUNCH}/local.sh", "--dry-run", "2", "configs/base.yml"],
    f"{LAUNCH}/tpu_vm.sh": TPU_VM.split(),
    # Needs MaxText.
    f"{BENCHMARK}/compare_maxtext.py": [
        sys.executable,
        f"{BENCHMARK}/compare_maxtext.py",
        "--help",
    ],
    # Measure for minutes, and have tests of their own.
    f"{BENCHMARK}/faults.py": [sys.executable, f"{BENCHMARK}/faults.py", "--help"],
    f"{BENCHMARK}/mpmd.py": [sys.executable, f"{BENCHMARK}/mpmd.py", "--help"],
    f"{BENCHMARK}/replicas.py": [sys.executable, f"{BENCHMARK}/replicas.py", "--help"],
    f"{BENCHMARK}/run.py": [sys.executable, f"{BENCHMARK}/run.py", "--list"],
    "examples/gpipe.py": [sys.executable, "examples/gpipe.py", "--help"],  # has a test of its own
    # Has a test of its own.
    "examples/train_in_python.py": [
        sys.executable,
        "-m",
        "py_compile",
        "examples/train_in_python.py",
    ],
    # Has a test of its own.
    "examples/own_model_mpmd.py": [sys.executable, "examples/own_model_mpmd.py", "--help"],
    "scripts/generate_docs.py": [sys.executable, "scripts/generate_docs.py", "--check"],
    "sbatch": ["bash", "-n", f"{LAUNCH}/slurm.sbatch"],
}
NEEDS_LIBTPU = "memory_shares.py"
FOLLOW = ("repeats", "executed", "batch")
# Installing, testing and drawing are the business of other programs.
OTHERS = {"pip", "pytest", "tensorboard", "docker", "mkdocs"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Yield a directory with the repository's files, in which the first run has been made."""
    directory = tmp_path_factory.mktemp("docs")
    lay_out(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert train.main([*FIRST_RUN.split()[3:], *SMALL]) == 0
        shutil.copytree("runs/base", "runs/longer")  # docs/comparing.md compares it
        (directory / "runs" / "base" / STATUS_FILE).write_text(json.dumps(asdict(Status("trains"))))
        for name in COMPARED:
            shutil.copytree(directory / "runs" / "base", directory / "runs" / name)
        yield directory


PROGRAMS = sorted(
    [*SCRIPTS, *OTHERS, *MORE_WORDS, *CONFIGURATION_ONLY]
)  # each xdist process has the same order


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_are_run_otherwise_are_still_shown(program):
    assert any(program in command for command in COMMANDS)


@pytest.fixture(scope="module")
def imported(place):
    """Make the run from a folder of Hugging Face."""
    assert train.main([*shlex.split(IMPORT)[3:], *SMALL_IMPORT]) == 0
    assert (place / IMPORTED_RUN / "checkpoints" / "1").is_dir()


@pytest.fixture(scope="module")
def adapted(place):
    """Make the run with adapters."""
    assert train.main([*shlex.split(ADAPTER)[3:], *SMALL]) == 0
    assert (place / ADAPTED_RUN / "checkpoints" / "2").is_dir()


@pytest.fixture(scope="module")
def finetuned(place):
    """Make the run on conversations."""
    assert train.main([*FINETUNE.split()[3:], *SMALL]) == 0


def test_readme_has_the_first_run():
    assert FIRST_RUN in commands(PAGES["README.md"])


def test_readme_has_at_most_150_lines():
    assert len(PAGES["README.md"].splitlines()) <= 150


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            command, id=f"{page}:{command}", marks=tpu_aot if NEEDS_LIBTPU in command else ()
        )
        for command, page in reversed(COMMANDS.items())
    ],
)
def test_command(command, place, capfd, request):
    words = shlex.split(command)
    if command == IMPORT or IMPORTED_RUN in words:
        request.getfixturevalue("imported")
    if ADAPTED_RUN in words:
        request.getfixturevalue("adapted")
    if FINETUNED_RUN in words:
        request.getfixturevalue("finetuned")
    words += ["--seconds=1"] if words[3:4] == ["solve"] else []
    named = [word for word in words if re.match(r"(configs|scripts|examples|docs|tests)/", word)]
    assert [word for word in named if not (place / word).exists()] == []
    if "--import" in words:  # in a process of its own, since it changes the catalogue
        run(sys.executable, *words[1:], *["--print-config"][: words[2] == "maxpipe.train"])
    elif words[:2] == ["python", "-m"]:
        run_module(words[2], words[3:])
    elif script := next((word for word in words[:2] if word in SCRIPTS), None):
        printed = run(*SCRIPTS[script])
        assert "--case" not in words or f"{words[-1]}: " in printed  # a group that is listed
    elif words[1:2] in (["begin.py"], ["rates.py"]):
        pass  # run by test_scripts_of_the_python_page_train
    elif words[:2] == ["python", "scripts/follow.py"]:
        assert words[2] in FOLLOW  # run by tests/scripts/test_follow.py
    elif words[0] == "python":
        run(sys.executable, *words[1:])
    else:
        assert words[0] in OTHERS, f"say in this file how to run: {command}"


def run_module(module, words):
    prints_only = {"--help", "--print-config"} & set(words)
    if module == "maxpipe.supervise" and "--" in words:
        words = [
            sys.executable if word == "python" else word for word in [*words, "--print-config"]
        ]
    more = MORE_WORDS.get(module, MORE_WORDS.get(f"{module} {words[0]}", []))
    if module in CONFIGURATION_ONLY and not prints_only:
        more = ["--print-config"]
    try:
        code = MAINS[module]([*words, *more])
    except SystemExit as end:
        code = end.code
    assert not code


def run(*words):
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "PYTHON": sys.executable}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_inline_code_has_commands_and_fragments_and_names_are_none():
    text = "`maxpipe train base | head`, `maxpipe train`, `pip install`, `python -m maxpipe.plan`"
    text += ", `maxpipe plan llama3-8b ...`, `python scripts/x.py DIR`, `scripts/x.py`, `steps=2`"
    text += ', `python scripts/x.py "CONFIG key=value"`, `pytest -m "not grid"`'
    assert inline_commands(text) == ["maxpipe train base | head", 'pytest -m "not grid"']
    assert commands(text) == ["python -m maxpipe.train base", "pytest -m 'not grid'"]
    assert sum(len(inline_commands(page)) for page in PAGES.values()) >= 25


def test_scripts_of_the_python_page_train(place, monkeypatch, capsys):
    for script in ("begin.py", "rates.py"):
        monkeypatch.setattr(sys, "argv", [script, *SMALL])
        runpy.run_path(script)
    printed = capsys.readouterr().out
    assert re.search(r"^2 \d\.\d+$", printed, re.MULTILINE)
    assert "(1, 3, 320)\n" in printed
    for rate in ("1e-3", "3e-3"):
        assert re.search(
            rf"^learning rate {rate}: last loss \d.* after step 2$", printed, re.MULTILINE
        )
        assert (place / "runs" / f"rate-{rate}" / "checkpoints" / "2").is_dir()


@pytest.mark.parametrize(
    ("key", "heading"),
    [("compile.load", "## Stored executables"), ("compile.cache_dir", "## The compilation cache")],
)
def test_help_readme_and_page_say_whom_to_trust_with_machine_code(key, heading, capsys):
    with pytest.raises(SystemExit):
        train.main(["--help", key])
    (paragraph,) = (text for text in PAGES["README.md"].split("\n\n") if "machine code" in text)
    section = PAGES["docs/compiling.md"].partition(heading)[2].partition("\n## ")[0]
    for text in (capsys.readouterr().out, paragraph, section):
        assert "machine code" in text
        assert "trust" in text
    assert {"compile.load": "compile.load", "compile.cache_dir": "compile_cache"}[key] in paragraph


def test_one_way_rule_lists_every_package():
    rule = PAGES["docs/architecture.md"].partition("## Dependencies point one way")[2]
    rooms = set(re.findall(r"\w+", fences("text", rule)[0])) - {"commands"}
    packages = {path.parent.name for path in (REPOSITORY / "maxpipe").glob("*/__init__.py")}
    assert rooms == packages | {"builder"}


def calls(text):
    """Return name -> arguments of the calls that begin a line of code or a table's row."""
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


@pytest.mark.parametrize(
    "code", [FAILED, CONFIG_ERROR, DIVERGED, PREEMPTED, HUNG, INTERRUPTED, 134]
)
def test_every_exit_code_has_a_meaning_and_a_remedy(code):
    table, _, rest = OPERATIONS.partition("## How a run ends")[2].partition("## Troubleshooting")
    troubleshooting = rest.partition("\n## ")[0]
    assert re.search(rf"^\| {code} \| .+ \| .+ \|$", table, re.MULTILINE)
    assert f"- **{code}**" in troubleshooting


NAMES_OF_FILES = {"metrics.jsonl", "config.yml", "constraints.txt", "tokenizer.json"}


@pytest.mark.parametrize("page", PAGES)
def test_keys_that_a_page_names_exist(page):
    sections = {key.partition(".")[0] for key in OPTIONS if "." in key}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)[=`]", PAGES[page])
    keys = {key for key in named if key.partition(".")[0] in sections} - NAMES_OF_FILES
    assert keys <= {*OPTIONS, *SECTIONS}


def test_extras_that_are_installed_exist():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"\.\[(\w+)\]", TEXT))
    assert named
    assert named <= set(project["optional-dependencies"])


@pytest.mark.parametrize("text", fences("yaml"))
def test_yaml_is_a_configuration(text, tmp_path):
    shutil.copy(REPOSITORY / "configs" / "base.yml", tmp_path)
    (tmp_path / "page.yml").write_text(f"base: base.yml\n{text}")
    load(str(tmp_path / "page.yml"))


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    named = set(
        re.findall(r"`((?:maxpipe|scripts|examples|configs|tests|docs)/[\w/.-]+)`", PAGES[page])
    )
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_files_and_headings(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", PAGES[page])
    assert links or page != "README.md"
    for name, heading in links:
        path = (REPOSITORY / page).parent / name if name else REPOSITORY / page
        assert path.is_file(), name
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {slug(title) for title in titles}, f"{name}#{heading}"


def slug(title):
    """Return the anchor of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
