"""Conversations with a model: the template of its run, and where an answer ends."""

import io
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import exit_code
from helpers.engines import canonical_params
from helpers.hf_folder import write_byte_pairs
from helpers.training_process import BASE, TINY_MODEL

import maxpipe
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.config import ConfigError, load, resolve
from maxpipe.data.tokenizers import load_tokenizer
from maxpipe.generate import __main__ as cli
from maxpipe.generate import model
from maxpipe.generate.chat import before
from maxpipe.model.program import ModelProgram
from maxpipe.training.run_directory import RunDirectory

FINETUNE = BASE.with_name("finetune.yml")
SPECIALS = ["<s>", "</s>", "<|end|>"]
MINE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
ONE = [{"role": "user", "content": "One?"}]

TINY = (
    *TINY_MODEL,
    *("steps=1", "eval.every=0", "mesh.simulated_devices=0", "mesh.ici.fsdp=-1"),
    *("model.num_layers=1", "mesh.ici.stage=1", "pipeline.num_repeats=1"),
)


def _save(directory: Path, *words: str) -> Path:
    config = resolve(load(str(FINETUNE), [*TINY, f"output_dir={directory}", *words]), 1)
    run = RunDirectory(config)
    run.claim()
    checkpoints = Checkpointer(run.checkpoints, config.checkpoint)
    state = {"params": canonical_params(ModelProgram(config.model))}
    checkpoints.save(1, state, np.zeros((1, 1), np.int64), {"config": asdict(config)})
    checkpoints.close()
    return Path(run.root)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def own_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own")
    tokenizer = write_byte_pairs(directory, "What does it do?\n", SPECIALS, size=300)
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (directory / "mine.jinja").write_text(MINE)
    words = [f"data.tokenizer={tokenizer}", f"data.chat_template={directory / 'mine.jinja'}"]
    run = _save(directory, *words)
    for file in (tokenizer, directory / "tokenizer_config.json", directory / "mine.jinja"):
        file.unlink()
    return run


def _writes(monkeypatch: pytest.MonkeyPatch, *answers: str | list[int]) -> list[list[int]]:
    """Let the model write answers instead of its own; return a list that the prompts go to."""
    prompts: list[list[int]] = []
    left = [*answers]

    def tokens(config: object, params: object, prompt: list[int], *_: object, **options: object):
        prompts.append([*prompt])
        written = left.pop(0)
        yield from (written.encode() if isinstance(written, str) else written)

    monkeypatch.setattr(model, "generate", tokens)
    return prompts


def _call(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    return exit_code(cli.main, [str(run), *words]), *capsys.readouterr()


def test_answer_follows_the_template_and_ends_with_the_turn(run_dir, capsys, monkeypatch):
    prompts = _writes(monkeypatch, " Yes, <|im_here.\n<|im_end|>\n<|im_start|>user\nmore")
    words = ("--chat", "--prompt=One?", "--system=Be brief.")
    assert _call(capsys, run_dir, *words) == (0, "Yes, <|im_here.\n\n", "")
    assert bytes(prompts[0]).decode() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_long_conversation_forgets_its_oldest_turns_only(run_dir, capsys, monkeypatch):
    prompts = _writes(monkeypatch, *["<|im_end|>"] * 3)
    lines = ["a" * 50, "b" * 50, "c" * 50]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    code, _, error = _call(capsys, run_dir, "--chat", "--system=s")
    assert code == 0
    assert [lines[0] in bytes(prompt).decode() for prompt in prompts] == [True, True, False]
    assert bytes(prompts[2]).startswith(b"<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nb")
    assert error == "(the oldest turns are forgotten: it reads 256 tokens (data.sequence_length))\n"


def test_line_that_cannot_be_answered_is_left_out_at_a_terminal(run_dir, capsys, monkeypatch):
    for is_terminal, code, printed in ((True, 0, "> 1\n> > 2\n> "), (False, 2, "1\n")):
        stdin = io.StringIO(f"One?\n{'a' * 300}\nTwo?\n")
        stdin.isatty = lambda is_terminal=is_terminal: is_terminal
        monkeypatch.setattr("sys.stdin", stdin)
        prompts = _writes(monkeypatch, "1<|im_end|>", "2<|im_end|>")
        *found, error = _call(capsys, run_dir, "--chat")
        assert found == [code, printed]
        assert "the conversation has 3" in error
        assert error.startswith("(this line is left out: ") == is_terminal
        if is_terminal:
            assert bytes(prompts[1]).decode() == bytes(prompts[0]).decode() + (
                "1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
            )


def test_run_keeps_template_and_special_tokens_that_are_gone(own_dir, capsys, monkeypatch):
    assert (own_dir / "tokenizer" / "chat_template.jinja").read_text() == MINE
    tokenizer = load_tokenizer(str(own_dir / "tokenizer" / "tokenizer.json"))
    end = SPECIALS.index("<|end|>")
    prompts = _writes(monkeypatch, [*tokenizer.encode("it"), end, *tokenizer.encode("do")])
    assert maxpipe.load_model(own_dir).chat(ONE) == "it"
    expected = tokenizer.encode("<s>[user] One?<|end|>\n[assistant] ")
    assert prompts == [expected.tolist()]


def test_chat_ends_at_a_stop_and_names_arguments_that_are_wrong(run_dir, monkeypatch):
    loaded = maxpipe.load_model(run_dir)
    _writes(monkeypatch, "Do it now<|im_end|>")
    assert loaded.chat(ONE, stop="it") == "Do it"
    for options, message in [
        ({"messages": []}, "messages: expected a list of them"),
        ({"messages": [{"role": "user"}]}, r"messages: \S*/chat_template\.jinja cannot lay it out"),
        ({"messages": [ONE[0] | {"content": "a" * 300}]}, "messages: the conversation has 3"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            loaded.chat(**{"messages": ONE} | options)


def test_run_without_template_is_refused(tmp_path, own_dir, run_dir, capsys):
    plain = shutil.copytree(run_dir, tmp_path / "plain")
    shutil.rmtree(plain / "tokenizer")  # as in a run of an earlier version
    assert maxpipe.load_model(plain).read_conversation(ONE)
    text = _save(tmp_path, "data.source=synthetic", "data.chat_template=", "run_name=text")
    code, out, error = _call(capsys, text, "--chat", "--prompt=a")
    assert (code, out) == (2, "")
    assert "--chat: the run has no chat template: it was not trained on conv" in error
    with pytest.raises(ConfigError, match="messages: the run has no chat template"):
        maxpipe.load_model(text).chat(ONE)
    assert "--system is for --chat" in _call(capsys, run_dir, "--prompt=a", "--system=b")[2]


def test_text_before_its_end_loses_nothing_else():
    for pieces, end, expected in [
        (["a", "<", "b", "<", ">c"], "<>", "a<b"),
        (["a<", "<", ">"], "<>", "a<"),
        ([" \n", " a ", "b"], "", "a b"),
        (["a", "<"], "<>", "a<"),
        (["\n", "a"], "\n", ""),
    ]:
        assert "".join(before(end, pieces)) == expected
