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


def test_file_that_is_cut_off_is_refused_by_its_name(tmp_path):
    path = write(tmp_path / "x.safetensors")
    content = path.read_bytes()
    for size in (3, 8, 40, -1):
        path.write_bytes(content[:size])
        with pytest.raises(SafetensorsError, match=r"x\.safetensors"):
            read_header(LocalFile(path))


def test_header_that_is_damaged_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    entries = [
        ([2], [0, 4]),
        ([1], [8, 4]),
        ("x", [0, 4]),
        ([-1, -1], [0, 4]),
        ([float("inf")], [0, 4]),
        ([1], []),
        ([1], [0]),
        ([1], [0, 4, 8]),
        ([1], [0, "4"]),
    ]
    contents = [
        {"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}
        for shape, offsets in entries
    ]
    headers = [json.dumps(content).encode() for content in contents]
    for header in (b"{", b"[]", b'{"a": 1}', b"[" * 100_000, *headers):
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        with pytest.raises(SafetensorsError, match=r"x\.safetensors"):
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
        with pytest.raises(SafetensorsError, match=message) as error:
            read_folder(LocalFolder(tmp_path))
        assert len(str(error.value)) < len(str(tmp_path)) + 250

    (tmp_path / "pytorch_model.bin").touch()
    refused(r"save_pretrained\(safe_serialization=True\)")
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", {"a": C, name: C})
    refused(r"a in each of one\.\S* and two\.\S*")
    (tmp_path / "two.safetensors").unlink()
    write_index(tmp_path, a="one.safetensors", b="two.safetensors")
    refused(r"lacks two\.safetensors")
    write_index(tmp_path, b="one.safetensors")
    refused("b of the index are in no file")
    for name in ("../x", "a/../../x", "/etc/x"):
        write_index(tmp_path, a=name)
        refused("names")
    for damaged in ("{}", "[" * 100_000):
        (tmp_path / INDEX).write_text(damaged)
        refused("is damaged")


def test_every_file_that_is_damaged_is_named(tmp_path):
    for name in ("one", "two", "three"):
        write(tmp_path / f"{name}.safetensors", {name: C})
    (tmp_path / "one.safetensors").write_bytes(b"x")
    (tmp_path / "two.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")
    with pytest.raises(SafetensorsError) as caught:
        read_folder(LocalFolder(tmp_path))
    one, two = caught.value.problems
    assert one == f"{tmp_path}/one.safetensors is no safetensors file, or it is cut off"
    assert two.startswith(f"{tmp_path}/two.safetensors has a damaged header: ")
    assert str(caught.value) == f"{one}; {two}"
