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


def change(file, **keys):
    file.write_text(json.dumps(content_of(file) | keys))


def exported(folder, **values):
    target = folder.parent / "exported"
    assert export.main([save_run(folder, **values), "--hf", str(target)]) == 0
    return target


def test_special_ids_outside_the_text_part_of_a_model_with_images_are_kept(folder):
    """A text part that has an id itself wins, and null is none."""
    text = content_of(folder / "config.json") | {"eos_token_id": None, "pad_token_id": 3}
    del text["bos_token_id"]
    ids = {"bos_token_id": 4, "eos_token_id": [1, 106], "pad_token_id": 0}
    wrapper = {"model_type": "gemma3", "text_config": text, "vision_config": {}, **ids}
    (folder / "config.json").write_text(json.dumps(wrapper))
    (folder / "generation_config.json").unlink()
    target = exported(folder)
    expected = ids | {"pad_token_id": 3}
    assert content_of(target / "generation_config.json") == expected
    assert content_of(target / "config.json").items() >= expected.items()


@pytest.mark.parametrize("marks", [["<end>"], []])
def test_token_that_ends_a_turn_is_an_end_of_text_of_the_export(folder, marks, capsys):
    write_byte_pairs(folder, "abc", ["<s>", "</s>", *marks], 300)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    template = "{% for m in messages %}{{ m.content }}<end>\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.5}')
    if not marks:
        (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=1)
    target = exported(folder, **{"data.tokenizer": f"hf:{folder}", "data.source": "chat"})
    for name in ("config.json", "generation_config.json"):
        assert content_of(target / name)["eos_token_id"] == ([1, 2] if marks else 1)
    if marks:
        assert content_of(target / "generation_config.json")["temperature"] == 0.5
    needed = "stop_strings=['<end>'], tokenizer=tokenizer"
    for text in (capsys.readouterr().out, (target / "README.md").read_text()):
        assert (needed in text) is not bool(marks)


def test_card_has_the_learning_rates_of_the_steps_up_to_its_own(folder):
    run = save_run(folder, **{"optimizer.learning_rate": 5e-3})  # step 1
    row = {"changed": "optimizer.learning_rate", "now": 0}
    rows = [row | {"step": 0, "before": 3e-3}, row | {"step": 1, "before": 5e-3}]
    (folder.parent / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert export.main([run, "--hf", str(folder.parent / "exported")]) == 0
    card = (folder.parent / "exported" / "README.md").read_text()
    assert ", learning rate 0.003 to step 0, 0.005 |" in card


def test_block_of_ones_own_is_exported_only_as_a_type_of_its_entry(
    folder, tmp_path, monkeypatch, capsys
):
    entry = catalog.BLOCKS["llama"]
    monkeypatch.setitem(catalog.BLOCKS, "own", replace(entry, model_types=()))
    words = [save_run(folder, **{"model.block": "own"}), "--hf", str(tmp_path / "hf")]
    with pytest.raises(SystemExit, match="2"):
        export.main(words)
    assert "model.block: own is no block of gemma3_text: its entry in" in capsys.readouterr().err
    monkeypatch.setitem(catalog.BLOCKS, "own", replace(entry, model_types=["gemma3_text"]))
    assert export.main(words) == 0


def test_run_on_bytes_is_exported_without_a_tokenizer_which_is_said(folder, capsys):
    target = exported(folder, init_from="")
    assert not [*target.glob("tokenizer*")]
    line = "no tokenizer is written: the run has no files of data.tokenizer=byte\n"
    assert capsys.readouterr().out.endswith(line)
    # The imported tokenizer goes with the imported model.
    for name in ("run", "exported"):
        (folder.parent / name).rename(folder.parent / f"{name} on bytes")
    assert (exported(folder) / "tokenizer.json").is_file()
    assert "no tokenizer" not in capsys.readouterr().out


def test_export_has_its_name_when_it_is_complete_and_names_no_python_files(folder, monkeypatch):
    for name in ("config.json", "tokenizer_config.json"):
        change(folder / name, auto_map={"AutoConfig": "configuration_own.OwnConfig"}, kept=7)
    left = folder.parent / ".exported.unfinished-1"  # of one that was killed
    left.mkdir()
    written = []

    def write_json(path, content, write=exporter.write_json):
        write(path, content)
        written.append((path.name, (folder.parent / "exported").exists()))

    monkeypatch.setattr(exporter, "write_json", write_json)
    target = exported(folder)
    assert written[-1] == ("config.json", False)
    assert {path.name for path in folder.parent.glob("*exported*")} == {target.name, left.name}
    assert read_folder(LocalFolder(target)).keys() == read_folder(LocalFolder(folder)).keys()
    for name in ("config.json", "tokenizer_config.json"):
        content = content_of(target / name)
        assert (content["kept"], "auto_map" in content) == (7, False)


def test_bias_that_selects_experts_is_float32_whatever_the_others_are(tmp_path):
    run = save_run(write_folder(tmp_path / "model", "deepseek_v3"))
    for flag, target in (("--hf", tmp_path / "exported"), ("--safetensors", tmp_path / "x")):
        assert export.main([run, flag, str(target), "--dtype", "bfloat16"]) == 0
        file = target if target.is_file() else target / "model.safetensors"
        tensors = read_header(LocalFile(file))
        biases = {name for name in tensors if name.endswith(("correction_bias", "moe.bias"))}
        assert biases
        assert {name for name, tensor in tensors.items() if tensor.dtype == "F32"} == biases
