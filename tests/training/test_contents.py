"""What processes compare: digests of what the paths of a configuration lead to."""

from helpers.hf_folder import write_folder

from maxpipe.config import Config, replace
from maxpipe.config.catalog import OPTIMIZERS, Optimizer
from maxpipe.devices.agreement import source_digest
from maxpipe.training.resuming import package_versions, run_contents


def of(key, value):
    return run_contents(replace(Config(), **{key: str(value)}))[key]


def test_files_are_compared_by_content_wherever_they_are(tmp_path):
    for key, name in (("pipeline.schedule", "a.csv"), ("compile.load", "step")):
        for directory, text in (("a", "F0,B0"), ("b", "F0,B0"), ("c", "B0,F0")):
            (tmp_path / directory).mkdir(exist_ok=True)
            (tmp_path / directory / name).write_text(text)
        a, b, c = (of(key, tmp_path / directory / name) for directory in "abc")
        assert a == b != c
        assert "No such file" in of(key, tmp_path / name)
    assert of("pipeline.schedule", "zb_v") == "zb_v"  # of the catalogue


def test_data_is_compared_by_content_in_place_of_paths(tmp_path):
    def contents(directory, text):
        (tmp_path / directory).mkdir(exist_ok=True)
        path = tmp_path / directory / "a.jsonl"
        path.write_text(text)
        keys = {"data.source": "jsonl", "data.path": str(path), "data.eval_fraction": 0.0}
        return run_contents(replace(Config(), **keys))

    assert contents("a", '{"text": "x"}\n') == contents("b", '{"text": "x"}\n')
    assert contents("a", "{}\n")["data.path"] != contents("b", '{"text": "x"}\n')["data.path"]
    assert "cannot be read" in of("data.tokenizer", "gone.json")


def test_models_are_compared_by_shape_and_weights(tmp_path):
    folders = [write_folder(tmp_path / name) for name in "ab"]

    def values(folder):
        return of("model.from_hf", folder), of("init_from", f"hf:{folder}")

    before, same = map(values, folders)
    assert before == same
    (folders[1] / "README.md").write_text("other words")
    assert values(folders[1]) == before
    weights = folders[1] / "1.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x80  # the sign of the last number
    weights.write_bytes(content)
    assert all(a != b for a, b in zip(values(folders[1]), before, strict=True))


def test_steps_of_maxtext_are_compared_by_all_their_files(tmp_path):
    (tmp_path / "0" / "items").mkdir(parents=True)
    file = tmp_path / "0" / "items" / "chunk"
    file.write_bytes(b"one")
    before = of("init_from", f"maxtext:{tmp_path}")
    file.write_bytes(b"two")
    assert of("init_from", f"maxtext:{tmp_path}") != before


def test_code_of_variants_in_use_is_compared(tmp_path, monkeypatch):
    for file in ["mine_0.py", "mine_1/inner.py"]:
        monkeypatch.syspath_prepend(str(tmp_path))
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text("rate = 1")
        name = file.removesuffix(".py").replace("/", ".")
        monkeypatch.setitem(OPTIMIZERS, "mine", Optimizer(f"{name}:build", moments=0))
        key = f"code of {name.partition('.')[0]}"
        assert key not in run_contents(Config())
        config = replace(Config(), **{"optimizer.name": "mine"})
        before = run_contents(config)[key]
        path.write_text("rate = 2")
        assert run_contents(config)[key] != before


def test_processes_compare_every_version_and_the_code_of_maxpipe():
    contents = run_contents(Config())
    for name, version in package_versions().items():
        assert contents[f"version of {name}"] == version
    assert contents["version of libtpu"]
    assert contents["code of maxpipe"] == source_digest()
