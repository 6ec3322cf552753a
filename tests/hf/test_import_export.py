"""Weights of a folder go into any layout and come out again, byte by byte."""

import errno
import json
import os
import re
from importlib.metadata import version
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from helpers.engines import make_mesh
from helpers.hf_folder import write_folder, write_tokenizer, write_weights
from helpers.hf_parameters import family_of
from helpers.runs import last_words
from helpers.training_process import command

from maxpipe import export as export_command
from maxpipe import train
from maxpipe.builder import build_trainer
from maxpipe.checkpoint.record import Record
from maxpipe.config import ConfigError, load, replace, resolve
from maxpipe.hf.exporter import copy_companions
from maxpipe.hf.families.gemma import Gemma3
from maxpipe.hf.importer import HfWeights
from maxpipe.hf.model_card import model_card
from maxpipe.hf.safetensors import INDEX, read_folder, read_header
from maxpipe.hf.tensors import tensor_rules
from maxpipe.model.program import ModelProgram
from maxpipe.storage.model_folders import LocalFile, LocalFolder
from maxpipe.training.initial_weights import with_progress
from maxpipe.training.mpmd_trainer import MpmdTrainer

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def folder(tmp_path):
    return lambda name="gemma3": write_folder(tmp_path / name, name)


def empty_state(trainer):
    if isinstance(trainer, MpmdTrainer):
        return trainer.init(jax.random.key(0))
    return jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        trainer.abstract_state(),
    )


def config_of(folder, *words):
    names = [f"model.from_hf={folder}", f"init_from=hf:{folder}", "mesh.simulated_devices=0"]
    return resolve(load("base", [*names, *words]), 8)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gemma3", ("mesh.ici.fsdp=2", "mesh.ici.tensor=2", "model.vocab_size=512")),
        ("gemma3", ("mesh.ici.fsdp=4", "pipeline.schedule=zb_v")),  # mpmd
        ("gemma3", ("pipeline.schedule=circular", "pipeline.layers_per_stage=[1,3]")),
        pytest.param("phi3", ("mesh.ici.fsdp=2", "mesh.ici.tensor=2"), marks=pytest.mark.slow),
        pytest.param("mixtral", ("mesh.ici.fsdp=2", "mesh.ici.tensor=2"), marks=pytest.mark.slow),
        ("deepseek_v3", ("mesh.ici.fsdp=2", "mesh.ici.tensor=2", "pipeline.num_repeats=1")),
        # Its MLPs are larger than the largest tensor, and put together on the devices.
        (
            "phi3",
            ("mesh.ici.stage=1", "mesh.ici.fsdp=1", "mesh.ici.data=8", "pipeline.num_repeats=1"),
        ),
    ],
    ids=str,
)
def test_trainer_has_the_weights_of_the_folder_in_any_layout(folder, name, layout):
    path = folder(name)
    config = config_of(path, "mesh.ici.fsdp=-1", *layout)
    trainer = build_trainer(config, make_mesh(config), note=lambda line: None)
    weights, shown = HfWeights(config), []
    reader = with_progress(weights, SimpleNamespace(show=shown.append))
    state = trainer.replace_parameters(empty_state(trainer), reader)
    params = trainer.to_canonical(state).params
    stored = read_folder(LocalFolder(path))
    used = set()
    for rule in tensor_rules(family_of(name), ModelProgram(config.model)):
        leaf = params
        for key in rule.path:
            leaf = leaf[key]
        for layer in range(config.model.stacked_layers if rule.is_layer else 1):
            value = np.asarray(leaf[layer] if rule.is_layer else leaf)
            for tensor_name, index in rule.tensors(layer):
                tensor = stored[tensor_name].read()
                np.testing.assert_array_equal(
                    rule.to_tensor(value[index]).astype(tensor.dtype), rule.own_part(tensor)
                )
                used.add(tensor_name)
    assert used == stored.keys()
    assert not np.asarray(params["embed"]["embedding"])[320:].any()
    assert shown == sorted(shown)
    assert shown[-1] == weights.num_bytes
    if name == "gemma3":  # a layer of an MLP's matrix, in bfloat16
        assert config.model.embed_dim * config.model.mlp_dim * 2 in np.diff(shown)


def test_all_tensors_that_do_not_fit_are_named_at_once(folder):
    path = folder()
    config = config_of(path, "mesh.ici.fsdp=4")
    stored = read_folder(LocalFolder(path)).items()
    tensors = {n: np.array(x.read()) for n, x in stored if "layers.2.mlp.up" not in n}
    tensors["model.norm.weight"] = np.zeros(5, np.float32)
    tensors["model.layers.0.self_attn.k_norm.weight"] = np.zeros(16, np.int32)
    tensors["model.layers.1.self_attn.gate.weight"] = np.zeros(5, np.float32)
    # Further layers, other parts, copies of tied weights and rotary frequencies play no part.
    ignored = ("model.layers.4.eh_proj.weight", "vision_tower.x", "lm_head.weight")
    ignored += ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    tensors |= dict.fromkeys(ignored, np.zeros(1, np.float32))
    (path / INDEX).unlink()
    (path / "1.safetensors").unlink()
    write_weights(path / "0.safetensors", tensors)
    with pytest.raises(ConfigError) as caught:
        HfWeights(config)
    assert [problem.message.removeprefix(f"{path}: ") for problem in caught.value.problems] == [
        "model.layers.2.mlp.up_proj.weight is missing",
        "model.layers.1.self_attn.gate.weight is not part of the model",
        "model.layers.0.self_attn.k_norm.weight is I32; only F32, F16, BF16, MXFP4, FP8 are read",
        "model.norm.weight has shape [5], the model [32]",
    ]


def test_tensor_that_is_not_finite_is_named_with_its_file(folder):
    path, name = folder(), "model.layers.1.mlp.up_proj.weight"
    config = config_of(path, "mesh.ici.fsdp=4")
    file = next(
        path / f
        for f in ("0.safetensors", "1.safetensors")
        if name in read_header(LocalFile(path / f))
    )
    tensors = {n: np.array(x.read()) for n, x in read_header(LocalFile(file)).items()}
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for value in (np.nan, -np.inf):
        tensors[name][3, 5] = value
        write_weights(file, tensors)
        like = jax.ShapeDtypeStruct((4, 32, 48), np.float32, sharding=device)
        with pytest.raises(ConfigError, match=f"{file}: {name} has NaN or inf"):
            HfWeights(config).read(("layers", "mlp", "up"), like)


def test_head_that_is_not_the_table_is_untied_and_said(folder):
    path = folder()
    tied = config_of(path, "mesh.ici.fsdp=4")
    stored = read_folder(LocalFolder(path))
    assert tied.model.tie_embeddings
    head = np.array(stored["model.embed_tokens.weight"].read(), np.float32)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "head.safetensors"
    (path / INDEX).write_text(json.dumps(index))
    for factor in (1, 2):
        write_weights(path / "head.safetensors", {"lm_head.weight": factor * head})
        config = config_of(path, "mesh.ici.fsdp=4")
        assert config.model.tie_embeddings == (factor == 1)
        said = any("lm_head.weight is not the emb" in line for line in HfWeights(config).describe())
        assert said == (factor == 2)
    with pytest.raises(ConfigError, match=r"model\.tie_embeddings=false"):
        HfWeights(tied)


def test_run_from_a_folder_is_exported_byte_by_byte(folder, tmp_path, capsys, monkeypatch):
    path = folder()
    words = [word for word in command(tmp_path / "runs")[1:] if not word.startswith("model.")]
    words += [f"model.from_hf={path}", f"init_from=hf:{path}", "steps=1"]
    words += ["optimizer.learning_rate=0", "optimizer.weight_decay=0", "mesh.ici.fsdp=4"]
    words += ["mesh.simulated_devices=0", f"data.tokenizer=hf:{path}"]
    assert train.main([command("")[0], *words]) == 0
    assert re.search(f"init_from   {path}: 0.[1-9]+ MB in ", capsys.readouterr().out)
    target = tmp_path / "exported"
    arguments = [str(tmp_path / "runs" / "base"), "--hf", str(target), "--dtype", "bfloat16"]
    assert export_command.main([*arguments, "--file-size", "0.00005"]) == 0
    before, after = read_folder(LocalFolder(path)), read_folder(LocalFolder(target))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert after[name].read().tobytes() == tensor.read().tobytes(), name
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 1
    written = json.loads((target / "config.json").read_text())
    assert (written["eos_token_id"], written["dtype"]) == ([2, 7], "bfloat16")
    assert Gemma3().model(written) == Gemma3().model(json.loads((path / "config.json").read_text()))
    assert (target / "generation_config.json").exists()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (path / name).read_bytes()
    kept = tmp_path / "runs" / "base" / "tokenizer"
    assert {file.name for file in kept.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    card = (target / "README.md").read_text()
    assert "| training | 1 steps of " in card
    assert f"trained with maxpipe {version('maxpipe')}." in card
    assert "import AutoModelForCausalLM, AutoTokenizer" in card
    assert str(tmp_path) not in card
    # The same parameters in one file
    file = tmp_path / "plain.safetensors"
    arguments[1:3] = ["--safetensors", str(file)]
    assert export_command.main(arguments) == 0
    plain = read_header(LocalFile(file))
    embedding = before["model.embed_tokens.weight"].read()
    assert plain["embed.embedding"].read().tobytes() == embedding.tobytes()
    down = [before[f"model.layers.{i}.mlp.down_proj.weight"].read().T for i in range(4)]
    np.testing.assert_array_equal(plain["layers.mlp.down"].read(), np.stack(down))
    # What cannot be written is said, and the disk's room is taken before it is mapped.
    arguments[1:3] = ["--hf", str(tmp_path / "full")]
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(os, "posix_fallocate", Mock(side_effect=full))
        with pytest.raises(SystemExit):
            export_command.main(arguments)
    assert "full: No space left on device" in capsys.readouterr().err
    # Nothing half done remains, and what exists is not touched.
    names = {"gemma3", "runs", "exported", "plain.safetensors"}
    assert {entry.name for entry in tmp_path.iterdir()} == names
    for flag, there in (("--safetensors", file), ("--hf", target)):
        arguments[1:3] = [flag, str(there)]
        with pytest.raises(SystemExit):
            export_command.main(arguments)
        assert f"{there} exists; name a new" in capsys.readouterr().err
    # The checkpoint wins over the folder at the next start.
    assert train.main(last_words([command("")[0], *words, "steps=2"])) == 0
    said = f"init_from=hf:{path} is not read: the run continues"
    assert said in capsys.readouterr().out


def test_export_has_the_tokenizer_that_the_run_was_trained_with(tmp_path):
    origin = tmp_path / "origin"
    imported = write_tokenizer(origin)
    (origin / "vocab.json").write_text("{}")
    (origin / "chat_template.jinja").write_text("{{ messages }}")
    whole = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "vocab.json"}
    for letters, name, expected in (
        ("abc", "tokenizer.json", whole),
        ("abcd", "own.json", {"tokenizer.json", "tokenizer_config.json"}),
        ("", "", whole),  # data.tokenizer=byte
    ):
        (target := tmp_path / f"target of {letters}").mkdir()
        companions = []
        if letters:
            file = write_tokenizer(tmp_path / f"run of {letters}", letters)
            own = file.rename(file.with_name(name))
            companions = [own, file.with_name("tokenizer_config.json")]
        copy_companions(target, companions, origin)
        assert {file.name for file in target.iterdir()} == expected
        trained_with = companions[0] if companions else imported
        assert (target / "tokenizer.json").read_bytes() == trained_with.read_bytes()


def test_card_says_what_the_run_says_about_itself():
    facts = {"steps": [200], "model_type": "llama", "dtype": "float32", "size": 7, "version": ""}
    facts |= {"has_tokenizer": False, "end_of_turn": "", "learning_rate": "0.001"}
    config, record = resolve(load("base", []), 4), Record(200, {}, {})
    card = model_card(config, record, **facts)
    assert "AutoTokenizer" not in card
    assert "evaluation loss" not in card
    for text in (
        "trained with maxpipe.",
        "200 steps of 2,048 tokens from random weights",
        "0.001 |",
    ):
        assert text in card
    mixture = [{"source": "text", "weight": 1}, {"source": "jsonl", "weight": 3}]
    keys = {"data.mixture": mixture, "data.mixture_changes": [[9, 1, 1]]}
    keys |= {"data.batch_ramp": [[0, 4], [100, 16]], "init_from": "run:runs/base"}
    card = model_card(replace(config, **keys), record, **facts)
    assert (
        "| data | 0.25 text + 0.75 jsonl, after step 9 0.5 text + 0.5 jsonl by documents |" in card
    )
    assert "200 steps with 256,000 tokens in all from" in card
    assert "from the weights of another run" in card
