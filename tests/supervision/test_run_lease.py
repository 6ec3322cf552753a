"""The lease of a run: what a user is told, and what is left of a run that did not begin."""

import pytest

from maxpipe.config import ConfigError
from maxpipe.storage.lease import LeaseLost
from maxpipe.supervision.run_lease import RunLease, own_run

NO_JOB = ("", 0)


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


def test_run_lease_verify_looks_at_the_directory(tmp_path):
    with own(tmp_path / "run") as lease:
        lease.verify()
        (tmp_path / "run").rename(tmp_path / "moved")
        assert not lease.is_lost
        with pytest.raises(LeaseLost):
            lease.verify()
        assert lease.is_lost


def test_run_lease_without_leases_is_never_lost():
    RunLease().verify()
