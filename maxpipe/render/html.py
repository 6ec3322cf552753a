"""Write an HTML page that loads nothing else: one shell and one look for all pages."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from maxpipe.render.chart import DARK, LIGHT


def shipped(*names: str) -> str:
    """Return the texts of files of this package by their paths there, such as "render/page.css"."""
    return "".join(files("maxpipe").joinpath(name).read_text(encoding="utf-8") for name in names)


def document(title: str, body: str, style: str, script: str) -> str:
    """Return a page, whose script may call `show(event, text)` for a text next to the pointer."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
:root{{{LIGHT}}}
@media(prefers-color-scheme:dark){{:root{{{DARK}}}}}

{shipped("render/page.css")}{style}</style>
</head>
<body>
{body}
<div id="tip" role="tooltip"></div>
<script>
{shipped("render/page.js")}{script}</script>
</body>
</html>
"""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table of a CSS class: texts of the first row, and cells below it that are HTML."""
    lines = ["".join(f"<th>{escape(text)}</th>" for text in heads)]
    lines += ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    style = f' class="{kind}"' if kind else ""
    return f"<table{style}>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
