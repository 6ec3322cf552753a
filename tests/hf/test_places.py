"""Models in an object store and on the hub: the same weights as from a directory."""

import json
import re
import shutil
import sys
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from helpers.hf_folder import write_folder
from helpers.training_process import command

from maxpipe import export as export_command
from maxpipe import train
from maxpipe.config import ConfigError, load, resolve
from maxpipe.data.tokenizers import load_tokenizer
from maxpipe.hf.importer import HfWeights
from maxpipe.hf.safetensors import INDEX, read_folder
from maxpipe.storage import model_folders
from maxpipe.storage.model_folders import LocalFolder, StoreFile

pytestmark = pytest.mark.usefixtures("own_folder")
ONE_STAGE = ("mesh.ici.stage=1", "mesh.ici.fsdp=8", "pipeline.num_repeats=1")
MODEL = "s3://models/tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("models") / "gemma3")


@pytest.fixture
def stored(s3, folder, request):
    s3.create_bucket(Bucket="models")
    for file in folder.iterdir():
        s3.upload_file(str(file), "models", f"tiny/{file.name}")
    yield MODEL
    for entry in s3.list_objects(Bucket="models").get("Contents", ()):
        s3.delete_object(Bucket="models", Key=entry["Key"])
    s3.delete_bucket(Bucket="models")


def weights_of(place):
    words = (f"model.from_hf={place}", f"init_from=hf:{place}", "mesh.simulated_devices=0")
    return HfWeights(resolve(load("base", [*words, *ONE_STAGE]), 8))


def read(weights, path, shape, *axes):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return weights.read(path, jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding))


LEAVES = [
    (("embed", "embedding"), (320, 32), ("b", "a")),
    (("layers", "attention", "query"), (4, 32, 4, 16), (None, "a", "b")),
    (("layers", "mlp", "down"), (4, 48, 32), ("b", None, "a")),
    (("layers", "mlp_norm", "scale"), (4, 32), ()),
]


def test_store_gives_the_weights_of_the_directory_and_reads_each_byte_once(
    stored, folder, monkeypatch
):
    monkeypatch.setattr(model_folders, "REQUEST", 300)
    monkeypatch.setattr(StoreFile, "block_size", 1200)
    ranges = []
    read_range = StoreFile.read

    def read_and_note(file, start, stop):
        ranges.append((str(file), start, stop))
        return read_range(file, start, stop)

    monkeypatch.setattr(StoreFile, "read", read_and_note)
    remote, local = weights_of(stored), weights_of(folder)
    ranges.clear()
    for path, shape, axes in LEAVES:
        expected = read(local, path, shape, *axes)
        np.testing.assert_array_equal(read(remote, path, shape, *axes), expected)
    assert max(stop - start for _, start, stop in ranges) <= 1200
    positions = [(name, i) for name, start, stop in ranges for i in range(start, stop)]
    assert len(positions) == len({*positions})
    names = ("embed_tokens", "q_proj", "down_proj", "pre_feedforward_layernorm")
    tensors = read_folder(LocalFolder(folder)).items()
    assert len(positions) == sum(t.num_bytes for n, t in tensors if any(x in n for x in names))


@pytest.mark.slow
def test_run_from_a_store_is_exported_from_a_store(stored, s3, folder, tmp_path, capsys):
    words = [word for word in command(tmp_path / "runs")[1:] if not word.startswith("model.")]
    words += [f"model.from_hf={stored}", f"init_from={stored}", f"data.tokenizer={stored}"]
    words += ["model.vocab_size=384"]  # rows of padding stay in the run
    words += ["steps=1", "optimizer.name=sgd", "optimizer.learning_rate=0", "mesh.ici.fsdp=4"]
    words += ["optimizer.weight_decay=0", "mesh.simulated_devices=0"]
    words += ["checkpoint.mirror=s3://models/runs", f"data.cache_dir={tmp_path / 'cache'}"]
    assert train.main([command("")[0], *words]) == 0
    assert re.search(f"init_from   {stored}: 0.[1-9]+ MB in ", capsys.readouterr().out)
    shutil.rmtree(tmp_path / "runs")
    for file in folder.iterdir():
        s3.delete_object(Bucket="models", Key=f"tiny/{file.name}")
    target = tmp_path / "exported"
    arguments = ["s3://models/runs/base", "--hf", str(target), "--dtype", "bfloat16"]
    assert export_command.main(arguments) == 0
    before, after = (read_folder(LocalFolder(path)) for path in (folder, target))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].read().tobytes() == tensor.read().tobytes(), name
    same = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in (*same, "generation_config.json"):
        assert (target / name).read_bytes() == (folder / name).read_bytes()
    written = json.loads((target / "config.json").read_text())
    assert (written["eos_token_id"], written["vocab_size"]) == ([2, 7], 320)


def problem_of(*words):
    with pytest.raises(ConfigError) as caught:
        load("base", [*ONE_STAGE, *words])
    return {problem.key: problem.message for problem in caught.value.problems}


def test_store_that_has_no_model_or_cannot_be_read_is_explained(s3):
    s3.create_bucket(Bucket="empty")
    s3.put_object(Bucket="empty", Key="x/readme.md", Body=b"")
    for place, text in (
        ("s3://empty/x", "there is no s3://empty/x/config.json; give a folder with the files of a"),
        ("s3://nowhere/x", "s3://nowhere/x cannot be read: FileNotFoundError"),
    ):
        assert text in problem_of(f"model.from_hf={place}")["model.from_hf"]
    with pytest.raises(ConfigError, match=r"data\.tokenizer: there is no tokenizer\.json in s3://"):
        load_tokenizer("s3://empty/x")


@pytest.fixture
def hub(tmp_path, monkeypatch, folder):
    """A cache of the library with one model, tiny-org/tiny, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "cache" / "models--tiny-org--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "refs" / "v1").write_text(commit)
    shutil.copytree(folder, model / "snapshots" / commit)
    return model / "snapshots" / commit


def test_model_in_the_cache_of_the_hub_is_read_without_a_network(hub, folder, tmp_path):
    path, shape, axes = LEAVES[1]
    expected = read(weights_of(folder), path, shape, *axes)
    for name in ("tiny-org/tiny", "tiny-org/tiny@v1"):
        weights = weights_of(name)
        assert re.match(f"init_from   {name}: 0.[1-9]+ MB in ", weights.describe()[0])
        np.testing.assert_array_equal(read(weights, path, shape, *axes), expected)
        assert load_tokenizer(f"hf:{name}").eos_id == 1
    (hub / INDEX).unlink()
    assert weights_of(name).num_bytes == weights.num_bytes
    place = tmp_path / "tiny-org" / "tiny"  # a directory of the name counts
    shutil.copytree(folder, place)
    content = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 7}))
    words = [*ONE_STAGE, "model.from_hf=hf:tiny-org/tiny"]
    assert load("base", words).config.model.num_layers == 7


def test_model_that_the_hub_does_not_give_is_explained(hub, monkeypatch):
    absent = problem_of("model.from_hf=hf:tiny-org/other")["model.from_hf"]
    assert absent.startswith("tiny-org/other is not in the cache of this machine, and the hub can")
    assert "`hf download tiny-org/other`, or unset HF_HUB_OFFLINE" in absent
    (hub / "1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"tiny lacks 1\.safetensors, which its index names"):
        weights_of("tiny-org/tiny")
    import huggingface_hub.errors as errors

    class ConnectError(Exception):  # of httpx without a network, which is no OSError
        pass

    for error, text in {
        errors.GatedRepoError: "is gated: accept its terms",
        errors.RepositoryNotFoundError: "is neither a directory here nor",
        errors.RevisionNotFoundError: "names a revision that tiny-org/tiny does not have",
        ConnectError: "from the hub: ConnectError",
    }.items():
        monkeypatch.setattr(
            "huggingface_hub.snapshot_download", Mock(side_effect=error.__new__(error))
        )
        assert text in problem_of("model.from_hf=tiny-org/tiny")["model.from_hf"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = problem_of("model.from_hf=tiny-org/tiny")["model.from_hf"]
    assert "needs huggingface_hub, which is not installed: pip install " in message
