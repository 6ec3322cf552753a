import json
import shutil

import pytest

from maxpipe.checkpoint.__main__ import main
from maxpipe.checkpoint.record import record_file, step_record


@pytest.fixture
def run(checkpointer, directory, samples):
    """Return a run directory with steps 10 and 20, a damaged 15 and an unfinished step."""
    samples.save(checkpointer, 10, 20)
    checkpointer.wait()
    (directory / "15.damaged").mkdir()
    (directory / "30.orbax-checkpoint-tmp").mkdir()
    return directory.parent


def test_ls_lists_steps_with_state_and_size(run, capsys):
    for inner in ["", "checkpoints"]:
        assert main(["ls", str(run / inner)]) == 0
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


def test_verify_prints_verdicts_and_exits_with_1_for_damage(run, capsys):
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out == "10: sound, 7 arrays\n20: sound, 7 arrays\n"
    data = max(
        (run / "checkpoints" / "10" / "arrays").rglob("*"), key=lambda path: path.stat().st_size
    )
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert main(["verify", str(run)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("10: DAMAGED: ")
    assert out.endswith("\n20: sound, 7 arrays\n")
    assert err == ""


def test_show_prints_meta_and_arrays(run, capsys):
    assert main(["show", str(run)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step: 20\n")
    assert "num_layers: 20" in text
    table = {
        line.split()[0]: line.split()[1:4] for line in text.splitlines() if "[" not in line and line
    }
    assert table["params.weight"] == ["float32", "128x64", "8,192"]
    assert table["params.scale"] == ["bfloat16", "33", "33"]
    assert table["step"] == ["int32", "scalar", "1"]
    assert table["iterator"] == ["int64", "4x3", "12"]
    assert main(["show", str(run), "--step", "10"]) == 0
    assert capsys.readouterr().out.startswith("step: 10\n")


def test_verify_newer_format_exits_with_3_after_other_steps(run, capsys, monkeypatch):
    oldest = run / "checkpoints" / "10"
    record = step_record(oldest)
    with monkeypatch.context() as newer:
        newer.setattr("maxpipe.checkpoint.record.FORMAT", 2)
        record_file(oldest).write_text(json.dumps(record.to_json()))
    assert main(["verify", str(run)]) == 3
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "10: UNREADABLE: checkpoint format 2 is not known to this version (knows 1)"
    )
    assert second == "20: sound, 7 arrays"
    assert main(["show", str(run), "--step", "10"]) == 3
    assert capsys.readouterr().err == first + "\n"
    record_file(run / "checkpoints" / "20").write_text("{}")
    assert main(["verify", str(run)]) == 1
    capsys.readouterr()
    assert main(["show", str(run)]) == 1
    assert "20: DAMAGED: checksum" in capsys.readouterr().err


def test_command_without_permission_exits_with_3(run, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as refused:
        refused.setattr("pathlib.Path.read_bytes", refuse)  # permissions do not stop root
        assert main(["verify", str(run)]) == 3
        lines = capsys.readouterr().out.splitlines()
        assert [line.partition(": record cannot be read")[0] for line in lines] == [
            "10: UNREADABLE",
            "20: UNREADABLE",
        ]
        assert main(["show", str(run)]) == 3
        assert "Permission denied" in capsys.readouterr().err
    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    assert main(["ls", str(run)]) == 3
    assert capsys.readouterr().err == f"[Errno 13] Permission denied: '{run / 'checkpoints'}'\n"


def test_verify_step_deleted_meanwhile_is_not_damage(run, capsys, monkeypatch):
    from maxpipe.checkpoint import reader

    def verify_after_retention(path):
        shutil.rmtree(run / "checkpoints" / "10", ignore_errors=True)
        return verify(path)

    verify = reader.verify_step
    monkeypatch.setattr(reader, "verify_step", verify_after_retention)
    assert main(["verify", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["10: gone: a running training has just deleted it", "20: sound, 7 arrays"]


def test_command_without_steps_exits_with_2(run, capsys, monkeypatch):
    (run / "empty").mkdir()
    (run / "leftover" / "5.damaged").mkdir(parents=True)
    for arguments, message in [
        (["ls", "nowhere"], "there is no directory nowhere"),
        (["ls", "n" * 300], "nn cannot be read: File name too long"),
        (["verify", "."], "holds no checkpoints"),
        (["show", "leftover"], "holds no committed checkpoint"),
        (
            ["show", "checkpoints", "--step", "7"],
            "step 7 is not committed in checkpoints; there are [10, 20]",
        ),
    ]:
        monkeypatch.chdir(run / "empty" if arguments[1] == "." else run)
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_command_of_what_is_no_run_says_what_to_name(run, capsys):
    runs = run / "runs"
    (run / "other" / "checkpoints" / "new").mkdir(parents=True)
    assert main(["ls", str(run / "other" / "checkpoints" / "new")]) == 2
    assert "is one checkpoint" not in capsys.readouterr().err
    (runs / "run").mkdir(parents=True)
    (run / "checkpoints").rename(runs / "run" / "checkpoints")
    for name, message in {
        "": "is a directory of runs: name one of them, such as",
        "run/checkpoints/10": "is one checkpoint: name its run, ",
        "rum": "rum; did you mean ",
        "elsewhere": "runs lie in output_dir/run_name",
    }.items():
        assert main(["ls", str(runs / name)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert (f"{runs}/run" in error) == (name in ("", "run/checkpoints/10", "rum"))
