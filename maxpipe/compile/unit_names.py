"""Read the units that `maxpipe.compile --units F1,B1` names, before JAX is imported."""

import re

from maxpipe.config import Config, ConfigError, Problem
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.pipeline.schedules.table import ScheduleError

UNITS = "--units"
_UNIT = re.compile(r"([FBIW])(\d+)", re.ASCII)


def unit_names(words: str) -> list[tuple[str, int]]:
    """Return the kinds and chunks of the units that a flag names, such as "F1,B1".

    Raises:
      ConfigError: a word does not name a unit.
    """
    names = []
    for word in words.split(","):
        match = _UNIT.fullmatch(word)
        if match is None:
            message = f"{word!r} is no unit; give a kind and a chunk each, such as F1,B1"
            raise ConfigError(Problem(UNITS, message))
        names.append((match[1], int(match[2])))
    return names


def check_units(words: str, config: Config) -> None:
    """Check that the schedule of a resolved configuration has the units that a flag names.

    Raises:
      ConfigError: it lacks one, a word does not name a unit, or there is no such schedule.
    """
    named = [f"{kind}{chunk}" for kind, chunk in unit_names(words)]
    try:
        table = build_table(config)
    except ScheduleError as error:
        # Every reason begins with its key.
        raise ConfigError(*(Problem("", reason) for reason in error.reasons)) from error
    forward = [f"F{chunk}" for chunk in range(table.num_chunks)]
    # A program is sliced into F and B, or into F, I and W; evaluation has F alone.
    backward = "IW" if "W" in table.kinds else "B" if "B" in table.kinds else ""
    known = forward + [f"{k}{c}" for c in reversed(range(table.num_chunks)) for k in backward]
    if missing := [name for name in named if name not in known]:
        message = f"there is no {', '.join(missing)}; there are {', '.join(known)}"
        raise ConfigError(Problem(UNITS, message))
