"""Measure what supervision costs a step: guard, watchdog, digests of batches and checkpoints.

Whole steps with and without them differ by less than they scatter. So each part is timed by itself,
in turns with the others, and set against the step; the guard, which is fused into the update, as
the difference of two updates.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]

TURNS_PER_ROUND = 20
SAVE_EVERY = 100  # steps that share the digests of a checkpoint
CALLS = 1000  # of what is too quick to be timed once
SIZE = {
    "model.num_layers": 4,
    "model.embed_dim": 256,
    "model.num_query_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 64,
    "model.mlp_dim": 1024,
    "model.vocab_size": 1024,
    "data.sequence_length": 128,
    "data.global_batch_size": 16,
    "eval.every": 0,
    "pipeline.engine": "sequential",
}
STEP, GUARD, SPIKES, WATCHDOG, DIGEST = (
    "the step",
    "guard",
    "guard and spike filter",
    "watchdog",
    "batch digest",
)
CHECKPOINT = f"digests of a checkpoint, every {SAVE_EVERY} steps"


def run(make_case: Callable[..., Any], rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Time a step on one device, and each part of its supervision.

    Args:
      make_case: `run.Case`, called as make_case(name, values, num_devices).
      rounds: of `TURNS_PER_ROUND` turns.
      say: told when everything is compiled.

    Returns:
      Rows with "what" and "seconds" (see `seconds`), one of each turn; the first is the step.
    """
    from maxpipe.checkpoint.arrays import named_leaves
    from maxpipe.checkpoint.digest import digests
    from maxpipe.supervise.process import Watchdog, running
    from maxpipe.training.batches import batch_digest

    case = make_case(STEP, SIZE, 1)
    bare, guarded = Update(guard=False), Update()
    filtered = Update(**{"optimizer.spike_window": 128})
    watchdog = Watchdog(startup_seconds=3600, step_seconds=1800)
    with running(watchdog.watch, "watchdog"):
        parts: dict[str, Callable[[], float]] = {
            STEP: lambda: seconds(case.step),
            GUARD: lambda: guarded() - bare(),
            SPIKES: lambda: filtered() - bare(),
            WATCHDOG: lambda: (
                seconds(lambda: [watchdog.progress("step 1") for _ in range(CALLS)]) / CALLS
            ),
            DIGEST: lambda: seconds(lambda: batch_digest(case.batch).block_until_ready()),
            CHECKPOINT: lambda: seconds(lambda: digests(named_leaves(case.state))) / SAVE_EVERY,
        }
        for part in parts.values():
            part()
        say("compiled")
        turns = [
            {what: part() for what, part in parts.items()} for _ in range(rounds * TURNS_PER_ROUND)
        ]
    return [{"what": what, "seconds": [turn[what] for turn in turns]} for what in parts]


def seconds(work: Callable[[], Any]) -> float:
    """Return the time of a call: CPU time, which other processes do not affect, or wall time."""
    import jax

    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    started = clock()
    work()
    return clock() - started


class Update:
    """The update of a step by itself, compiled: a call runs it once and returns its seconds.

    Args:
      guard: without it every update is accepted, which the compiler knows.
      **values: keys of the configuration that differ from `SIZE`.
    """

    def __init__(self, guard: bool = True, **values: Any):
        import jax
        import jax.numpy as jnp

        from maxpipe.config import Config, replace
        from maxpipe.model import parameters
        from maxpipe.model.program import ModelProgram
        from maxpipe.training.update import Optimizer

        config = replace(Config(), **SIZE | values)
        specs = ModelProgram(config.model, lambda *_: None).specs
        optimizer = Optimizer(config.optimizer, specs)
        key = jax.random.key(0)
        params = parameters.init_params({name: specs[name] for name in ("embed", "head")}, key)
        params["layers"] = parameters.init_layers(
            specs["layers"], key, jnp.arange(config.model.num_layers)
        )

        def update(state: Any, gradients: Any, norm: Any) -> Any:
            params, opt_state, history, step = state
            if guard:
                accept, history = optimizer.spike_filter(history, norm, norm, jnp.isfinite(norm))
            else:
                accept = jnp.bool_(True)
            return (
                *optimizer.update(params, gradients, opt_state, step, norm, accept),
                history,
                step + 1,
            )

        self._gradients = jax.tree.map(lambda p: jnp.full_like(p, 1e-3), params)
        self._state = (params, optimizer.init(params), optimizer.spike_filter.init(), jnp.int32(0))
        self._update = jax.jit(update, donate_argnums=0)
        self._norm = jnp.float32(1)

    def __call__(self) -> float:
        import jax

        def work() -> None:
            self._state = jax.block_until_ready(
                self._update(self._state, self._gradients, self._norm)
            )

        return seconds(work)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    step = statistics.median(rows[0]["seconds"])
    lines = ["| | median ms | of the step % |", "| --- | ---: | ---: |"]
    for row in rows:
        median = statistics.median(row["seconds"])
        lines.append(f"| {row['what']} | {1e3 * median:.4f} | {100 * median / step:.3f} |")
    return "\n".join(lines)
