"""Count a model's parameters and training FLOPs, from its parameter specs and its traced layer.

FLOPs are counted as in "PaLM: Scaling Language Modeling with Pathways" (Chowdhery et al. 2022,
appendix B): model FLOPs, those that the mathematics needs. What a run spends beyond them, on
recomputation, padding or pipeline bubbles, is not counted, so that it lowers MFU instead of raising
it.
"""

import math

import jax

from maxpipe.config.sections import ModelConfig
from maxpipe.model import parameters
from maxpipe.model.parameters import ParamSpec
from maxpipe.plan.layer_tensors import read_layer
from maxpipe.plan.layer_trace import model_program, trace_model


def parameter_count(model: ModelConfig) -> int:
    return model_program(model).parameter_count()


def active_parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of a resolved model that a token uses.

    Of the routed experts only the chosen ones count; the router and the embedding table count in
    full.
    """
    idle = model.moe.experts - model.moe.per_token
    if idle <= 0:
        return parameter_count(model)
    layer = model_program(model).specs["layers"]
    specs = jax.tree.leaves(layer, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))
    of_experts = sum(math.prod(spec.shape) for spec in specs if "expert" in spec.axes)
    return parameter_count(model) - model.stacked_layers * (of_experts // model.moe.experts) * idle


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return a resolved model's training FLOPs per token, averaged over a sequence of T tokens.

    For a decoder of L layers with H query heads of width D this is 6 N + 6 L H D T, where N counts
    the parameters that are multiplied with a token's activations: the output projection included,
    tied or not; the embedding lookup, norms and biases left out, as are experts that a token does
    not use. With adapters the base weights have no gradients, so that the first term is 4 N, plus 6
    for each of the adapters' parameters. The second term is attention: PaLM's 12 L H D T halved,
    because on average a causal query sees half of the T keys; in layers with a window it sees
    fewer. Packed sequences are counted as if they were one document.
    """
    # A product's forward, and the gradients for its two operands.
    passes = 3 - bool(model.lora.rank)
    flops = passes * trace_model(model, sequence_length).head_flops
    kinds = [(model, model.stacked_layers), (model.dense, model.first_dense_layers)]
    for kind, count in kinds:
        if count:
            trace = trace_model(kind, sequence_length)
            layer = read_layer(trace, lambda spec: (1,) * len(spec.shape))
            others = layer.activation_flops + adapter_flops(kind)
            flops += count * (passes * layer.weight_flops + 3 * others)
    return flops


def adapter_flops(model: ModelConfig) -> float:
    if not model.lora.rank:
        return 0.0
    specs = model_program(model).specs["layers"]
    return 2.0 * parameters.count(parameters.trainable(specs, specs))


def trained_parameter_count(model: ModelConfig) -> int:
    specs = model_program(model).specs
    trained = parameters.trainable(specs, specs)
    outer = parameters.count({"embed": trained["embed"], "head": trained["head"]})
    return outer + model.stacked_layers * parameters.count(trained["layers"])
