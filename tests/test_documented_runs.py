"""Every training that the README and docs/ show begins: two steps, an evaluation and a checkpoint.

Sizes are changed, but none that a command gives, except where it is of a model or a slice that no
laptop holds. The reader's files in /data are files of the test, and `s3://` is a server of its own.
No command is left out.
"""

import json
import os
import re
import shlex
import string
import subprocess
import sys

import pytest
from helpers.documentation import COMMANDS, lay_out
from helpers.hf_folder import write_tokenizer
from helpers.megatron import write_indexed
from helpers.runs import checkpoints, losses, rows
from helpers.training_process import TINY_MODEL

TRAIN = "python -m maxpipe.train "
PRINTS = ("--help", "--print-config")
LOCAL = "scripts/launch/local.sh "  # two processes
SUPERVISED = f"python -m maxpipe.supervise -- {TRAIN}"
RUNS = [
    command
    for command in COMMANDS
    if command.startswith((TRAIN, LOCAL, SUPERVISED))
    and not any(word in command for word in PRINTS)
]
# Left out of a command that gives the key itself.
SMALL = [*TINY_MODEL, "eval.every=2", "eval.batches=1", "checkpoint.every=2"]
# What has to be small for a model or a slice that does not fit a laptop; layers stay.
LAPTOP = [
    "mesh.simulated_devices=8",
    "mesh.ici.fsdp=-1",
    "model.head_dim=8",
    "model.vocab_size=320",
    "model.unpadded_vocab_size=-1",
    "data.sequence_length=16",
    "data.global_batch_size=32",
]
# Configurations of such models: a preset, and what maxpipe.plan writes for one.
LARGE = ("llama3-8b", "configs/models/llama3-8b.yml", "llama.yml")
# Commands that take the shape of the model from elsewhere, or have heads of another kind.
OTHER_SHAPES = ("base_model=hf:", "model.mla.")


def small_words(command):
    words = shlex.split(command)
    sizes = SMALL
    if any(word in LARGE for word in words):
        sizes = [*SMALL, *LAPTOP]
    elif "base_model=hf:" in command:
        sizes = SMALL[len(TINY_MODEL) :]
    elif "model.mla." in command:
        sizes = [word for word in SMALL if "num_kv_heads" not in word]
    given = {word.partition("=")[0] for word in words}
    return [word for word in sizes if word.partition("=")[0] not in given] + ["stop_after=2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with the repository's files and those that the commands read."""
    pytest.importorskip("pyarrow.parquet", reason="needs the extra `data`")
    import pyarrow

    directory = tmp_path_factory.mktemp("runs")
    lay_out(directory)
    text = (directory / "README.md").read_text(encoding="utf-8")
    (directory / "input.txt").write_text(text, encoding="utf-8")
    write_tokenizer(directory / "data", string.printable)
    turns = [("user", "ab"), ("assistant", "cab"), ("user", "b"), ("assistant", "bac")]
    talk = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (directory / "data" / "chats").mkdir()
    (directory / "data" / "chats" / "a.jsonl").write_text((json.dumps(talk) + "\n") * 100)
    # Without marks, as Qwen2.5's own.
    (directory / "models" / "Qwen2.5-7B" / "chat_template.jinja").write_text(
        "{%- if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
        "{% endif %}{%- for m in messages %}"
        "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    write_indexed(directory / "data" / "web_text_document", [[[*range(2, 60)]]] * 100)
    for folder in ("base_data", "fineweb/sample/10BT"):
        (shards := directory / "data" / folder).mkdir(parents=True)
        texts = pyarrow.table({"text": text.split("\n\n")})
        pyarrow.parquet.write_table(texts, shards / "0.parquet")
    for i, part in enumerate(text.split("\n## ")):
        (directory / "data" / f"{i}.txt").write_text(part, encoding="utf-8")
    for plan in (c for c in COMMANDS if "--write best.yml" in c or "--write llama.yml" in c):
        run(directory, [*shlex.split(plan), "--no-compile"])
    for name in ("train", "encode"):
        (tokenize,) = (c for c in COMMANDS if c.startswith(f"python -m maxpipe.tokenize {name} "))
        run(directory, shlex.split(tokenize))
    # Others start from its weights.
    run(directory, [*shlex.split(TRAIN), "configs/base.yml", *SMALL, "stop_after=2"])
    return directory


def run(directory, words):
    environment = os.environ | {"PYTHONPATH": str(directory), "PYTHON": sys.executable}
    del environment["JAX_NUM_CPU_DEVICES"]  # set for the tests' own process
    done = subprocess.run(
        [sys.executable if word == "python" else word for word in words],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_trainings_are_shown_on_many_pages_and_with_every_size_that_is_made_small():
    assert len(RUNS) >= 25
    assert len({COMMANDS[command] for command in RUNS}) >= 10
    assert [name for name in (*LARGE, *OTHER_SHAPES) if name not in " ".join(RUNS)] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS, ids=lambda command: f"{COMMANDS[command]}:{command}")
def test_documented_training_begins(command, place, tmp_path, request):
    if "s3://" in command:
        bucket = re.search(r"s3://(\w+)", command)[1]
        request.getfixturevalue("s3").create_bucket(Bucket=bucket)
    # The reader's files are in /data.
    words = [word.replace("=/data/", f"={place}/data/") for word in shlex.split(command)]
    end = words.index("--sweep") if "--sweep" in words else len(words)  # values of a sweep are last
    small = [*small_words(command), f"output_dir={tmp_path}"]
    printed = run(place, [*words[:end], *small, *words[end:]])
    roots = [*tmp_path.iterdir()]
    assert len(roots) == (4 if "--sweep" in words else 1)
    for root in roots:
        assert sorted(losses(root)) == [1, 2]
        if "eval.every=" not in command:
            assert any("eval_loss" in row for row in rows(root)), rows(root)
        assert checkpoints(root) == ([] if "checkpoint.every=0" in words else [2])
    if "--sweep" not in words:
        assert re.match(r"done: 2 steps|stopped after step 2 of \d+ ", printed.splitlines()[-1])
