import subprocess
import sys
from types import SimpleNamespace

import pytest

from maxpipe.registry import Registry


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A package `shapes` with the variants circle and square and the helper _area."""
    package = tmp_path / "shapes"
    package.mkdir()
    (package / "__init__.py").write_text(
        'from maxpipe.registry import Registry\nSHAPES = Registry(__name__, __path__, "shape.name")\n'
    )
    for name in ("square", "circle"):
        text = f"from shapes import SHAPES\n@SHAPES.register()\ndef any_name():\n    return {name!r}\n"
        (package / f"{name}.py").write_text(text)
    (package / "_area.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("shapes").SHAPES
    for name in [name for name in sys.modules if name.partition(".")[0] == "shapes"]:
        del sys.modules[name]


def test_names_are_the_files_and_nothing_is_imported(registry):
    assert registry.names() == ["circle", "square"]
    assert not {"shapes.circle", "shapes.square"} & set(sys.modules)


def test_get_imports_that_variant_only(registry):
    assert registry.get("square")() == "square"
    assert "shapes.circle" not in sys.modules


@pytest.mark.parametrize("name", ["triangle", "_area", "", "square.py"])
def test_an_unknown_name_lists_the_choices_and_the_key(registry, name):
    with pytest.raises(ValueError, match=r"shape\.name=.* does not exist; choose one of circle, square"):
        registry.get(name)


def test_one_variant_a_module():
    registry = Registry("package", [], "key")
    registry.register()(SimpleNamespace(__module__="package.one"))
    with pytest.raises(AssertionError, match="registers two variants"):
        registry.register()(SimpleNamespace(__module__="package.one"))


def test_listing_the_choices_of_every_key_imports_no_jax():
    packages = (
        "maxpipe.model.blocks maxpipe.pipeline.remat maxpipe.pipeline.schedules maxpipe.training.optimizers "
        "maxpipe.training.lr_schedules maxpipe.data.sources maxpipe.data.tokenizers"
    )
    code = f"import importlib, sys\nfor p in {packages.split()}: importlib.import_module(p)\n"
    code += "sys.exit(bool({'jax', 'flax', 'grain', 'optax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
