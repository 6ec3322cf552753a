"""Records golden values, or compares with them: `python tests/golden/record.py [NAME ...]`.

record.py                      records what has no values yet
record.py NAME --reason "..."  records a configuration again, with the reason
record.py --compare-bits       says for each configuration whether the current code gives the
                               recorded bits, else the largest relative difference; exit code 1
                               if one is above 1e-6
record.py --store-runs         trains the stored runs that do not exist to their checkpoint
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden import recording
from golden.configurations import STORED_RUNS
from golden.values import Values, above, differences

ALLOWED = 1e-6  # on the machine that recorded them


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*recording.NAMES, []])
    parser.add_argument("--reason", default="")
    parser.add_argument("--compare-bits", action="store_true")
    parser.add_argument("--store-runs", action="store_true")
    options = parser.parse_args(arguments)
    if options.store_runs:
        if existing := [name for name in STORED_RUNS if (recording.STORED / name).exists()]:
            sys.exit(f"{', '.join(existing)}: written by an earlier version, which is their use")
        with tempfile.TemporaryDirectory() as scratch:
            recording.store_runs(Path(scratch))
        return 0
    if options.compare_bits:
        return _compare_bits(options.names or recording.NAMES)
    return _record(options.names, " ".join(options.reason.split()))


def _run(names: list[str]) -> dict[str, Values]:
    with tempfile.TemporaryDirectory() as scratch:
        results = recording.run_and_read(names, Path(scratch))
    if failed := [f"{name} failed: {log}" for name, log in results.items() if isinstance(log, str)]:
        sys.exit("\n".join(failed))
    return results


def _record(names: list[str], reason: str) -> int:
    missing = [name for name in recording.NAMES if not (recording.VALUES / f"{name}.json").exists()]
    names = names or (recording.NAMES if reason else missing)
    if (existing := [name for name in names if name not in missing]) and not reason:
        sys.exit(f'{", ".join(existing)}: already recorded; say why they change: --reason "..."')
    for name, values in _run(names).items():
        recording.save(name, values, reason or "the first values")
        print(f"recorded {name}")
    return 0


def _compare_bits(names: list[str]) -> int:
    failed = False
    for name, actual in _run(names).items():
        recorded = recording.load(name)
        if recorded["machine"] != recording.machine():
            print(f"{name}: recorded on another machine or with other packages")
        found = differences(recorded["values"], actual)
        failed |= bool(above(found, ALLOWED))
        where = max(found, key=found.__getitem__)
        largest = f"differs by {found[where]:.1e} at most ({where})"
        print(f"{name}: {'equal bits' if recorded['values'] == actual else largest}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
