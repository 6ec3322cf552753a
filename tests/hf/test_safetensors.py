"""The format by itself: what is written is read back, and damage has a name."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from maxpipe.hf.safetensors import INDEX, SafetensorsError, read_folder, read_header, write_file
from maxpipe.storage.model_folders import LocalFile, LocalFolder

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.bias": np.array([1.5, -2], ml_dtypes.bfloat16),
    "c": np.float16([[7]]),
    "none": np.zeros((0, 4), np.float32),
}


def write(path, tensors=TENSORS):
    data = write_file(path, [(name, x.dtype, x.shape) for name, x in tensors.items()])
    data[:] = np.frombuffer(b"".join(x.tobytes() for x in tensors.values()), np.uint8)
    data.flush()
    return path


def test_tensors_that_are_written_are_read_back_also_by_the_library(tmp_path):
    path = write(tmp_path / "x.safetensors")
    stored = read_header(LocalFile(path))
    assert stored.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        actual = stored[name].read()
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(actual, expected)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length])["__metadata__"] == {"format": "pt"}
    numpy = pytest.importorskip("safetensors.numpy", reason="needs the extra `hf-test`")
    floats = {name: x for name, x in TENSORS.items() if x.dtype != ml_dtypes.bfloat16}
    for name, actual in numpy.load_file(write(path, floats)).items():
        np.testing.assert_array_equal(actual, floats[name])


def test_file_that_is_damaged_or_cut_off_is_refused_by_its_name(tmp_path):
    path = write(tmp_path / "x.safetensors")
    content = path.read_bytes()
    entries = [([2], [0, 4]), ([1], [8, 4]), ("x", [0, 4]), ([1], [0]), ([1], [0, "4"])]
    headers = [
        json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
        for shape, offsets in entries
    ]
    for damaged in (
        *(content[:size] for size in (3, 8, 40, -1)),
        *(struct.pack("<Q", len(h)) + h + bytes(8) for h in (b"{", b"[]", b'{"a": 1}', *headers)),
    ):
        path.write_bytes(damaged)
        with pytest.raises(SafetensorsError, match=r"x\.safetensors is damaged or cut off"):
            read_header(LocalFile(path))


C = TENSORS["c"]


def write_index(folder, **weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_index_says_which_file_counts_if_several_have_a_tensor(tmp_path):
    write(tmp_path / "one.safetensors", {"a": C, "b": C})
    write(tmp_path / "two.safetensors", {"a": C + 1, "c": C + 1})
    write(tmp_path / "other.safetensors", {"unused": C})
    # A tensor in another file than the index says is read.
    write_index(tmp_path, a="one.safetensors", b="two.safetensors", c="two.safetensors")
    tensors = read_folder(LocalFolder(tmp_path))
    assert {name: tensor.read().item() for name, tensor in tensors.items()} == {
        "a": 7,
        "b": 7,
        "c": 8,
    }
    # As in transformers, a model in one file comes before an index and other files.
    write(tmp_path / "model.safetensors", {"a": C + 2})
    (tensor,) = read_folder(LocalFolder(tmp_path)).values()
    assert tensor.read().item() == 9


def test_folder_that_does_not_say_what_to_read_is_refused(tmp_path):
    def refused(message):
        with pytest.raises(SafetensorsError, match=message):
            read_folder(LocalFolder(tmp_path))

    (tmp_path / "pytorch_model.bin").touch()
    refused(r"save_pretrained\(safe_serialization=True\)")
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", {"a": C, name: C})
    refused(r"a is in \S*one\.safetensors and \S*two\.safetensors")
    (tmp_path / "two.safetensors").unlink()
    write_index(tmp_path, a="one.safetensors", b="two.safetensors")
    refused(r"lacks two\.safetensors")
    write_index(tmp_path, b="one.safetensors")
    (tmp_path / INDEX).write_text("{}")
    refused("is damaged")
    write_index(tmp_path, b="one.safetensors")
    write(tmp_path / "one.safetensors", {"a": C})
    refused("1 tensors of the index are in no file: b")
