"""Measures what the default tests catch: one change of the code at a time, and the tests it meets.

    python scripts/mutation/mutants.py map lines.json  # [tests/pipeline ...]
    python scripts/mutation/mutants.py run lines.json caught.tsv --count 320 --seed 7 --workers 2
    python scripts/mutation/mutants.py run lines.json again.tsv --places caught.tsv

`map` runs the default tests (of the folders given) once and notes which lines each executes, in its
own process and those it starts (Python 3.12). `run` draws places of the packages below, changes
each in a copy of the repository and runs the tests that reach its line, quickest first, until one
fails or `--seconds` of CPU (as `map` took them) are over. A row of the table has the place, the
change, and `caught` with the test, `missed`, or `unreached`. `--places` takes the changes of an
earlier table that the code still has, for other tests and a `map` of those.

`table.tsv` has 320 changes of 9bf5f920, 265 of an earlier table and 55 drawn with seed 8, of which
259 are caught, with `--seconds 20` and tests of pipeline, training, checkpoint, data, hf, sharding,
model, golden, api, devices, generate. The test that had caught a change was tried first, 16 that
were missed before are `not run again`, and one is caught by a test of plan.
"""

import argparse
import ast
import concurrent.futures
import csv
import importlib.util
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SHARES = {  # of the mutants, by what is below maxpipe/
    ("pipeline",): 0.40,
    ("training/step.py", "training/loop.py"): 0.10,
    ("checkpoint",): 0.15,
    ("data/rows.py", "data/loader.py"): 0.10,
    ("hf",): 0.15,
    ("sharding",): 0.10,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


class Mutant(NamedTuple):
    """One change: the text from `start` to `end` of a file, in bytes, becomes `text`."""

    path: str  # below maxpipe/
    line: int
    kind: str
    start: int
    end: int
    text: str
    old: str


class Outcome(NamedTuple):
    path: str
    line: int
    kind: str
    old: str
    text: str
    result: str  # caught | missed | unreached
    test: str


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the kind, the node to replace, and its new text."""
    match node:
        case ast.Compare(ops=[operator, *_]) if type(operator) in COMPARISONS:
            other = ast.Compare(
                node.left, [COMPARISONS[type(operator)](), *node.ops[1:]], node.comparators
            )
            yield "comparison", node, f"({ast.unparse(other)})"
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, f"({value + 1})"
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "branch", test, f"(not ({ast.unparse(test)}))"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", value, "None"
        case ast.Expr(value=ast.Call() as call):
            yield "call", call, "None"
        case ast.Call(args=[ast.expr() as first, *_]) if not isinstance(first, ast.Starred):
            yield "call", node, f"({ast.unparse(first)})"


def mutants_of(path: str) -> Iterator[Mutant]:
    """Yield every change of the bodies of a file's functions, outside messages and annotations."""
    source = (ROOT / "maxpipe" / path).read_bytes()
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def visit(node: ast.AST, within: bool) -> Iterator[Mutant]:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign):
            return
        if within:
            for kind, place, text in changes(node):
                start = starts[place.lineno - 1] + place.col_offset
                end = starts[place.end_lineno - 1] + place.end_col_offset
                yield Mutant(path, place.lineno, kind, start, end, text, source[start:end].decode())
        if isinstance(node, ast.FunctionDef):
            for inner in node.body:
                yield from visit(inner, True)
            return
        for inner in ast.iter_child_nodes(node):
            yield from visit(inner, within)

    yield from visit(ast.parse(source), False)


def drawn(count: int, seed: int) -> list[Mutant]:
    draw = random.Random(seed)
    chosen: list[Mutant] = []
    for places, share in SHARES.items():
        files: list[Path] = []
        for place in places:
            path = ROOT / "maxpipe" / place
            files += [path] if path.is_file() else sorted(path.rglob("*.py"))
        names = [str(path.relative_to(ROOT / "maxpipe")) for path in files]
        every = [mutant for name in names for mutant in mutants_of(name)]
        chosen += draw.sample(every, round(count * share))
    return chosen


def of_table(table: Path) -> list[Mutant]:
    """Return the changes of an earlier table whose place is still there, moved or not."""
    with table.open() as file:
        rows = [Outcome(r[0], int(r[1]), *r[2:]) for r in csv.reader(file, delimiter="\t")]
    places: dict[tuple[str, ...], list[Mutant]] = defaultdict(list)
    for path in {row.path for row in rows if (ROOT / "maxpipe" / row.path).exists()}:
        for mutant in mutants_of(path):
            places[path, mutant.kind, mutant.old, mutant.text].append(mutant)
    found = []
    for row in rows:
        if near := places[row.path, row.kind, row.old, row.text]:
            found.append(min(near, key=lambda mutant: abs(mutant.line - row.line)))
            near.remove(found[-1])
        else:
            print(f"gone: {row.path}:{row.line} {row.kind} {row.old!r}")
    return found


def tests_to_run(
    mutant: Mutant, lines: dict[str, set[tuple[str, int]]], seconds: dict[str, float], limit: float
) -> list[str]:
    """Return the tests that reach a mutant's line, quickest first, of at most `limit` seconds."""
    reached = {test for test, at in lines.items() if (mutant.path, mutant.line) in at}
    taken, total = [], 0.0
    for test in sorted(reached, key=lambda test: seconds[test]):
        total += seconds[test]
        if taken and total > limit:
            break
        taken.append(test)
    return taken


def outcome(mutant: Mutant, tests: list[str], copy: Path, limit: float) -> Outcome:
    """Return what the tests make of a mutant in a copy of the repository."""
    place = (mutant.path, mutant.line, mutant.kind, mutant.old, mutant.text)
    if not tests:
        return Outcome(*place, "unreached", "")
    file = copy / "maxpipe" / mutant.path
    original = file.read_bytes()
    file.write_bytes(original[: mutant.start] + mutant.text.encode() + original[mutant.end :])
    names = copy / "tests.txt"
    names.write_text("\n".join(tests))
    environment = os.environ | {"PYTHONPATH": str(copy)}
    # Python tells a changed file by its size and the second of its change.
    compiled = Path(importlib.util.cache_from_source(str(file)))
    compiled.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-x",
        "-q",
        "-m",
        "",
        "--tb=no",
        f"@{names}",
    ]
    try:
        ended = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900 + 10 * limit,
        )
    except subprocess.TimeoutExpired:
        return Outcome(*place, "caught", "does not end")
    finally:
        file.write_bytes(original)
        compiled.unlink(missing_ok=True)
    if ended.returncode == 0:
        return Outcome(*place, "missed", f"{len(tests)} tests pass")
    failed = [text for text in ended.stdout.splitlines() if text.startswith(("FAILED", "ERROR"))]
    return Outcome(
        *place, "caught", failed[0].split(" - ")[0] if failed else f"exit code {ended.returncode}"
    )


def write_map(target: Path, tests: list[str]) -> None:
    """Run the default tests (below `tests`, where given) and gather what `line_map` writes."""
    folder = Path(tempfile.mkdtemp(prefix="lines-"))
    environment = os.environ | {
        "LINES_TO": str(folder),
        "PYTHONPATH": f"{Path(__file__).parent}:{ROOT}",
    }
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "line_map", *tests], cwd=ROOT, env=environment
    )
    lines: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text())
        lines[record["test"]] |= {(name, line) for name, line in record["lines"]}
    seconds = {}
    for path in folder.glob("*.seconds"):
        record = json.loads(path.read_text())
        seconds[record["test"]] = record["seconds"]
    failed = {json.loads(path.read_text())["test"] for path in folder.glob("*.failed")}
    record = {
        test: {"seconds": seconds[test], "lines": sorted(lines[test])}
        for test in sorted(seconds.keys() - failed)
    }
    target.write_text(json.dumps(record))
    shutil.rmtree(folder)
    print(
        f"{len(record)} tests, {sum(seconds.values()):.0f} s; {len(failed)} failed and are left out"
    )


def run(arguments: argparse.Namespace) -> None:
    record = json.loads(arguments.map.read_text())
    lines = {test: {(name, line) for name, line in of["lines"]} for test, of in record.items()}
    seconds = {test: of["seconds"] for test, of in record.items()}
    mutants = (
        of_table(arguments.places) if arguments.places else drawn(arguments.count, arguments.seed)
    )
    copies: queue.Queue[Path] = queue.Queue()
    workspace = Path(tempfile.mkdtemp(prefix="mutants-"))
    for number in range(arguments.workers):
        copy = workspace / str(number)
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", ".venv"))
        copies.put(copy)

    def tried(mutant: Mutant) -> Outcome:
        tests = tests_to_run(mutant, lines, seconds, arguments.seconds)
        copy = copies.get()
        try:
            return outcome(mutant, tests, copy, arguments.seconds)
        finally:
            copies.put(copy)

    with (
        concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool,
        arguments.table.open("w") as file,
    ):
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        for result in pool.map(tried, mutants):
            table.writerow(result)
            file.flush()
    shutil.rmtree(workspace)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    mapping = commands.add_parser("map")
    mapping.add_argument("map", type=Path)
    mapping.add_argument("tests", nargs="*")
    running = commands.add_parser("run")
    running.add_argument("map", type=Path)
    running.add_argument("table", type=Path)
    running.add_argument("--count", type=int, default=320)
    running.add_argument("--seed", type=int, default=7)
    running.add_argument("--places", type=Path)
    running.add_argument("--seconds", type=float, default=60)
    running.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.command == "map":
        write_map(arguments.map, arguments.tests)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
