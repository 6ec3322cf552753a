"""Mistakes in the command line of `maxpipe.compile` are reported before JAX is imported."""

import subprocess
import sys

import pytest

from maxpipe import compile as command
from maxpipe.compiling import checks, launch
from maxpipe.compiling.checks import check_slice
from maxpipe.config import ConfigError

MPMD = ("pipeline.engine=mpmd", "pipeline.num_repeats=1")
ON_CPU = "compile.topology=cpu"


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e:32x32", r"has 1024 chips; the largest slice has 256; usual slices: v5e-256"),
        ("v6e:2x2x2", "grids of v6e have 2 dimensions"),
        ("v5p:2x2", "grids of v5p have 3 dimensions"),
        ("tpu7x:2x2", "grids of tpu7x have 3 dimensions"),
        ("v5p:2x6x10", "slices above 64 chips are made of cubes of 4x4x4"),
    ],
)
def test_grids_that_chips_are_not_wired_in_are_refused_with_the_nearest_slices(topology, message):
    with pytest.raises(ConfigError, match=message):
        check_slice(topology)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compile.topology=v5e:3x3"], "compile.topology: v5e:3x3: a host holds 2x2 chips"),
        ([ON_CPU, "--units=F1"], "--units: is for pipeline.engine=mpmd; the scheduled engine has"),
        ([ON_CPU, "--programs=out"], "--programs: is for pipeline.engine=mpmd; the scheduled"),
        (["compile.topology=v3:2x2", "--units=F1"], "--units: is for pipeline.engine=mpmd"),
        ([ON_CPU, *MPMD, "pipeline.schedule=1f1b", "--units=F9"], "--units: there is no F9"),
        ([ON_CPU, *MPMD, "pipeline.schedule=1f1b", "--hlo=x.hlo"], "--hlo: is for a train step in"),
        ([ON_CPU, *MPMD, "pipeline.schedule=circular"], "mpmd does not run schedule circular"),
        (
            [ON_CPU, "mesh.ici.fsdp=3"],
            "mesh.ici: stage=2 x fsdp=3 makes 6, but there are 4 devices",
        ),
        (["compile.topology=tpu7x:2x2x1", "--tune-flags"], "the clock of tpu7x is unpublished"),
    ],
)
def test_mistakes_are_reported_before_jax_is_imported(
    tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.setitem(sys.modules, "maxpipe.compiling.launch", None)  # an import of it fails
    monkeypatch.setattr(checks, "is_installed", lambda package: True)
    config = str(command.__file__).replace("maxpipe/compile.py", "configs/base.yml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        command.main([config, *words])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("schedule", "flag", "message"),
    [
        ("lockstep_1f1b", "--programs=out", "--programs: is for pipeline.engine=mpmd; the sched"),
        ("1f1b", "--hlo=x.hlo", "--hlo: is for a train step in one program"),
    ],
)
def test_flags_are_checked_again_once_the_devices_of_an_unknown_chip_decide_the_engine(
    tmp_path, monkeypatch, capsys, schedule, flag, message
):
    monkeypatch.setattr(checks, "is_installed", lambda package: True)
    monkeypatch.setattr(launch, "devices_of", lambda config: [None] * 4)
    config = str(command.__file__).replace("maxpipe/compile.py", "configs/base.yml")
    monkeypatch.chdir(tmp_path)
    words = ["mesh.ici.stage=-1", f"pipeline.schedule={schedule}", "pipeline.num_repeats=1"]
    with pytest.raises(SystemExit) as exit_info:
        command.main([config, "compile.topology=v3:2x2", *words, flag])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_checks_import_no_jax():
    code = "import sys; import maxpipe.compiling.checks; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
