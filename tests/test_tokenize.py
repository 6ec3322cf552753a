"""`maxpipe.tokenize`: tokenizers of any size, and token files that train like the texts."""

import json

import numpy as np
import pytest
from helpers.documents import all_of

from maxpipe import tokenize
from maxpipe.config.sections import DataConfig
from maxpipe.data import encoding
from maxpipe.data.corpus import find_corpus
from maxpipe.data.documents import EncodedDocuments, open_documents
from maxpipe.data.tokenizers import load_tokenizer

TEXTS = [
    "the cat sat on the mat\n" * 20,
    "für 5 €, naïve 🙂\n" * 9,
    "",
    "the end <|endoftext|> of it\n",
]


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)
    return tmp_path / "corpus"


def test_corpus_of_a_glob_a_directory_and_files_is_the_same(corpus):
    for words in ([f"{corpus}/*.txt"], [str(corpus)], [f"{corpus}/{i}.txt" for i in (3, 1, 0, 2)]):
        assert all_of(find_corpus(words).open()) == [text for text in TEXTS if text]


@pytest.fixture
def trained(corpus, tmp_path):
    out = tmp_path / "made" / "tokenizer.json"
    words = ["train", f"{corpus}/*.txt", "--vocab-size", "300", "--out", str(out)]
    assert tokenize.main(words) == 0
    return str(out)


def test_train_makes_a_tokenizer_of_the_size_that_gives_every_text_back(corpus, tmp_path):
    for size in ["257", "260", "0.3k"]:
        out = tmp_path / size / "tokenizer.json"
        words = ["train", f"{corpus}/*.txt", "--vocab-size", size, "--out", str(out)]
        assert tokenize.main(words) == 0
        tokenizer = load_tokenizer(str(out))
        assert tokenizer.vocab_size == {"0.3k": 300}.get(size) or int(size)
        for text in [*TEXTS[:2], "never seen: \t\0 ÿ 漢字", "  two  spaces "]:
            assert tokenizer.decode(tokenizer.encode(text)) == text
            assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode())
        assert tokenizer.decode([tokenizer.eos_id]) == ""
        assert json.loads(out.with_name("tokenizer_config.json").read_text())["eos_token"]


def test_train_on_little_text_says_how_many_tokens_there_are(corpus, tmp_path, capsys):
    out = tmp_path / "my texts" / "tokenizer.json"
    assert tokenize.main(["train", str(corpus), "--vocab-size=8k", f"--out={out}"]) == 0
    size = load_tokenizer(str(out)).vocab_size
    printed = capsys.readouterr().out
    assert f"the texts give {size} tokens, not 8,000: give more of them" in printed
    assert f"train with 'data.tokenizer={out}' model.vocab_size={size}\n" in printed


def encode(corpus, tokenizer, out, *words):
    flags = ["--tokenizer", str(tokenizer), "--out", str(out), *words]
    return tokenize.main(["encode", str(corpus), *flags])


def ids_of(source, path, tokenizer):
    config = DataConfig(source=source, path=str(path), tokenizer=tokenizer, eval_fraction=0.0)
    loaded = load_tokenizer(tokenizer)
    documents = EncodedDocuments(open_documents(config, "train"), loaded, loaded.vocab_size)
    return [documents[i].ids.tolist() for i in range(len(documents))]


@pytest.mark.parametrize(
    ("workers", "part_bytes", "num_files"), [(1, 300, 3), (2, 300, 3), (1, 1 << 20, 1)]
)
def test_encode_gives_the_tokens_that_a_run_reads_from_the_texts(
    workers, part_bytes, num_files, corpus, trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(encoding, "PART_BYTES", part_bytes)
    assert encode(corpus, trained, tmp_path / "tokens", f"--workers={workers}") == 0
    assert len([*(tmp_path / "tokens").glob("part-*.bin")]) == num_files
    # Also with the text of the special token in a document, which ends none.
    expected = ids_of("text", corpus, trained)
    assert ids_of("token_bin", tmp_path / "tokens", trained) == expected
    assert len(expected) == 3
    assert "left out" not in capsys.readouterr().err  # its own record is not


def test_encode_of_one_text_cuts_it_as_the_run_of_that_sequence_length(tmp_path, capsys):
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line {i}\n" for i in range(20_000)))
    words = ("--sequence-length=512", "--workers=1")
    assert encode(path, "byte", tmp_path / "tokens", *words) == 0
    assert "train with data.source=token_bin" in (printed := capsys.readouterr().out)
    assert printed.endswith(" data.sequence_length=512\n")
    run = DataConfig(source="text", path=str(path), sequence_length=512)
    documents = [open_documents(run, split) for split in ("train", "eval")]
    decode = load_tokenizer("byte").decode
    texts = [decode(ids) for ids in ids_of("token_bin", tmp_path / "tokens", "byte")]
    assert sorted(texts) == sorted(text for split in documents for text in split)
    assert encode(path, "byte", tmp_path / "tokens", *words) == 0
    with pytest.raises(SystemExit):
        encode(path, "byte", tmp_path / "tokens")
    assert "which differs in sequence_length: choose" in capsys.readouterr().err


def test_encode_after_a_bad_text_goes_on_without_it(corpus, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(encoding, "PART_BYTES", 300)
    out = tmp_path / "tokens"
    whole = ids_of("text", corpus, trained)
    (corpus / "3.txt").write_bytes(b"\xff" * 28)
    with pytest.raises(SystemExit) as end:
        encode(corpus, trained, out, "--workers=1")
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"FILES: {corpus}/3.txt is not UTF-8 text: byte 0" in error
    assert "--on-bad-document: skip leaves such texts out" in error
    assert encode(corpus, trained, out, "--on-bad-document=skip") == 0
    assert "2 of 3 files are there already" in capsys.readouterr().out
    assert ids_of("token_bin", out, trained) == whole[:2]
    # The part of that text has no tokens, and is not tried again.
    assert encode(corpus, trained, out) == 0
    assert "3 of 3 files are there already" in capsys.readouterr().out


def test_tokenize_with_bad_words_ends_with_2_and_one_line(trained, tmp_path, capsys):
    for name in ("a.jsonl", "b.txt", "d/d.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for words, message in [
        (["train", "{}/corpus", "--vocab-size=256"], "--vocab-size: expected a whole number of at"),
        (["train", "{}/corpus", "--vocab-size=1k", "--out={}/made/tokenizer.json"], "--out: "),
        (["train", "{}/corpus", "--vocab-size=1k", "--out={}/x.model"], "must end in .json"),
        (["encode", "{}/corpus", "--tokenizer=byte", "--out=s3://b/t"], "--out: s3://b/t is a URL"),
        (["train", "{}/none", "--vocab-size=1k", "--out={}/x.json"], "FILES: no file at"),
        (["train", "{}/?.*", "--vocab-size=1k", "--out={}/x.json"], "FILES: are of several kinds"),
        (["train", "{}/d/", "--vocab-size=1k", "--out={}/x.json"], "holds token ids already"),
        (["encode", "{}/corpus", "--tokenizer=none.json", "--out={}/t"], "--tokenizer: "),
        (["encode", "{}/corpus", "--tokenizer=byte", "--out={}/corpus"], "--out: "),
        (["encode", "{}/corpus", "--tokenizer=byte", "--out={}/t", "--workers=0"], "--workers: "),
    ]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            tokenize.main([word.format(tmp_path) for word in words])
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.endswith("1 problem found\n")
        assert not (tmp_path / "t").exists()


def test_encode_into_the_tokens_of_another_tokenizer_or_text_is_refused(
    corpus, trained, tmp_path, capsys
):
    out = tmp_path / "tokens"
    assert encode(corpus, trained, out) == 0
    for change, name in ((lambda: "byte", "tokenizer"), (lambda: trained, "contents")):
        with pytest.raises(SystemExit):
            encode(corpus, change(), out)
        assert f"which differs in {name}: choose another" in capsys.readouterr().err
        (corpus / "0.txt").write_text(TEXTS[0].replace("cat", "dog"))
    assert np.fromfile(out / "part-00000.bin", "<u2")[-1] == load_tokenizer(trained).eos_id
