"""What a trainer and its supervisor tell each other by files."""

import os

from maxpipe.devices.cluster import Sizes
from maxpipe.supervise.progress import Progress, ProgressFile, read_progress


def test_progress_written_is_read_back_once_a_second_at_most(tmp_path):
    now = [100.0]
    file = ProgressFile(tmp_path / "progress.json", 3, lambda: now[0])
    file.run_directory(tmp_path)
    assert read_progress(tmp_path / "progress.json") == Progress(3, str(tmp_path))
    for now[0], step in ((101.0, 7), (101.5, 8)):
        file.finished(step)
    assert read_progress(tmp_path / "progress.json") == Progress(3, str(tmp_path), 7, 101.0)


def test_progress_is_written_without_waiting_for_the_disk(tmp_path, monkeypatch):
    def flush(descriptor):
        raise AssertionError("the training loop waits for a disk")

    monkeypatch.setattr(os, "fsync", flush)
    ProgressFile(tmp_path / "progress.json").finished(3)
    assert read_progress(tmp_path / "progress.json").step == 3


def test_sizes_to_go_on_with_stay_in_what_is_told_of_the_run(tmp_path):
    sizes = Sizes((1, 2), 30.0, "{}")
    file = ProgressFile(tmp_path / "progress.json")
    assert file.is_read
    assert not ProgressFile().is_read
    file.may_go_on(sizes)
    assert read_progress(tmp_path / "progress.json") == Progress(sizes=sizes)
    file.run_directory(tmp_path)
    file.finished(3)
    told = read_progress(tmp_path / "progress.json")
    assert (told.run, told.step, told.sizes) == (str(tmp_path), 3, sizes)
