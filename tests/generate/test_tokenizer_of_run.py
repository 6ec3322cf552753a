"""A run that was moved generates with its own copy of the tokenizer."""

import shutil

import pytest
import tokenizers

from maxpipe.checkpoint.mirror import Mirror
from maxpipe.checkpoint.steps import StepsDirectory
from maxpipe.config import Config, ConfigError, replace
from maxpipe.data.fingerprint import tokenizer_digest
from maxpipe.generate.text import find_tokenizer, read_prompt
from maxpipe.storage.object_store import open_store
from maxpipe.training.run_directory import RunDirectory


def save_tokenizer(directory, letters):
    directory.mkdir(exist_ok=True)
    vocabulary = {token: i for i, token in enumerate(["</s>", *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.save(str(directory / "own.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return str(directory / "own.json")


@pytest.fixture
def config(tmp_path):
    path = save_tokenizer(tmp_path / "tokenizers", "abc")
    return replace(Config(), **{"output_dir": str(tmp_path / "runs"), "data.tokenizer": path})


@pytest.fixture
def meta(config):
    return {"fingerprint": {"tokenizer": tokenizer_digest(config.data.tokenizer)}}


def keep(config):
    directory = RunDirectory(config)
    directory.claim()
    return directory.root


def test_run_generates_with_its_copy_wherever_it_is(config, meta, tmp_path, capsys):
    root = keep(config).rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "tokenizers")
    store = StepsDirectory(root / "checkpoints")
    assert find_tokenizer(None, config, meta, store).encode("cab").tolist() == [3, 1, 2]
    save_tokenizer(tmp_path / "tokenizers", "bca")  # another in its place
    assert find_tokenizer(None, config, meta, store).encode("abc").tolist() == [1, 2, 3]
    shutil.rmtree(root / "tokenizer")
    assert find_tokenizer(None, config, meta, store).encode("abc").tolist() == [3, 1, 2]
    assert "is not the tokenizer that the run was trained with" in capsys.readouterr().err


def test_run_without_a_copy_takes_the_original_or_says_what_is_missing(config, tmp_path):
    store = StepsDirectory(tmp_path / "runs" / "base" / "checkpoints")
    assert find_tokenizer(None, config, {}, store).encode("a").tolist() == [1]
    gone = replace(config, **{"data.tokenizer": str(tmp_path / "gone.json")})
    with pytest.raises(ConfigError, match="--tokenizer: names the tokenizer of the run"):
        find_tokenizer(None, gone, {}, store)
    assert find_tokenizer(None, Config(), {}, store).vocab_size == 259


def test_mirrored_run_generates_with_its_copy(config, meta, s3, tmp_path):
    s3.create_bucket(Bucket="tokenizer-of-run")
    url = "s3://tokenizer-of-run/base/checkpoints"
    mirror = Mirror(url, open_store(url, "test"))
    # Directories of other programs are passed over, in a run and in its mirror.
    (RunDirectory(config).origin / ".ipynb_checkpoints").mkdir(parents=True)
    RunDirectory(config, mirror).claim()
    s3.put_object(Bucket="tokenizer-of-run", Key="base/tokenizer/.ipynb_checkpoints/a", Body=b"")
    shutil.rmtree(tmp_path / "tokenizers")
    again = Mirror(url, open_store(url, "test"))
    assert find_tokenizer(None, config, meta, again).encode("cab").tolist() == [3, 1, 2]


def test_prompt_with_a_token_that_an_imported_model_lacks_is_refused(config, tmp_path):
    path = tmp_path / "tokenizers" / "own.json"
    stored = tokenizers.Tokenizer.from_file(str(path))
    stored.add_special_tokens(["<image>"])
    stored.save(str(path))
    store = StepsDirectory(tmp_path / "runs" / "base" / "checkpoints")
    small = replace(config, **{"model.vocab_size": 4, "model.unpadded_vocab_size": 4})
    with pytest.raises(ConfigError, match=r"own\.json needs 5 ids, the model has 4"):
        find_tokenizer(None, small, {}, store)
    imported = replace(small, **{"model.from_hf": str(tmp_path)})
    tokenizer = find_tokenizer(None, imported, {}, store)
    assert read_prompt("ab", tokenizer, imported) == [1, 2]
    with pytest.raises(ConfigError, match="--prompt: the model has no token <image>; leave it out"):
        read_prompt("a<image>b", tokenizer, imported)
