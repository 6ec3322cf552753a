"""`maxpipe checkpoint`, and what commands that read a run refuse before they read its arrays."""

import json
import shutil

import pytest

from maxpipe.checkpoint import reader
from maxpipe.checkpoint.__main__ import main
from maxpipe.checkpoint.record import record_file, step_record
from maxpipe.checkpoint.run_argument import check_variants
from maxpipe.config import Config, ConfigError
from maxpipe.config.options import update


@pytest.fixture
def run(checkpointer, directory, samples):
    samples.save(checkpointer, 10, 20)
    checkpointer.wait()
    (directory / "15.damaged").mkdir()
    (directory / "30.orbax-checkpoint-tmp").mkdir()
    return directory.parent


def test_ls_lists_steps_with_state_and_size(run, capsys):
    assert main(["ls", str(run)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["step", "state", "size", "written", "name"]
    assert [(row[0], row[1], row[-1]) for row in rows[1:]] == [
        ("10", "committed", "10"),
        ("15", "damaged", "15.damaged"),
        ("20", "committed", "20"),
        ("30", "unfinished", "30.orbax-checkpoint-tmp"),
    ]
    assert float(rows[1][2]) > 30
    assert rows[1][3] == "KiB"


def test_show_prints_meta_and_arrays(run, capsys):
    assert main(["show", str(run)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step: 20\n")
    assert "num_layers: 20" in text
    for row in ("params.weight float32 128x64 8,192 ", "step int32 scalar 1 "):
        assert row in " ".join(text.split())
    assert main(["show", str(run), "--step", "10"]) == 0
    assert capsys.readouterr().out.startswith("step: 10\n")


def test_verify_and_show_tell_damage_from_what_cannot_be_read_here(run, capsys, monkeypatch):
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out == "10: sound, 7 arrays\n20: sound, 7 arrays\n"
    oldest = run / "checkpoints" / "10"
    record = step_record(oldest)
    with monkeypatch.context() as newer:
        newer.setattr("maxpipe.checkpoint.record.FORMAT", 2)
        record_file(oldest).write_text(json.dumps(record.to_json()))
    assert main(["verify", str(run)]) == 3
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("10: UNREADABLE: format 2 is not known to this version of maxpipe")
    assert second == "20: sound, 7 arrays"
    assert main(["show", str(run), "--step", "10"]) == 3
    assert capsys.readouterr().err == first + "\n"
    record_file(run / "checkpoints" / "20").write_text("{}")
    assert main(["verify", str(run)]) == 1
    assert "20: DAMAGED: checksum" in capsys.readouterr().out
    assert main(["show", str(run)]) == 1
    assert "20: DAMAGED: checksum" in capsys.readouterr().err


def test_ls_without_permission_exits_with_3(run, capsys, monkeypatch):
    def refuse(path):  # permissions do not stop root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    assert main(["ls", str(run)]) == 3
    assert capsys.readouterr().err == f"[Errno 13] Permission denied: '{run / 'checkpoints'}'\n"


def test_verify_step_deleted_meanwhile_is_not_damage(run, capsys, monkeypatch):
    def verify_after_retention(path):
        shutil.rmtree(run / "checkpoints" / "10", ignore_errors=True)
        return verify(path)

    verify = reader.verify_step
    monkeypatch.setattr(reader, "verify_step", verify_after_retention)
    assert main(["verify", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["10: gone: a running training has just deleted it", "20: sound, 7 arrays"]


def test_command_without_the_steps_it_needs_exits_with_2(run, capsys, monkeypatch):
    (run / "empty").mkdir()
    (run / "leftover" / "5.damaged").mkdir(parents=True)
    monkeypatch.chdir(run)
    for arguments, message in [
        (["ls", "nowhere"], "DIR: there is no directory nowhere; runs lie in output_dir/run_name"),
        (["ls", "checkpoints/10"], "checkpoints/10 is one checkpoint: name its run, "),
        (["ls", "empty"], "empty holds no checkpoint"),
        (["verify", "empty"], "empty holds no checkpoint"),
        (["show", "leftover"], "leftover holds no checkpoint"),
        (["show", ".", "--step", "7"], "7 is not saved in checkpoints; there are [10, 20]"),
    ]:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_run_with_a_variant_that_is_not_imported_is_refused_with_the_flag():
    check_variants(Config())
    for key in ["model.block", "model.moe.router"]:
        with pytest.raises(ConfigError, match=rf"{key}: the run has 'mine', .*--import MODULE"):
            check_variants(update(Config(), {key: "mine"}))
