"""Times of units from FLOPs in closed form: what a stage with some number of layers takes.

Counted are products with weights and the two products of attention, of which a causal query does half; the backward of
a product is one for its input and one for its weight, and attention's belongs to the input gradient.

Left out are norms, softmax, rotations and activation functions, a per cent or two of the FLOPs at real widths, and the
embedding: a lookup forward, and backward a sum that moves bytes and multiplies nothing. A chunk that is computed again
as a whole does without its very last product, which is counted here; the kernel that runs without accelerators computes
attention's masked half too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from maxpipe.config.sections import Config
from maxpipe.pipeline.remat import REMAT
from maxpipe.pipeline.schedules._table import Table
from maxpipe.pipeline.simulate import Costs
from maxpipe.telemetry.flops import layer_products


@dataclass(frozen=True)
class Work:
    """Times for one microbatch, in units of the forward of one layer.

    Attributes:
      input_gradient: of a layer, with what it computes again.
      weight_gradient: of a layer.
      head: loss and its gradient.
    """

    input_gradient: float
    weight_gradient: float
    head: float

    @property
    def layer(self) -> float:
        """Forward and backward of one layer."""
        return 1.0 + self.input_gradient + self.weight_gradient

    def costs(self, sizes: Sequence[int], table: Table) -> Costs:
        """Costs of a table whose global chunks have so many layers."""
        layers = np.asarray(sizes, float)
        assert layers.shape == (table.num_chunks,)
        return Costs(
            forward=layers.tolist(),
            backward=((self.input_gradient + self.weight_gradient) * layers).tolist(),
            input_gradient=(self.input_gradient * layers).tolist(),
            weight_gradient=(self.weight_gradient * layers).tolist(),
            head=self.head,
        )


def work(config: Config) -> Work:
    """What a resolved configuration's layers and head take."""
    model = config.model
    products: dict[str, float] = dict(layer_products(model))
    weights = sum(products.values())
    # Scores and values of a query, which sees half of the sequence on average.
    products["context"] = attention = model.num_query_heads * model.head_dim * config.data.sequence_length
    forward = weights + attention
    return Work(
        input_gradient=(weights + 2 * attention + _computed_again(config, products)) / forward,
        weight_gradient=weights / forward,
        head=3 * model.vocab_size * model.embed_dim / forward,
    )


def _computed_again(config: Config, products: Mapping[str, float]) -> float:
    """What the backward of a layer computes a second or third time, see `remat._apply.Remat`."""
    pipeline = config.pipeline
    kept = REMAT.get(pipeline.remat_policy)(pipeline)
    if kept.everything:
        return 0.0
    passes = pipeline.remat_iterations + pipeline.remat_layers
    return passes * sum(time for name, time in products.items() if name not in (*kept.device, *kept.host))
