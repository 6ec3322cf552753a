"""Open the parameters of a checkpoint that MaxText wrote, with TensorStore alone.

Orbax writes a step as `N/items`: `_METADATA` lists the arrays. These are one OCDBT database or,
with `checkpoint_storage_use_ocdbt=False`, a directory each. The state of the optimizer lies next to
the parameters and is not opened.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from maxpipe.storage.local_files import files_in

if TYPE_CHECKING:
    import tensorstore as ts

METADATA = "_METADATA"
ITEM = "items"  # directory within a step's directory
_DATABASE = "manifest.ocdbt"
FLOATS = ("float32", "bfloat16", "float16")
_PARAMETERS = "params"
_CACHE_BYTES = 100_000_000  # for the database's index, in which every array is looked up


def find_item(directory: Path) -> Path:
    """Return the directory of the arrays: the given one, or its `items`.

    ValueError says which directory to give if there are none.
    """
    for candidate in (directory, directory / ITEM):
        if (candidate / METADATA).is_file():
            return candidate
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}")
    steps = sorted((d.parent.parent for d in directory.glob(f"*/{ITEM}/{METADATA}")), key=_number)
    if steps:
        raise ValueError(f"{directory} is a directory of steps; give a step in it, as {steps[-1]}")
    raise ValueError(f"{directory} has no {METADATA}; give the directory of a step of MaxText")


def open_parameters(item: Path) -> dict[str, "ts.TensorStore"]:
    """Open the parameters in an item by dotted name, such as `decoder.layers.mlp.wo.kernel`.

    Raises:
      ValueError, OSError: a file is missing or damaged.
    """
    import tensorstore as ts

    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    metadata = json.loads((item / METADATA).read_text(encoding="utf-8"))
    names = _names(metadata)
    if not names:
        raise ValueError(f"{item} has no arrays under {_PARAMETERS!r}")
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    pending = {
        name: ts.open(
            {"driver": driver, "kvstore": _place(item, stored)},
            open=True,
            read=True,
            context=context,
        )
        for name, stored in names.items()
    }
    return {name: future.result() for name, future in pending.items()}


def _names(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the dotted name that each parameter is stored under, by its name in the model."""
    tree = metadata.get("tree_metadata")
    if not isinstance(tree, dict):
        raise ValueError(f"{METADATA} has no tree of arrays")
    names = {}
    for leaf in tree.values():
        keys = [str(key["key"]) for key in leaf["key_metadata"]]
        if keys[0] != _PARAMETERS or leaf["value_metadata"].get("skip_deserialize"):
            continue
        # The tree of parameters is a Flax collection of the same name.
        first = 2 if keys[1:2] == [_PARAMETERS] else 1
        names[".".join(keys[first:])] = ".".join(keys)
    return names


def _place(item: Path, name: str) -> dict[str, object]:
    if (item / _DATABASE).is_file():
        return {"driver": "ocdbt", "base": files_in(item), "path": f"{name}/"}
    return files_in(item / name)


def _number(step: Path) -> tuple[bool, int]:
    return step.name.isdigit(), int(step.name) if step.name.isdigit() else 0
