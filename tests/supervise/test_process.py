"""What a trainer tells its supervisor, and the leases of a run."""

import os
import time

import fsspec
import pytest

from maxpipe.config import ConfigError
from maxpipe.devices.cluster import Sizes
from maxpipe.storage.lease import LeaseLost, LeaseObjects
from maxpipe.storage.object_store import Deadline
from maxpipe.supervise.process import Progress, ProgressFile, RunLease, own_run, read_progress

NO_JOB = ("", 0)


def test_progress_written_is_read_back_once_a_second_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("the training loop waits for a disk"))
    file = ProgressFile(tmp_path / "progress.json", 3)
    file.tell(run=str(tmp_path))
    assert read_progress(tmp_path / "progress.json") == Progress(3, str(tmp_path))
    for now, step in ((101.0, 7), (101.5, 8)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        file.finished(step)
    assert read_progress(tmp_path / "progress.json") == Progress(3, str(tmp_path), 7, 101.0)


def test_sizes_to_go_on_with_stay_in_what_is_told_of_the_run(tmp_path):
    file = ProgressFile(tmp_path / "progress.json")
    assert file.is_read
    assert not ProgressFile().is_read
    file.tell(sizes=Sizes((1, 2), 30.0, "{}"))
    file.finished(3)
    told = read_progress(tmp_path / "progress.json")
    assert (told.step, told.sizes) == (3, Sizes((1, 2), 30.0, "{}"))


def own(root):
    return own_run(root, None, NO_JOB, print)


def test_own_run_twice_is_a_config_error_with_a_remedy(tmp_path):
    with own(tmp_path / "run"), pytest.raises(ConfigError) as caught, own(tmp_path / "run"):
        pass
    assert "run_name: " in str(caught.value)
    assert "wait until it has ended, stop it, or choose another run_name" in str(caught.value)
    with own(tmp_path / "run"):
        pass


def test_own_run_removes_the_directories_that_it_made_and_no_others(tmp_path):
    with own(tmp_path / "a" / "b"):
        assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["lease.json"]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    with own(tmp_path / "kept"):
        pass
    with own(tmp_path / "used"):
        (tmp_path / "used" / "config.yml").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "used"]


def test_own_run_in_a_place_that_is_no_directory_is_a_config_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="output_dir: cannot write to"), own(tmp_path / "file/a"):
        pass


class FakeLease:
    """Lost from the first `verify` on."""

    def __init__(self, lost=""):
        self.lost, self.looks = lost, 0

    def verify(self):
        self.looks, self.lost = self.looks + 1, "gone"


@pytest.mark.parametrize("reasons", [("taken over", ""), ("", "taken over")])
def test_run_lease_of_which_one_is_lost_is_lost(reasons):
    lease = RunLease([FakeLease(reason) for reason in reasons])
    assert lease.lost
    with pytest.raises(LeaseLost, match="taken over"):
        lease.check()


def test_run_lease_verify_asks_the_directory_and_not_the_slow_mirror():
    leases = FakeLease(), FakeLease()
    lease = RunLease(leases)
    lease.check()
    with pytest.raises(LeaseLost):
        lease.verify()
    assert [each.looks for each in leases] == [1, 0]


class MirrorInMemory:
    """What `own_run` needs of a mirror."""

    url = "memory://run-lease/base/checkpoints"

    def lease_place(self):
        store = fsspec.filesystem("memory")
        return LeaseObjects("memory://run-lease/base", store, Deadline(30))


def test_own_run_of_another_directory_is_refused_at_the_same_mirror(tmp_path):
    store = fsspec.filesystem("memory")
    with own_run(tmp_path / "a", MirrorInMemory(), NO_JOB, print) as lease:
        assert store.find("/run-lease") == ["/run-lease/base/lease.json"]
        with (
            pytest.raises(ConfigError, match=r"run_name: memory://run-lease/base is in use by"),
            own_run(tmp_path / "b", MirrorInMemory(), NO_JOB, print),
        ):
            pass
        assert not (tmp_path / "b").exists()
        lease.verify()
    assert store.find("/run-lease") == []
