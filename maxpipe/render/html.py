"""Write an HTML page that loads nothing else: one shell and one look for all pages."""

from collections.abc import Iterable, Sequence
from html import escape

from maxpipe.render.chart import DARK, LIGHT

STYLE = """
*{box-sizing:border-box}
body{margin:0;padding:28px 32px 48px;background:var(--ground);color:var(--ink);
  font:14px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:20px;margin:0 0 2px}
p{margin:0 0 22px;color:var(--muted)}
table{border-collapse:collapse;margin:0 0 10px;font-variant-numeric:tabular-nums}
th,td{padding:5px 14px 5px 0;text-align:right;border-bottom:1px solid var(--line);
  white-space:nowrap}
th{font-weight:500;color:var(--muted)}
th:first-child,td:first-child{text-align:left}
#tip{position:fixed;display:none;pointer-events:none;z-index:1;max-width:520px;padding:7px 10px;
  border-radius:7px;
  background:var(--ink);color:var(--ground);font-size:12.5px;line-height:1.45;white-space:pre-line;
  box-shadow:0 4px 16px #0004}
"""
# Shows `text` next to the pointer; pages hide it by `tip.style.display = "none"`.
SCRIPT = """
const tip = document.getElementById("tip");
const show = (event, text) => {
  tip.textContent = text;
  tip.style.display = "block";
  const right = event.clientX + 14 + tip.offsetWidth > innerWidth;
  tip.style.left = (right ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
};
"""


def document(title: str, body: str, style: str, script: str) -> str:
    """Return a page in the light or dark colours that the reader prefers.

    Args:
      title: title of the window.
      body: HTML of the body.
      style: CSS that is added to the CSS of all pages.
      script: JavaScript that runs after the script of all pages.
    """
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
{STYLE}{style}</style>
</head>
<body>
{body}
<div id="tip" role="tooltip"></div>
<script>{SCRIPT}{script}</script>
</body>
</html>
"""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table of cells, which are HTML.

    Args:
      heads: the texts of the first row.
      rows: the rows below it.
      kind: CSS class of the table; "" for none.
    """
    lines = ["".join(f"<th>{escape(text)}</th>" for text in heads)]
    lines += ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    style = f' class="{kind}"' if kind else ""
    return f"<table{style}>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
