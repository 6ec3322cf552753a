"""The migration table from MaxText's keys to ours.

python -m maxpipe.config.migration              prints it
python -m maxpipe.config.migration README.md    puts it between the marks in that file
"""

import sys
from pathlib import Path

from maxpipe.config.maxtext import KEYS

START, END = "<!-- MaxText keys: start -->", "<!-- MaxText keys: end -->"


def table() -> str:
    """All keys as a Markdown table."""
    rows = [f"| `{key}` | {f'`{ours}`' if ours else '-'} | {differs} |" for key, (ours, differs) in KEYS.items()]
    return "\n".join(["| MaxText | maxpipe | what differs |", "|---|---|---|", *rows])


def with_table(text: str) -> str:
    """`text` with the table between its marks.

    Raises:
      ValueError: the marks are not there.
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the text has no marks {START} and {END}")
    return f"{before}{start}\n{table()}\n{end}{after}"


if __name__ == "__main__":
    if sys.argv[1:]:
        file = Path(sys.argv[1])
        file.write_text(with_table(file.read_text()))
    else:
        print(table())
