"""Rows of cells in columns."""

import pytest

from maxpipe.render.columns import columns


def test_columns_are_as_wide_as_their_widest_cell_and_the_first_is_to_the_left():
    assert columns([["name", "s"], ["a", "1.25"], ["longer", "-"]]) == [
        "name       s",
        "a       1.25",
        "longer     -",
    ]

    # Those to the left end without spaces.
    assert columns([["a", "b", "why"], ["1", "22", ""]], left=(0, 2)) == ["a   b  why", "1  22"]
    with pytest.raises(ValueError, match="argument 2"):
        columns([["a", "b"], ["c"]])
