"""Write a checkpoint of a run for `maxpipe.export`: as a Hugging Face folder or as one file."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable
from maxpipe.checkpoint.reader import open_parameters
from maxpipe.checkpoint.record import Record
from maxpipe.checkpoint.run_argument import RUN_DIR, check_variants
from maxpipe.checkpoint.steps import StepStore
from maxpipe.comparison.recorded import read_run
from maxpipe.comparison.table import history_text
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import from_record
from maxpipe.config.sections import Config
from maxpipe.data.chat_template import is_chat, without_token
from maxpipe.data.tokenizers import TOKENIZER, Tokenizer
from maxpipe.generate.chat import end_of_turn, find_chat_template
from maxpipe.generate.text import find_tokenizer
from maxpipe.hf.adapters import export_adapter
from maxpipe.hf.exporter import export, export_file
from maxpipe.hf.family import choose_family
from maxpipe.hf.model_card import stop_arguments
from maxpipe.hf.origin import ORIGIN, origin_of
from maxpipe.telemetry.recorder import METRICS
from maxpipe.training.resuming import VERSIONS

DONE, NOT_READ = 0, 1  # exit codes


def launch(flags: argparse.Namespace, store: StepStore, steps: list[int]) -> int:
    """Write the checkpoint that a command line names, and return the exit code.

    Args:
      store, steps: the checkpoints to read, from `find_checkpoint`.

    Raises:
      ConfigError: no model type fits, the target cannot be written, or files of the run cannot be
        read.
    """
    step = steps[-1]
    what = f"step {step}" if len(steps) == 1 else f"mean of steps {', '.join(map(str, steps))}"
    try:
        record = store.record(step)
        config = from_record(record.meta["config"])
        check_variants(config)
        dtype = flags.dtype or config.model.param_dtype
        if flags.safetensors:
            target = Path(flags.safetensors)
            with open_parameters(store, steps) as reader, _writing("--safetensors", target):
                count = export_file(reader, config, target, dtype)
            print(f"{target}: {what}, {count} tensors")
            return DONE
        target = Path(flags.hf or flags.adapter)
        with store.local_files(TOKENIZER) as companions, store.local_files(ORIGIN) as kept:
            origin = origin_of(config, kept)
            family = choose_family(config, flags.type, origin)
            if flags.adapter:
                with open_parameters(store, steps) as reader, _writing("--adapter", target):
                    names = export_adapter(
                        reader, config, target, family=family, dtype=dtype, origin=origin
                    )
                print(f"{target}: {what}, adapters of {family.model_type}: {', '.join(names)}")
                return DONE
            tokenizer = _tokenizer_of(config, record, store)
            turn_ends = _turn_ends(config, tokenizer, store)
            with open_parameters(store, steps) as reader, _writing("--hf", target):
                names = export(
                    reader,
                    record,
                    config,
                    target,
                    family=family,
                    dtype=dtype,
                    file_bytes=int(flags.file_size * 1e9),
                    companions=companions,
                    origin=origin,
                    tokenizer=tokenizer,
                    turn_ends=turn_ends,
                    learning_rate=_learning_rate(config, step, store),
                    version=str((record.meta.get(VERSIONS) or {}).get("maxpipe", "")),
                )
    except OSError as error:
        raise ConfigError(Problem(RUN_DIR, f"cannot read files of {store}: {error}")) from None
    except (CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable) as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_READ
    print(f"{target}: {what} as {family.model_type}: {', '.join(names)}")
    if not any(name.startswith("tokenizer") for name in names):
        source = f"data.tokenizer={config.data.tokenizer}"
        print(f"no tokenizer is written: the run has no files of {source}")
    elif end := turn_ends[1]:
        needed = f"generate of transformers needs {stop_arguments(end)}"
        print(f"{without_token(end)}: {needed}")
    return DONE


@contextmanager
def _writing(flag: str, target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot write to {target}: {error.strerror or error}"
        raise ConfigError(Problem(flag, message)) from None


def _tokenizer_of(config: Config, record: Record, store: StepStore) -> Tokenizer | None:
    try:
        return find_tokenizer(None, config, record.meta, store)
    except ConfigError as error:
        reason = error.problems[0].message
        print(f"warning: the ids of special tokens are not known: {reason}", file=sys.stderr)
        return None


def _turn_ends(
    config: Config, tokenizer: Tokenizer | None, store: StepStore
) -> tuple[set[int], str]:
    if tokenizer is None or not is_chat(config.data):
        return set(), ""
    return end_of_turn(find_chat_template(config, store), tokenizer)


def _learning_rate(config: Config, step: int, store: StepStore) -> str:
    """Return the learning rate up to `step` in words, with earlier ones unless in a mirror."""
    with store.local_files("") as files:
        runs = [read_run(file.name, file.parent) for file in files if file.name == METRICS]
    changes = [change for run in runs for change in run.changes if change[0] < step]
    return history_text("optimizer.learning_rate", config.optimizer.learning_rate, changes)
