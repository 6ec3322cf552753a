"""Write the tables that docs/playground draws: every schedule in a few sizes.

    python scripts/make_playground.py            write docs/playground/tables.js
    python scripts/make_playground.py --check    exit with 1 if the file is not up to date

A table is a word for each kind of unit: its letter, then the ticks of its units, microbatch by
microbatch, as two digits of base 36, or two dots where there is no such unit.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.table import Table

FILE = Path(__file__).resolve().parents[1] / "docs" / "playground" / "tables.js"
STAGES, MICROBATCHES, REPEATS = (2, 4, 8), (4, 8, 16, 32), (1, 2, 4)
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def word_of(table: Table, kind: str) -> str:
    ticks = table.ticks[kind].ravel().tolist()
    return kind + "".join(DIGITS[t // 36] + DIGITS[t % 36] if t >= 0 else ".." for t in ticks)


def tables() -> Iterator[Table]:
    """Yield every schedule in all sizes that it has."""
    for name, facts in SCHEDULES.items():
        for stages in STAGES:
            for microbatches in MICROBATCHES:
                for repeats in [facts.repeats] if facts.repeats else REPEATS:
                    yield load_schedule(name, stages, microbatches, repeats)


def text() -> str:
    """Return the script: SIZES, SCHEDULES and TABLES."""
    words, facts = {}, {}
    for table in tables():
        sizes = table.num_stages, table.num_microbatches, table.num_repeats
        words[" ".join(map(str, (table.name, *sizes)))] = " ".join(
            word_of(table, kind) for kind in table.kinds
        )
        facts[table.name] = {
            "repeats": SCHEDULES[table.name].repeats,
            "lockstep": table.lockstep,
            "placement": table.placement,
        }
    sizes_of = {"stages": STAGES, "microbatches": MICROBATCHES, "repeats": REPEATS}
    parts = {"SIZES": sizes_of, "SCHEDULES": facts, "TABLES": words}
    lines = (f"const {name} = {json.dumps(part, indent=0)};\n" for name, part in parts.items())
    return "// Written by scripts/make_playground.py.\n" + "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args().check:
        FILE.write_text(text(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text():
        print(f"{FILE} is not up to date; run python scripts/make_playground.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
