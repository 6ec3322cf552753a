"""Wrong, hostile or damaged words, YAML and schedules end soon with lines that name keys.

They end with exit code 2, take no memory and show no traceback. FUZZ_CASES=5000 draws that many
damaged tables instead of a few.
"""

import contextlib
import os
import random
import time

import pytest
from helpers.training_process import BASE

from maxpipe.config import ConfigError, load
from maxpipe.pipeline.schedules.csv_files import csv_sizes, load_csv, to_csv
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.table import ScheduleError

CASES = int(os.environ.get("FUZZ_CASES", "60"))
DEADLINE_SECONDS = 5  # of this process's time, so that a busy machine does not matter


def refusal(*words, text=None, tmp_path=None):
    file = BASE
    if text is not None:
        file = tmp_path / "config.yml"
        file.write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load(str(file), words)
    assert time.process_time() - began < DEADLINE_SECONDS
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "nested too deeply"),
        ("base: /dev/zero", "/dev/zero has more than"),
        ("[" * 200_000, "maximum recursion depth"),
        ("x" * 2_000_000, "characters"),
    ],
    ids=["itself", "zeros", "brackets", "long"],
)
def test_load_bomb_in_a_file_is_refused_in_time(tmp_path, text, message):
    assert message in refusal(text=text, tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("output_dir=a\0b", "output_dir (command line): holds a NUL character"),
        ("run_name=" + "a" * 5000, "run_name (command line): 'aaa"),
        ("steps=1e18", "steps (command line): must be at most 2147483647"),
        ("data.sequence_length=1e8", "data.sequence_length (command line): must be at most"),
    ],
)
def test_load_value_that_nothing_can_hold_is_refused(word, message):
    assert message in refusal(word)


MUTATIONS = (
    *("0F99999999999", "999999999F0", "0F999999999", "99999F99999", "-1F0", "0X0", "F", "\0"),
    *("0F0", "1B1", "", ",", ",,,,", "\n", '"', "'", " ", "\u0661F0", "0f0", "0F0F0", "1I0"),
    *("1W0", "\r", "x" * 200_000, '"' + "x" * 200_000, "\ufeff", "3F3"),
)


def test_load_csv_damaged_files_are_accepted_or_explained(tmp_path):
    draw, path = random.Random(3), tmp_path / "schedule.csv"
    texts = [to_csv(load_schedule(name, 3, 4)) for name in ("1f1b", "zb_h1", "gpipe")]
    for _ in range(CASES):
        text = draw.choice(texts)
        for _ in range(draw.randint(1, 4)):
            start = draw.randrange(len(text) + 1)
            end = start + draw.choice((0, 1, 3, 30))
            text = text[:start] + draw.choice(MUTATIONS) + text[end:]
        path.write_text(text, encoding="utf-8", newline="")
        began = time.process_time()
        with contextlib.suppress(ScheduleError):
            load_csv(path, *csv_sizes(path))
        assert time.process_time() - began < DEADLINE_SECONDS
