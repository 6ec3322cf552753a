"""Files that `maxpipe.compile` writes: their endings, collisions, and profiles of known chips."""

import gzip
from pathlib import Path
from types import SimpleNamespace

import pytest

from maxpipe.compile.output_files import check_files, packed_trace
from maxpipe.config import ConfigError, load
from maxpipe.config.cli import Arguments

BASE = Path(__file__).parents[2] / "configs" / "base.yml"


def check(tmp_path, topology="v5p:2x2x1", save="", **files):
    """Check files by flag, in a directory that can be written."""
    flags = dict.fromkeys(("json", "hlo", "profile", "profile_trace"))
    paths = {name: file if "/" in file else str(tmp_path / file) for name, file in files.items()}
    words = [f"compile.topology={topology}", f"compile.save={save and tmp_path / save}"]
    config = tmp_path / "tiny.yml"
    config.write_text(f"base: {BASE}\n")
    loaded = load(str(config), words)
    check_files(Arguments(str(config), loaded, SimpleNamespace(**(flags | paths))))


def test_files_of_their_own_with_the_endings_of_what_they_hold_are_accepted(tmp_path):
    check(tmp_path, "v5p-128", "s.bin", json="a", hlo="b", profile="a.html", profile_trace="a.json")
    check(tmp_path, profile="/dev/null", profile_trace="/dev/null", hlo="/dev/null")


def test_files_with_other_endings_or_two_uses_are_refused(tmp_path):
    (tmp_path / "link").symlink_to("a")
    for files, message in (
        ({"profile": "one.txt"}, r"--profile: writes \.html, which .*one\.txt does not end in"),
        ({"profile_trace": "one.gz"}, r"--profile-trace: writes \.json\.gz or \.json, which .*gz"),
        ({"json": "a", "hlo": "a"}, r"--hlo: would replace .*/a, which --json writes"),
        ({"json": "a", "hlo": "link"}, r"--hlo: would replace .*/link, which --json"),
        ({"json": "a", "save": "a"}, r"--json: would replace .*/a, which compile\.save writes"),
        ({"json": "tiny.yml"}, r"--json: would replace .*tiny\.yml, which is read"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(tmp_path, **files)


def test_profiles_for_devices_without_a_prediction_are_refused(tmp_path):
    for topology, reason in (
        ("ironwood:2x2x1", "the clock of tpu7x is unpublished; there are predictions for v4, v5e"),
        ("v3:2x2", "v3:2x2 is in no table of chips"),
    ):
        with pytest.raises(ConfigError) as info:
            check(tmp_path, topology, profile="a.html", profile_trace="a.json.gz")
        assert str(info.value).count(reason) == 2
        check(tmp_path, topology, json="a.json")


def test_a_trace_is_compressed_as_the_ending_of_its_file_says():
    for file in ("step.json.gz", "/dev/stdout"):
        assert gzip.decompress(packed_trace(file, b"{}")) == b"{}"
    assert packed_trace("step.json", b"{}") == b"{}"
