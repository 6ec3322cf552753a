"""`maxpipe.from_maxtext`: the file on standard output, notes on standard error, exit 0 or 2."""

import pytest

from maxpipe.config import load
from maxpipe.from_maxtext import main


def test_command_prints_a_file_that_loads(tmp_path, capsys):
    """Also with a line break in a word, which the comment at the top repeats."""
    words = ["base_num_decoder_layers=4", "use_iota_embed=true", "run_name=a\nsteps: 3"]
    assert main([*words, "--devices", "8"]) == 0
    printed = capsys.readouterr()
    file = tmp_path / "mine.yml"
    file.write_text(printed.out)
    config = load(str(file)).config
    assert (config.model.num_layers, config.run_name, config.steps) == (4, "a-steps-3", 150_001)
    assert printed.out.startswith("# python -m maxpipe.from_maxtext ")
    assert "note: not translated: use_iota_embed" in printed.err
    assert "note" not in printed.out


def test_command_at_the_top_of_the_file_has_no_secrets(capsys):
    assert main(["vertex_tensorboard_project=https://me:hunter2@host/x", "--devices", "8"]) == 0
    printed = capsys.readouterr()
    assert "=https://***@host/x" in printed.out.splitlines()[0]
    assert "hunter2" not in printed.out + printed.err


def test_command_lists_what_stands_in_the_way_and_ends_with_2(capsys):
    table = {
        "num_experts=2 quantization=int8 --devices 8": ["num_experts", "quantization"],
        "steps=1 --devices 8 steps=2": ["steps (command line): set twice"],
        "": ["nothing to translate"],
        "steps=1 --devices 0": ["--devices: must be at least 1; got 0"],
        "dcn_data_parallelism=2 --devices 3": ["into 2 slices; give a multiple of 2"],
        "nowhere.yml": ["cannot read nowhere.yml"],
    }
    for words, problems in table.items():
        with pytest.raises(SystemExit, match="2"):
            main(words.split())
        printed = capsys.readouterr()
        assert printed.out == ""
        assert [problem for problem in problems if problem not in printed.err] == []
        assert f"{len(problems)} problem" in printed.err
