"""`python -m maxpipe.data show`."""

import json
import re

import pytest
from helpers.hf_folder import write_byte_pairs

from maxpipe.config.terminal import GREEN, RESET
from maxpipe.data.__main__ import describe_row, main
from maxpipe.data.rows import empty_batch
from maxpipe.data.tokenizers import load_tokenizer

BASE = ["show", "configs/base.yml", "data.eval_fraction=0", "eval.every=0", "--seconds=0.01"]


def test_show_prints_segments_and_speed(tmp_path, capsys):
    for name, text in (("a", "first"), ("b", "second document"), ("c", "3rd")):
        (tmp_path / f"{name}.txt").write_text(text)
    words = ["data.source=text", f"data.path={tmp_path}", "data.shuffle=false", "--rows=1"]
    main([*BASE, *words, "data.sequence_length=24"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "row 0: 24 tokens, 3 segments, 0 of padding",
        "  segment 1, tokens 0-5: 'first'",
        "  segment 2, tokens 6-21: 'second document'",
    ]
    assert "tokens/s with a thread of this process" in lines[4]
    assert lines[5].startswith("packing efficiency 100.0%")
    main([*BASE, *words, "--rows=5", "data.global_batch_size=4"])
    starts = re.findall("^(?:row|batch) .", capsys.readouterr().out, re.MULTILINE)
    assert starts == ["batch 0", *(f"row {i}" for i in range(4)), "batch 1", "row 0"]
    for name in "bc":
        (tmp_path / f"{name}.txt").unlink()
    main([*BASE, *words, "data.sequence_length=24", "data.packing=false"])
    out = capsys.readouterr().out
    assert "row 0: 24 tokens, 1 segments, 18 of padding" in out
    assert "packing efficiency 25.0%" in out
    assert "1.00 segments a row, 6.0 tokens a segment" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["look"], 2, "config error: "),
        (["show", "configs/base.yml", "data.source=text"], 2, "config error: "),
        (["show", "configs/base.yml", "--rows=0"], 2, "argument --rows: "),
        (["--help"], 0, "usage: python -m maxpipe.data show "),
        (["show", "-h"], 0, "and measures the loader. No model is built."),
    ],
)
def test_show_exit_code(words, code, said, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code
    captured = capsys.readouterr()
    assert said in " ".join((captured.err if code else captured.out).split()) + " "


def test_show_marks_what_is_learned_of_a_conversation(tmp_path, capsys):
    talk = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two\nthree"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    words = ["data.source=chat", f"data.path={tmp_path}", "data.chat_template=chatml"]
    main([*BASE, *words, "data.packing=false", "--rows=1"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "segment 1" in line)
    assert line.endswith(
        r": <|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n⟦two\nthree<|im_end|>\n⟧"
    )


def test_described_row_has_the_special_tokens_of_the_chat_template(tmp_path):
    specials = ["<|im_start|>", "<|im_end|>", "</s>"]
    tokenizer = load_tokenizer(str(write_byte_pairs(tmp_path, "a b c", specials, size=300)))
    ids = tokenizer.encode("<|im_start|>a<|im_end|>b")
    batch = empty_batch(1, len(ids) - 1, tokenizer.pad_id)
    batch["tokens"][0], batch["targets"][0] = ids[:-1], ids[1:]
    batch["segment_ids"][0], batch["weights"][0] = 1, [0, 1, 0]
    for colour, learned in ((False, "⟦<|im_end|>⟧"), (True, f"{GREEN}<|im_end|>{RESET}")):
        lines = [*describe_row(batch, 0, tokenizer, colour)]
        assert lines[1] == f"  segment 1, tokens 0-2: <|im_start|>a{learned}b"
