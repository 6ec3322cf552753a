"""What `data.path` may name, and the errors when it names nothing."""

import errno
import os
import shutil

import numpy as np
import pytest

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError
from maxpipe.data import files
from maxpipe.data.files import find_all, find_files, require_content


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.jsonl", ".hidden/e.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return tmp_path


def _names(paths, root):
    return [os.path.relpath(path, root) for path in paths]


TEXTS = ["a.txt", "b.txt", "sub/c.txt"]


def test_find_files_path_may_be_file_directory_glob_or_list(tree):
    for path, expected in (
        (f"{tree}/b.txt", ["b.txt"]),
        (f"{tree}", [*TEXTS, "sub/d.jsonl"]),
        (f"{tree}/**/*.txt", TEXTS),
        (f"{tree}/b.txt, {tree}/?.txt", ["a.txt", "b.txt"]),
    ):
        assert _names(find_files(path), tree) == expected
    assert _names(find_files(f"{tree}", (".jsonl",)), tree) == ["sub/d.jsonl"]
    (tree / "sub").rename(tree / "[v1]")
    assert _names(find_files(f"{tree}/[v1]"), tree) == ["[v1]/c.txt", "[v1]/d.jsonl"]


def test_find_files_refuses_a_link_to_nothing_unless_it_looks_for_others(tree):
    (tree / "lost.bin").symlink_to(tree / "gone")
    assert _names(find_files(f"{tree}", (".txt",)), tree) == TEXTS
    (tree / "sub" / "lost.txt").symlink_to(tree / "gone")
    (tree / "lost.txt").symlink_to(tree / "gone")
    for part in ("*.txt", "sub", "sub/lost.txt"):
        with pytest.raises(ConfigError, match=r"lost\.txt cannot be read: No such file"):
            find_files(f"{tree}/{part}", (".txt",))


def test_find_files_reads_what_it_can_and_names_the_others(tmp_path, capsys):
    shards = ["E.JSONL", "a.jsonl", "b.jsonl.gz", "c.json.gz", "d.ndjson", "f.jsonl.zstd"]
    for name in (*shards, "b.jsonl", "README.md", ".hidden", "state.json"):
        (tmp_path / name).write_text("{}")
    for name in ("jsonl", "chat"):
        files = find_files(str(tmp_path), SOURCES[name].suffixes)
        assert _names(files, tmp_path) == sorted([*shards, "b.jsonl"])
    left_out, doubles = capsys.readouterr().err.splitlines()[:2]
    assert left_out.startswith(f"{tmp_path}: left out README.md, state.json: not *.jsonl or *.ndj")
    assert doubles.startswith(f"{tmp_path}: b.jsonl also with another ending: all are read")


def test_find_files_reads_what_links_lead_to_once_and_under_their_names(tree, tmp_path_factory):
    (tree / "latest").symlink_to(tree / "sub")
    (tree / "sub" / "loop").symlink_to(tree)
    (tree / "sub" / "again").symlink_to(tree)  # two loops have a number of paths without bounds
    assert _names(find_files(f"{tree}", (".txt",)), tree) == TEXTS
    for path in (f"{tree}/s*/*.txt,{tree}/*/c.txt,{tree}/?.txt", f"{tree},{tree}/latest"):
        assert _names(find_files(path, (".txt",)), tree) == [*TEXTS[:2], "latest/c.txt"]
    assert _names(find_files(f"{tree}/latest/*.txt"), tree) == ["latest/c.txt"]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "more").mkdir()
    (elsewhere / "more" / "d.txt").touch()
    (tree / "sub" / "f.txt").symlink_to(tree / "a.txt")
    (tree / "more").symlink_to(elsewhere / "more")
    found = [*TEXTS[:2], "more/d.txt", "sub/c.txt", "sub/f.txt"]
    assert _names(find_files(f"{tree}", (".txt",)), tree) == found


def test_find_files_names_a_directory_that_it_may_not_read(tree, monkeypatch):
    scandir = os.scandir

    def refusing(name):
        if str(name).endswith(("lost+found", "sub")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return scandir(name)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ConfigError, match=rf"{tree}/sub cannot be read: Permission"):
        find_files(f"{tree}", (".txt",))
    shutil.rmtree(tree / "sub")
    (tree / "lost+found").mkdir()  # of a file system's root; only root may read it
    assert _names(find_files(f"{tree}", (".txt",)), tree) == TEXTS[:2]


def test_find_files_names_every_part_without_file_and_what_is_empty(tree):
    with pytest.raises(ConfigError) as caught:
        find_files(f"{tree}/a.txt,{tree}/none.txt,{tree}/*.csv")
    for problem, name in zip(caught.value.problems, ("none.txt", "*.csv"), strict=True):
        assert str(problem).startswith(f"data.path: no file at '{tree}/{name}'")
    with pytest.raises(ConfigError, match=r"data\.path: .* a file, a directory or a glob"):
        find_files(" , ")
    (tree / "a.jsonl.ZIP").touch()
    with pytest.raises(ConfigError, match=r"^data\.path: .*ZIP is packed .* unpack it"):
        find_files(f"{tree}/a.jsonl.ZIP", SOURCES["jsonl"].suffixes)
    (tree / "empty.bin").touch()
    with pytest.raises(ConfigError, match=r"data\.path: \S*/empty\.bin is empty$"):
        require_content([str(tree / "empty.bin"), str(tree / "a.txt")])


def test_find_all_returns_positions_across_blocks(monkeypatch):
    for block in [1, 3, 100]:
        monkeypatch.setattr(files, "_BLOCK", block)
        assert find_all(np.array([7, 1, 7, 7, 0, 2, 7]), 7).tolist() == [0, 2, 3, 6]
        assert find_all(np.array([1, 2]), 7).tolist() == []
