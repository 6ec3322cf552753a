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


def test_tensors_that_are_written_are_read_back(tmp_path):
    stored = read_header(LocalFile(write(tmp_path / "x.safetensors")))
    assert stored.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        actual = stored[name].read()
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(actual, expected)


def test_library_reads_what_is_written(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy", reason="needs the extra `hf-test`")
    floats = {name: x for name, x in TENSORS.items() if x.dtype != ml_dtypes.bfloat16}
    path = write(tmp_path / "x.safetensors", floats)
    for name, actual in numpy.load_file(path).items():
        np.testing.assert_array_equal(actual, floats[name])


def test_header_is_aligned_and_says_the_format(tmp_path):
    content = write(tmp_path / "x.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length])["__metadata__"] == {"format": "pt"}


def test_file_that_is_cut_off_is_refused_by_its_name(tmp_path):
    path = write(tmp_path / "x.safetensors")
    content = path.read_bytes()
    for size in (3, 8, 40, -1):
        path.write_bytes(content[:size])
        with pytest.raises(SafetensorsError, match=r"x\.safetensors"):
            read_header(LocalFile(path))


def test_header_that_is_damaged_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    for header in (
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}',
        b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]}}',
        b"[" * 100_000,
    ):
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        with pytest.raises(SafetensorsError, match=r"x\.safetensors"):
            read_header(LocalFile(path))


class TestFolder:
    def test_index_says_which_file_a_tensor_is_read_from(self, tmp_path):
        first, second = TENSORS["c"], TENSORS["c"] + 1
        write(tmp_path / "one.safetensors", {"a": first, "b": first})
        write(tmp_path / "two.safetensors", {"a": second, "c": second})
        write(tmp_path / "other.safetensors", {"unused": first})
        weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        tensors = read_folder(LocalFolder(tmp_path))
        assert tensors.keys() == {"a", "b", "c"}
        np.testing.assert_array_equal(tensors["a"].read(), first)
        np.testing.assert_array_equal(tensors["c"].read(), second)

    def test_tensor_in_another_file_than_the_index_says_is_read(self, tmp_path):
        write(tmp_path / "one.safetensors", {"a": TENSORS["c"]})
        write(tmp_path / "two.safetensors", {"b": TENSORS["c"] + 1})
        weight_map = {"a": "two.safetensors", "b": "one.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        tensors = read_folder(LocalFolder(tmp_path))
        np.testing.assert_array_equal(tensors["a"].read(), TENSORS["c"])

    def test_model_in_one_file_leaves_out_other_files(self, tmp_path):
        write(tmp_path / "consolidated.safetensors", {"other": TENSORS["c"]})
        write(tmp_path / "model.safetensors", {"a": TENSORS["a.weight"]})
        write(tmp_path / "optimizer.safetensors", {"a": TENSORS["c"]})
        assert read_folder(LocalFolder(tmp_path)).keys() == {"a"}

    def test_tensor_in_two_files_without_an_index_is_refused(self, tmp_path):
        for name in ("one", "two"):
            write(tmp_path / f"{name}.safetensors", {"a": TENSORS["c"], name: TENSORS["c"]})
        with pytest.raises(SafetensorsError, match=r"a in each of one\.\S* and two\.\S*"):
            read_folder(LocalFolder(tmp_path))

    def test_index_that_names_what_is_not_there_is_refused(self, tmp_path):
        write(tmp_path / "one.safetensors", {"a": TENSORS["a.weight"]})
        index = tmp_path / INDEX
        index.write_text(
            json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
        )
        with pytest.raises(SafetensorsError, match=r"lacks two\.safetensors"):
            read_folder(LocalFolder(tmp_path))
        index.write_text(json.dumps({"weight_map": {"b": "one.safetensors"}}))
        with pytest.raises(SafetensorsError, match="b of the index are in no file"):
            read_folder(LocalFolder(tmp_path))
        for damaged in ("{}", "[" * 100_000):
            index.write_text(damaged)
            with pytest.raises(SafetensorsError, match="is damaged"):
                read_folder(LocalFolder(tmp_path))

    def test_every_file_that_is_damaged_is_named(self, tmp_path):
        for name in ("one", "two", "three"):
            write(tmp_path / f"{name}.safetensors", {name: TENSORS["c"]})
        (tmp_path / "one.safetensors").write_bytes(b"x")
        (tmp_path / "two.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")
        with pytest.raises(SafetensorsError) as caught:
            read_folder(LocalFolder(tmp_path))
        one, two = caught.value.problems
        assert one == f"{tmp_path}/one.safetensors is no safetensors file, or it is cut off"
        assert two.startswith(f"{tmp_path}/two.safetensors has a damaged header: ")
        assert str(caught.value) == f"{one}; {two}"

    def test_files_of_pytorch_are_refused_with_the_remedy(self, tmp_path):
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(SafetensorsError, match=r"save_pretrained\(safe_serialization=True\)"):
            read_folder(LocalFolder(tmp_path))

    def test_model_in_one_file_comes_before_an_index(self, tmp_path):
        write(tmp_path / "model.safetensors", {"a": TENSORS["c"]})
        write(tmp_path / "one.safetensors", {"a": TENSORS["c"] + 1})
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
        tensors = read_folder(LocalFolder(tmp_path))  # as transformers
        np.testing.assert_array_equal(tensors["a"].read(), TENSORS["c"])

    def test_index_that_leaves_the_folder_is_refused_in_a_line(self, tmp_path):
        folder = tmp_path / "folder"
        folder.mkdir()
        write(tmp_path / "x", {"a": TENSORS["c"]})
        for name in ("../x", "a/../../x", "/etc/x", "x" * 5000, "a\0b", ""):
            (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
            with pytest.raises(SafetensorsError, match="names") as error:
                read_folder(LocalFolder(folder))
            assert len(str(error.value)) < len(str(folder)) + 200


def test_shape_that_no_array_has_is_refused_at_the_header(tmp_path):
    path = tmp_path / "x.safetensors"
    for shape, end in (([2**62, 0], 0), ([1] * 100_001, 4)):
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
        header = json.dumps({"a": entry}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(end))
        with pytest.raises(SafetensorsError, match="a has a shape"):
            read_header(LocalFile(path))
