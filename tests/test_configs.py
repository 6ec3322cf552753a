"""Test the files in configs/ besides the model presets."""

from pathlib import Path

import pytest

from maxpipe.config import load, resolve
from maxpipe.data.loader import make_loader

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.yml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_opens_with_its_command_and_names_its_run_after_the_file(path, monkeypatch):
    monkeypatch.chdir(path.parents[1])
    assert path.read_text().startswith(f"# python -m maxpipe.train configs/{path.name}\n")
    loaded = load(str(path))
    config = resolve(loaded, loaded.config.mesh.simulated_devices)
    assert config.run_name == path.stem
    make_loader(config, "train", [0]).close()
