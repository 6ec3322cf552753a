"""What an export writes besides weights, and when."""

import json
from dataclasses import replace

import pytest
from helpers.hf_folder import save_run, write_byte_pairs, write_folder

from maxpipe import export
from maxpipe.config import catalog
from maxpipe.hf import exporter
from maxpipe.hf.safetensors import read_folder, read_header
from maxpipe.storage.model_folders import LocalFile, LocalFolder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


def content_of(file):
    return json.loads(file.read_text())


def test_special_ids_outside_the_text_part_of_a_model_with_images_are_kept(folder, tmp_path):
    """A text part that has an id itself wins, and null is none."""
    text = content_of(folder / "config.json") | {"eos_token_id": None, "pad_token_id": 3}
    del text["bos_token_id"]
    ids = {"bos_token_id": 4, "eos_token_id": [1, 106], "pad_token_id": 0}
    wrapper = {"model_type": "gemma3", "text_config": text, "vision_config": {}, **ids}
    (folder / "config.json").write_text(json.dumps(wrapper))
    (folder / "generation_config.json").unlink()
    target = tmp_path / "exported"
    assert export.main([save_run(folder), "--hf", str(target)]) == 0
    expected = ids | {"pad_token_id": 3}
    assert content_of(target / "generation_config.json") == expected
    assert content_of(target / "config.json").items() >= expected.items()


@pytest.mark.parametrize(("marks", "has_generation"), [(["<end>"], True), ([], False)])
def test_token_that_ends_a_turn_is_an_end_of_text_of_the_export(
    folder, tmp_path, marks, has_generation, capsys
):
    write_byte_pairs(folder, "abc", ["<s>", "</s>", *marks], 300)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    template = "{% for m in messages %}{{ m.content }}<end>\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.5}')
    if not has_generation:
        (folder / "generation_config.json").unlink()
    content = content_of(folder / "config.json") | {"eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(content))
    values = {"data.tokenizer": f"hf:{folder}", "data.source": "chat"}
    run, target = save_run(folder, **values), tmp_path / "exported"
    assert export.main([run, "--hf", str(target)]) == 0
    for name in ("config.json", "generation_config.json"):
        assert content_of(target / name)["eos_token_id"] == ([1, 2] if marks else 1)
    if has_generation:
        assert content_of(target / "generation_config.json")["temperature"] == 0.5
    assert ("is no token: eos_token_id stays" in capsys.readouterr().out) is not marks


def test_length_that_is_null_in_the_imported_file_becomes_that_of_the_run(tmp_path):
    folder = write_folder(tmp_path / "model", "qwen2")
    content = content_of(folder / "config.json") | {"max_position_embeddings": None}
    (folder / "config.json").write_text(json.dumps(content))
    target = tmp_path / "exported"
    run = save_run(folder, **{"data.sequence_length": 24})
    assert export.main([run, "--hf", str(target)]) == 0
    assert content_of(target / "config.json")["max_position_embeddings"] == 24


@pytest.mark.parametrize("flag", ["--hf", "--adapter"])
def test_block_of_ones_own_is_exported_only_as_a_type_of_its_entry(
    folder, tmp_path, flag, monkeypatch, capsys
):
    entry = catalog.BLOCKS["llama"]
    monkeypatch.setitem(catalog.BLOCKS, "own", replace(entry, model_types=()))
    run, target = save_run(folder, **{"model.block": "own", "model.lora.rank": 2}), tmp_path / "hf"
    with pytest.raises(SystemExit, match="2"):
        export.main([run, flag, str(target)])
    assert "model.block: own is no block of gemma3_text: its entry in" in capsys.readouterr().err
    assert not target.exists()
    monkeypatch.setitem(catalog.BLOCKS, "own", replace(entry, model_types=["gemma3_text"]))
    assert export.main([run, flag, str(target)]) == 0


def test_names_of_python_files_that_are_not_exported_are_left_out(folder, tmp_path):
    code = {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}, "kept": 7}
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps(content_of(folder / name) | code))
    target = tmp_path / "exported"
    assert export.main([save_run(folder), "--hf", str(target)]) == 0
    for name in ("config.json", "tokenizer_config.json"):
        content = content_of(target / name)
        assert (content["kept"], "auto_map" in content) == (7, False)


def test_run_on_bytes_is_exported_without_a_tokenizer_which_is_said(folder, tmp_path, capsys):
    target = tmp_path / "exported"
    run = save_run(folder, init_from="")
    assert export.main([run, "--hf", str(target)]) == 0
    assert not [*target.glob("tokenizer*")]
    line = "no tokenizer is written: the run has no files of data.tokenizer=byte\n"
    assert capsys.readouterr().out.endswith(line)
    # The imported tokenizer goes with the imported model.
    imported = folder.parent / "imported"
    (folder.parent / "run").rename(folder.parent / "bytes")
    assert export.main([save_run(folder), "--hf", str(imported)]) == 0
    assert (imported / "tokenizer.json").is_file()
    assert "no tokenizer" not in capsys.readouterr().out


def test_export_to_a_url_is_refused_instead_of_writing_below_a_directory_called_gs(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for flag in ("--hf", "--safetensors", "--adapter"):
        with pytest.raises(SystemExit, match="2"):
            export.main(["runs/base", flag, "gs://bucket/model"])
        assert f"{flag}: gs://bucket/model is a URL" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_export_has_its_name_when_it_is_complete(folder, tmp_path, monkeypatch):
    run, target = save_run(folder), tmp_path / "exports" / "exported"
    left = target.with_name(".exported.unfinished-1")  # of one that was killed
    left.mkdir(parents=True)
    written = []

    def write_json(path, content, write=exporter.write_json):
        write(path, content)
        written.append((path.name, target.exists()))

    monkeypatch.setattr(exporter, "write_json", write_json)
    assert export.main([run, "--hf", str(target)]) == 0
    assert written[-1] == ("config.json", False)
    assert {*target.parent.iterdir()} == {target, left}
    assert read_folder(LocalFolder(target)).keys() == read_folder(LocalFolder(folder)).keys()


def test_bias_that_selects_experts_is_float32_whatever_the_others_are(tmp_path):
    """Its steps are smaller than those of bfloat16."""
    run = save_run(write_folder(tmp_path / "model", "deepseek_v3"))
    for flag, target in (("--hf", tmp_path / "exported"), ("--safetensors", tmp_path / "x")):
        assert export.main([run, flag, str(target), "--dtype", "bfloat16"]) == 0
        file = target if target.is_file() else target / "model.safetensors"
        tensors = read_header(LocalFile(file))
        biases = {name for name in tensors if name.endswith(("correction_bias", "moe.bias"))}
        assert biases
        assert {name for name, tensor in tensors.items() if tensor.dtype == "F32"} == biases
