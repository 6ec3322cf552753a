"""Print runs as text: a line for each, everything about one, or how configurations differ."""

from collections.abc import Sequence

from maxpipe.comparison.recorded import KeyChange, Number, Recorded, changed_keys, differing_keys
from maxpipe.config.values import as_written
from maxpipe.render.columns import columns
from maxpipe.telemetry.console import format_count, format_seconds

HEADER = ("run", "step", "loss", "eval loss", "best eval", "bits/byte", "tokens/s", "MFU")
_LONGEST_VALUE = 60  # characters of a value


def runs_text(runs: Sequence[Recorded]) -> str:
    return _columns([HEADER, *(figures(run) for run in runs)])


def comparison_text(runs: Sequence[Recorded]) -> str:
    text = runs_text(runs)
    unknown = [run.name for run in runs if not run.settings]
    if unknown:
        text += f"\nwithout a readable config.yml: {', '.join(unknown)}\n"
    keys = differing_keys(runs)
    if len(runs) - len(unknown) < 2:
        return text
    if not keys:
        return f"{text}\nthe configurations are the same, but for names and places\n"
    across = [("key", *(run.name for run in runs))]
    across += [(key, *(value_text(run, key) for run in runs)) for key in keys]
    down = [("run", *keys), *((run.name, *(value_text(run, key) for key in keys)) for run in runs)]
    tables = _columns(down), _columns(across)
    return f"{text}\n{min(tables, key=lambda table: max(map(len, table.splitlines())))}"


def run_text(run: Recorded) -> str:
    """Return everything about one run in lines."""
    tokens = run.tokens(run.step)
    spent = [f"{name} {format_seconds(value)}" for name, value in run.seconds.items() if value >= 1]
    lines = {
        "directory": str(run.root),
        **dict(zip(HEADER[1:], figures(run)[1:], strict=True)),
        "tokens": "-" if tokens is None else f"{tokens:,}",
        "s/step": _figure(run.median("step_seconds"), ".4g"),
        "grad norm": _figure(run.steps["grad_norm"][-1] if run.step else None, ".4g"),
        "time spent": ", ".join(spent) or "-",
    }
    text = f"{run.name}\n" + "".join(f"  {name:<12}{value}\n" for name, value in lines.items())
    if not run.settings:
        return f"{text}  there is no readable config.yml\n"
    keys = changed_keys(run)
    width = max(map(len, keys), default=0) + 2
    settings = "".join(f"  {key:<{width}}{value_text(run, key)}\n" for key in keys)
    return f"{text}\n  configuration, where it differs from the defaults:\n{settings}"


def figures(run: Recorded) -> tuple[str, ...]:
    """Return the cells of a run below `HEADER`."""
    best, rate = run.best_eval, run.median("tokens_per_second")
    return (
        run.name,
        f"{run.step}/{run.total_steps or '?'}",
        _figure(run.loss, ".4f") if run.last_is_finite else "not finite",
        _figure(run.eval_loss, ".4f"),
        f"{best[1]:.4f} @{best[0]}" if best else "-",
        _figure(run.bits_per_byte, ".4f"),
        "-" if rate is None else format_count(rate),
        _figure(run.median("mfu"), ".1%"),
    )


def value_text(run: Recorded, key: str) -> str:
    """Return the value of a key, shortened, with earlier ones of the run; "?" if not known, "-" if
    without effect.
    """
    if not run.settings or run.is_idle(key):
        return "-" if run.settings else "?"
    text = history_text(key, run.settings.get(key), run.changes)
    return f"{text[: _LONGEST_VALUE - 3]}..." if len(text) > _LONGEST_VALUE else text or "''"


def history_text(key: str, value: object, changes: Sequence[KeyChange]) -> str:
    """Return the value of a key after the earlier ones that a run's changes tell of."""
    before = [
        f"{as_written(old)} to step {step}, " for step, name, old, _ in changes if name == key
    ]
    return "".join(before) + as_written(value)


def _figure(value: Number, form: str) -> str:
    return "-" if value is None else format(value, form)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(columns(rows)) + "\n"
