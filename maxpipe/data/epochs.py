"""Turn a length in epochs into steps, by counting what an epoch of the training documents has.

The schedule of the learning rate needs the steps before training begins, and a share of the
documents would only guess them. Imports no JAX.
"""

import dataclasses
import math

from maxpipe.config.catalog import SOURCES
from maxpipe.config.load import Loaded, derive_known, replace
from maxpipe.config.sections import Config
from maxpipe.data.check import report_progress
from maxpipe.data.documents import open_sources
from maxpipe.data.loader import encoder_of


def with_steps(loaded: Loaded) -> Loaded:
    """Return the configuration with `steps` in place of `epochs`, and a remark that says so.

    The last step may go beyond the last epoch. Every process counts the same, as does every start
    of the run, unless documents have changed. Raises ConfigError if they are missing or unusable,
    or if there would be too many steps.
    """
    epochs, batch = loaded.config.epochs, loaded.config.data.global_batch_size
    if not epochs:
        return loaded
    sequences, described = _epoch(derive_known(loaded.config))
    steps = max(1, math.ceil(epochs * sequences / batch))
    config = replace(loaded.config, steps=steps, epochs=0.0)
    remark = f"steps={steps}: {epochs:g} epochs of {described}"
    return dataclasses.replace(loaded, config=config, remarks=(*loaded.remarks, remark))


def _epoch(config: Config) -> tuple[float, str]:
    """Return the sequences that training makes of all documents, and a phrase for these."""
    data = config.data
    (documents,) = open_sources(data, "train")
    count = len(documents)
    described = f"{count:,} {'conversations' if SOURCES[data.source].is_chat else 'documents'}"
    if not data.packing:
        return count, described
    encoder = encoder_of(config, documents)
    progress = report_progress("epochs", count)
    tokens = 0
    for index in range(count):
        progress(index)
        tokens += max(len(encoder[index].ids) - 1, 0)  # the first is never a target
    return tokens / data.sequence_length, f"{described}, {tokens:,} tokens"
