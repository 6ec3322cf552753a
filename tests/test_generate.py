"""The command: text on the terminal, and errors of bad input."""

import json

import pytest
from helpers.commands import exit_code
from helpers.compile_command import tpu_aot
from helpers.training_process import command

from maxpipe import export, train
from maxpipe.generate import __main__ as cli
from maxpipe.generate import model

ALONE = (
    *("mesh.simulated_devices=0", "mesh.ici.stage=1", "mesh.ici.fsdp=8"),
    *("pipeline.num_repeats=1", "model.num_layers=1", "steps=1"),
)
LENGTH = 16
_, needs_libtpu = tpu_aot


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    assert train.main(command(directory, *ALONE)) == 0
    return directory / "base"


def call(capsys, run_dir, *words, prompt="def "):
    capsys.readouterr()
    code = exit_code(cli.main, [str(run_dir), f"--prompt={prompt}", *words])
    return code, *capsys.readouterr()


def test_command_output_continues_prompt_and_depends_on_seed(run_dir, capsys):
    words = "--max-tokens=30", "--temperature=2"
    first, again, other = (call(capsys, run_dir, *words, f"--seed={seed}") for seed in (0, 0, 1))
    assert call(capsys, run_dir, *words, prompt="a\udcff")[1].startswith("a\ufffd")  # not UTF-8
    assert first[0] == 0
    assert first[1].startswith("def ")
    assert first == again
    assert first[1] != other[1]


def test_command_prints_token_by_token_and_ends_at_stops(run_dir, capsys, monkeypatch):
    seen = []

    def tokens(*arguments, max_tokens, **options):
        for token in (*b"ab. cd", 257, *b"after the end of the document"):
            seen.append(capsys.readouterr().out)
            yield token

    monkeypatch.setattr(model, "generate", tokens)
    assert call(capsys, run_dir)[:2] == (0, "\n")
    assert seen == ["def ", "a", "b", ".", " ", "c", "d"]
    seen.clear()
    assert call(capsys, run_dir, "--stop=. ")[:2] == (0, " \n")
    seen.clear()
    assert call(capsys, run_dir, f"--stop-token={ord('.')}")[:2] == (0, "\n")
    assert seen == ["def ", "a", "b"]


def test_export_of_a_run_that_was_not_imported_says_where_texts_end(run_dir, tmp_path):
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    assert export.main([str(run_dir), "--hf", str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == ids
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {name: written[name] for name in ids} == ids


def test_command_ctrl_c_exits_with_130(run_dir, capsys, monkeypatch):
    def tokens(*arguments, **options):
        yield ord("a")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "generate", tokens)
    assert call(capsys, run_dir) == (130, "def a", "\nstopped by Ctrl-C\n")


def test_command_bad_input_exits_with_2_and_reason(run_dir, capsys):
    for words, prompt, message in [
        ((), "", "--prompt: is empty"),
        ((), "x" * LENGTH, f"--prompt: has {LENGTH + 1} tokens, and the model has learned"),
        (("--step=7",), "a", "--step: 7 is not saved in"),
        (("--tokenizer=/nowhere.json",), "a", "--tokenizer: '/nowhere.json' is neither"),
        (("--stop-token=1000",), "a", "--stop-token: the model has no token 1000; its ids are 0"),
        (("--top-p=2",), "a", "--top-p: expected a number above 0, and at most 1"),
        (("--max-tokens=many",), "a", "argument --max-tokens: invalid int value: 'many'"),
    ]:
        code, out, error = call(capsys, run_dir, *words, prompt=prompt)
        assert (code, out) == (2, "")
        assert message in error
