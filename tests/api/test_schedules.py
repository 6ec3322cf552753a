"""`maxpipe.schedule` simulates what the command draws, and draws itself in a notebook."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

import maxpipe
import maxpipe.schedule


def test_schedule_prints_what_the_command_prints(capsys):
    words = ["stages=2", "microbatches=3", "backward=2.2"]
    options = {"stages": 2, "microbatches": 3, "backward": 2.2}
    for names, flags in ((["lockstep_1f1b"], []), (["lockstep_1f1b", "zb_h1"], ["--compare"])):
        assert maxpipe.schedule.main([*names, *flags, *words]) == 0
        assert f"{maxpipe.schedule(*names, **options)!r}\n" == capsys.readouterr().out


def test_schedule_has_the_figures_of_each():
    lockstep, zero_bubble = maxpipe.schedule("lockstep_1f1b", "zb_h1", stages=4, microbatches=8)
    assert lockstep.makespan == 11 * 3  # (M + S - 1)(F + B)
    assert lockstep.bubble_fraction == pytest.approx(3 / 11)
    assert lockstep.peak_in_flight.tolist() == [7, 5, 3, 1]
    assert zero_bubble.makespan < lockstep.makespan


def test_schedule_takes_a_time_for_each_stage_and_switches():
    (uneven,) = maxpipe.schedule("1f1b", stages=2, microbatches=2, forward=[1, 3.0])
    assert np.nanmin(uneven.end["F"] - uneven.start["F"]) == 1
    assert np.nanmax(uneven.end["F"] - uneven.start["F"]) == 3
    (delayed,) = maxpipe.schedule("lockstep_1f1b", delay_activation_forwarding=True)
    (plain,) = maxpipe.schedule("lockstep_1f1b", delay_activation_forwarding=False)
    assert delayed.table.num_ticks > plain.table.num_ticks


def test_schedule_draws_a_chart_of_each_in_a_notebook():
    for names in (["lockstep_1f1b"], ["lockstep_1f1b", "zb_v"]):
        html = maxpipe.schedule(*names, stages=2, microbatches=3)._repr_html_()
        tree = ElementTree.fromstring(f"<body>{html}</body>")
        charts = [each for each in tree.iter() if each.tag.endswith("svg")]
        assert len(charts) == len(names)
        assert len({chart.get("data-scale") for chart in charts}) == 1  # one scale of time
        assert ("<table>" in html) == (len(names) > 1)
        assert all(name in html for name in names)
        assert "<script" not in html  # notebooks do not run them when they are opened again


def test_schedule_csv_holds_its_table(tmp_path):
    schedules = maxpipe.schedule("zb_h1", stages=3, microbatches=4)
    file = tmp_path / "own.csv"
    file.write_text(schedules.to_csv())
    (again,) = maxpipe.schedule(file)
    assert again.makespan == schedules[0].makespan
    assert again.table.num_stages == 3
    with pytest.raises(ValueError, match="name one schedule"):
        maxpipe.schedule("zb_h1", "1f1b").to_csv()


def test_schedule_refuses_with_a_value_error():
    for names, options, message in (
        (["1f1b"], {"stage": 4}, "did you mean stages?"),
        (["1f1b"], {"stages": 0}, "stages: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            maxpipe.schedule(*names, **options)
        assert "pipeline." not in str(caught.value)
