"""Test scripts/take_pictures.py."""

import shutil
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from helpers.scripts import load_script

take_pictures = load_script("take_pictures")
SVG = "{http://www.w3.org/2000/svg}"
PROGRAM = """
import time
print("\\x1b[1mheader\\x1b[0m <a>")
print("step 1 |###", end="\\r", flush=True)
print("step 2 |#", end="", flush=True)
time.sleep(60)
"""


def test_terminal_shows_what_is_left_of_lines_written_again_and_of_a_command_that_ended():
    lines = take_pictures.shown_on_terminal([sys.executable, "-c", PROGRAM], "step 2 |#")
    assert lines == ["header <a>", "step 2 |###"]
    with pytest.raises(RuntimeError, match="no 'never' in:\nfailed"):
        take_pictures.shown_on_terminal([sys.executable, "-c", "print('failed')"], "never")


def test_picture_of_a_terminal_has_a_text_per_line():
    picture = ElementTree.fromstring(take_pictures.as_svg(["a <b> & c", "", "d"], "two lines"))
    assert [text.text for text in picture.iter(f"{SVG}text")] == ["a <b> & c", "d"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser")
def test_picture_of_a_page_is_a_png(tmp_path):
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text("<h1>page</h1>")
    take_pictures.photograph(page.as_uri(), picture, 200)
    assert picture.read_bytes().startswith(b"\x89PNG")
