"""Mistakes in the command line of `maxpipe.compile` are reported before JAX is imported."""

import sys
from pathlib import Path

import pytest
from helpers.commands import exit_code

from maxpipe.compile import __main__ as command
from maxpipe.compile import checks, launch
from maxpipe.compile.checks import check_slice, check_units, unit_names
from maxpipe.config import ConfigError, load, resolve

BASE = str(Path("configs/base.yml").resolve())
MPMD = "pipeline.engine=mpmd pipeline.num_repeats=1 pipeline.schedule=1f1b"
V5P = "compile.topology=v5p-16"


def test_grids_that_chips_are_not_wired_in_are_refused_with_the_nearest_slices():
    for topology, message in {
        "v5e:32x32": r"has 1024 chips; the largest slice has 256; usual slices: v5e-256",
        "tpu7x:2x2": "grids of tpu7x have 3 dimensions",
        "v5p:2x6x10": "slices above 64 chips are made of cubes of 4x4x4",
    }.items():
        with pytest.raises(ConfigError, match=message):
            check_slice(topology)


MISTAKES = {
    "compile.topology=": "compile.topology: name the devices to compile for",
    "compile.topology=tpu": "neither cpu nor a chip and its grid",
    "compile.topology=cpu compile.num_slices=2": "2 slices need a TPU",
    "compile.topology=v5e:3x3": "compile.topology: v5e:3x3: a host holds 2x2 chips",
    "compile.topology=cpu compile.load=step.bin": "compile.load: is for maxpipe.train",
    "compile.topology=cpu --profile=p.html": "--profile: needs the estimates of a TPU's",
    "compile.topology=cpu --units=F1": "--units: is for pipeline.engine=mpmd; the scheduled engine",
    "compile.topology=cpu --programs=out": "--programs: is for pipeline.engine=mpmd; the scheduled",
    f"compile.topology=cpu {MPMD} --units=F9": "--units: there is no F9; there are F0, F1, B1, B0",
    f"compile.topology=cpu {MPMD} --hlo=x.hlo": "--hlo: is for a train step in one program",
    "compile.topology=cpu pipeline.engine=mpmd": "mpmd does not run schedule lockstep_1f1b",
    f"{V5P} --profile=one.txt": "--profile: writes .html, which one.txt does not end in",
    f"{V5P} --profile-trace=one.gz": "--profile-trace: writes .json.gz or .json, which one.gz does",
    f"{V5P} --json=a --hlo=a": "--hlo: would replace a, which --json writes",
    f"{V5P} --json=a compile.save=a": "--json: would replace a, which compile.save writes",
    f"{V5P} --json={BASE}": f"--json: would replace {BASE}, which is read",
    "compile.topology=ironwood:2x2x1 --profile=a.html": "the clock of tpu7x is unpublished; there",
    "compile.topology=v3:2x2 --profile=a.html": "v3:2x2 is in no table of chips",
}
FINE = (
    f"{V5P} --json=a --hlo=b --profile=a.html --profile-trace=a.json compile.save=s.bin",
    f"{V5P} --profile=/dev/null --profile-trace=/dev/null --hlo=/dev/null",
    "compile.topology=ironwood:2x2x1 --json=a.json",
)


def test_mistakes_are_reported_before_jax_is_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "maxpipe.compile.launch", None)  # an import of it fails
    monkeypatch.setattr(checks, "is_installed", lambda package: True)
    monkeypatch.chdir(tmp_path)
    for words, message in MISTAKES.items():
        assert exit_code(command.main, [BASE, *words.split()]) == 2
        assert message in capsys.readouterr().err, words
    for words in FINE:
        with pytest.raises(ImportError):
            command.main([BASE, "mesh.ici.fsdp=-1", *words.split()])


def test_flags_are_checked_again_once_the_devices_of_an_unknown_chip_decide_the_engine(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(checks, "is_installed", lambda package: True)
    monkeypatch.setattr(launch, "devices_of", lambda config: [None] * 4)
    monkeypatch.chdir(tmp_path)
    words = ["compile.topology=v3:2x2", "mesh.ici.stage=-1", "pipeline.num_repeats=1"]
    for schedule, flag in (("lockstep_1f1b", "--programs"), ("1f1b", "--hlo")):
        more = f"pipeline.schedule={schedule}", f"{flag}=out"
        assert exit_code(command.main, [BASE, *words, *more]) == 2
        assert f"{flag}: is for " in capsys.readouterr().err


def test_units_are_those_of_the_schedule():
    assert unit_names("F1,W10") == [("F", 1), ("W", 10)]
    words = ["pipeline.engine=mpmd", "pipeline.num_repeats=1", "pipeline.schedule=zb_h1"]
    known, config = "F0, F1, I1, W1, I0, W0", resolve(load(BASE, words), 4)
    check_units(known.replace(" ", ""), config)
    with pytest.raises(ConfigError, match=f"there is no F2, B9; there are {known}"):
        check_units("F2,F0,B9", config)
    for wrong in ("", "F", "X1", "F1,", "F-1"):
        with pytest.raises(ConfigError, match="is no unit"):
            check_units(wrong, config)


@pytest.mark.parametrize("version", ["0.0.43.dev20260801", "0.0.52", "0.0.42.1", "0.0.41"])
def test_a_libtpu_that_is_newer_than_jax_asks_for_is_refused(monkeypatch, version):
    versions = {"libtpu": version, "jax": "0.10.2"}
    needed = ['libtpu==0.0.42.*; extra == "tpu"', 'libtpu==0.0.1; extra == "old"', "scipy>=1"]
    monkeypatch.setattr(checks.metadata, "version", versions.get)
    monkeypatch.setattr(checks.metadata, "requires", {"jax": needed}.get)
    if version in ("0.0.42.1", "0.0.41"):
        checks.check_libtpu()
    else:
        with pytest.raises(ConfigError, match=r"compile.topology: jax 0.10.2 .* 'libtpu==0.0.42"):
            checks.check_libtpu()
