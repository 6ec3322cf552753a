"""State what a layer makes, saves and computes again on one device.

Widths are values of `model.dtype` per token of a microbatch.
"""

from dataclasses import dataclass

from maxpipe.config.catalog import ENGINES, REMAT_POLICIES, RematPolicy
from maxpipe.config.sections import Config
from maxpipe.model.experts.imbalance import gains_by_usual_rows
from maxpipe.model.kernels.choose import EVERYWHERE
from maxpipe.model.kernels.splash import filled
from maxpipe.model.layer_facts import visible_share
from maxpipe.pipeline.chunk import offloaded_names, remat_policy
from maxpipe.plan.device_parameters import with_dense_layers
from maxpipe.plan.footprint import itemsize, layer_of
from maxpipe.plan.layer_tensors import Layer
from maxpipe.plan.number import FLOAT32, Number
from maxpipe.sharding.collectives import EXPERT_AXIS


@dataclass(frozen=True)
class LayerCosts:
    """A layer on one device; FLOPs are per token of the device."""

    weight_flops: float  # of a forward
    attention_flops: float  # of a forward, by its kernel
    scores: float  # of a token, if the kernel of attention holds all of them; else 0
    expert_flops: float  # the part of weight_flops that multiplies rows with experts' weights
    expert_weights: float  # weights of the device's experts
    results: float  # width of its products' results
    made: float  # the same with scores, in float32 and in the dtype of activations
    elementwise: float  # width of what its norms and sums make
    rows: float  # width of the rows of experts, and of those that are added up to tokens
    key_values: float  # width of what attention reads besides queries
    # Width of what the layer's backward holds at its widest moment: all tensors, and the gradients
    # of those that one product reads. Tokens at experts are those of all devices that share
    # experts, each with a gradient. So have scores, except on TPUs, where XLA computes their
    # gradients within the products that read them.
    working: float


@dataclass(frozen=True)
class Saving:
    """What a policy of rematerialisation, or that of each candidate, saves and computes again."""

    residuals: Number  # width that a layer saves on the device besides the input of its chunk
    offloaded: Number  # width that it saves in the host's memory
    # Width that an I leaves to its W on the scheduled engine: the gradients of results of products
    # and norms, and the recomputed results from which W computes its operands.
    stash: Number
    handed_over: Number  # the same on the mpmd engine, see `Layer.handed_over`
    saves_all: Number  # 1 where nothing is computed again, else 0
    # Width of what a chunk's backward holds of each layer except its current one: saved tensors,
    # and what it recomputes for all layers at once, if it does not layer by layer.
    held: Number
    # Width of what it would also hold if it computed cheap values only once. XLA holds less: it
    # recomputes some within the operations that read them.
    cheap: Number
    recomputed: Number  # share of a layer's forward that its backward computes again
    scores_again: Number  # 1 where that share leaves out scores that are computed again, else 0
    first_kept: Number  # width that first dense layers keep of a microbatch, with their inputs
    first_handed_over: Number  # width that an I of these leaves to its W on the mpmd engine
    first_recomputed: Number  # share of their forward that their backward computes again


def layer_costs(config: Config, platform: str) -> LayerCosts:
    """Return the costs of a layer of a resolved configuration, with its kernels chosen."""
    layer, model, on_tpus = layer_of(config), config.model, platform == "tpu"
    split, sharing = config.mesh.size("tensor"), config.mesh.size(EXPERT_AXIS)
    expert_flops = layer.expert_flops / split
    # A token uses some of the experts, with two FLOPs for each of their weights.
    used = 2.0 * model.moe.per_token * sharing / max(1, model.moe.experts)
    scores = _held_scores(config)
    # Tokens of all devices that share experts, and what this device's experts add to them.
    exchanged = 2 * sharing * model.embed_dim * (model.moe.experts > 0 and sharing > 1)
    return LayerCosts(
        weight_flops=layer.weight_flops / split,
        attention_flops=_kernel_share(config, on_tpus) * layer.activation_flops / split,
        scores=_scores(config),
        expert_flops=expert_flops,
        expert_weights=expert_flops / used if used else 0.0,
        results=layer.result_width,
        made=layer.result_width + scores,
        elementwise=layer.elementwise_width - layer.gathered_width,
        rows=layer.gathered_width + _empty_rows(config) * model.embed_dim,
        key_values=layer.key_value_width,
        working=layer.result_width
        + layer.elementwise_width
        + (2 - on_tpus) * scores
        + layer.widest_gradients
        + 2 * exchanged,
    )


def _empty_rows(config: Config) -> int:
    """Return the rows of a token that a device sums for others, if there are rows for all choices.

    Where a layer has a second program for a usual share, they are left out.
    """
    moe, sharing = config.model.moe, config.mesh.size(EXPERT_AXIS)
    choice = sharing, config.data.sequence_length, moe.per_token  # of one sequence a device
    if sharing == 1 or gains_by_usual_rows(choice, moe.experts // sharing, moe, sharing):
        return 0
    return (sharing - 1) * moe.per_token


def _kernel_share(config: Config, on_tpus: bool) -> float:
    """Return the FLOPs that attention's kernel computes, as a multiple of attention's FLOPs."""
    model = config.model
    if model.attention == EVERYWHERE:  # masked ones, too
        return 1 / visible_share(model, config.data.sequence_length)
    if not (on_tpus and model.is_latent):
        return 1.0  # heads that this kernel would have to pad use another one
    channels = model.head_dim, model.mla.v_head_dim  # of a query and of a value
    return sum(map(filled, channels)) / sum(channels)


def saving_of(config: Config) -> Saving:
    """Return what the policy of a resolved configuration, with its kernels chosen, saves."""
    layer, pipeline, embed = layer_of(config), config.pipeline, config.model.embed_dim
    policy, has_stages = remat_policy(pipeline), ENGINES[pipeline.engine].has_stages
    by_layer = has_stages and not pipeline.remat_iterations
    if policy.everything or (by_layer and not pipeline.remat_layers):
        residuals = _everything(config, layer)
    else:
        residuals = _named(config, layer, by_itself=by_layer or not has_stages)
        residuals += embed * by_layer
    held = residuals
    if has_stages and pipeline.remat_iterations:
        made = layer.result_width + _held_scores(config)
        held = residuals + embed if pipeline.remat_layers else max(made, residuals)
    passes = pipeline.remat_iterations + pipeline.remat_layers
    stash = layer.gradient_width
    if not policy.everything and passes:
        stash += layer.recomputed_operand_width(policy.device)
    again = config.model.attention == EVERYWHERE and not policy.everything
    first_kept = first_handed_over = first_recomputed = 0.0
    if num_first := config.model.first_dense_layers:
        # Each of them applies the policy to itself, whatever the pipeline's layers do. On engines
        # with stages they count as layers outside the pipeline, with all that the policy names.
        first = layer_of(with_dense_layers(config))
        kept = _named(config, first, by_itself=not has_stages)
        kept = _everything(config, first) if policy.everything else kept
        first_kept = num_first * (embed + kept)
        first_handed_over = num_first * first.handed_over
        first_recomputed = _recomputed(config, first)
    return Saving(
        residuals=residuals,
        offloaded=layer.saved_width(offloaded_names(pipeline)),
        stash=stash,
        handed_over=layer.handed_over,
        saves_all=float(policy.everything),
        held=held,
        cheap=max(0.0, layer.residuals(None) + _probabilities(config) - held),
        recomputed=(passes if has_stages else 1) * _recomputed(config, layer),
        scores_again=float(again and "context" in (*policy.device, *policy.host)),
        first_kept=first_kept,
        first_handed_over=first_handed_over,
        first_recomputed=first_recomputed,
    )


def _named(config: Config, layer: Layer, *, by_itself: bool) -> float:
    """Return the width of the named tensors that a layer saves on the device.

    A layer that applies the policy by itself saves what its own backward reads: not the last
    product's result where only the next layer's input depends on it.
    """
    names = remat_policy(config.pipeline).device
    return layer.residuals(RematPolicy(device=names)) if by_itself else layer.saved_width(names)


def _everything(config: Config, layer: Layer) -> float:
    """Return the width of the residuals of a layer that saves all that its backward needs.

    Where each layer is compiled by itself, XLA keeps the results of products and gathers, and
    computes the rest again within the operations that read it.
    """
    if ENGINES[config.pipeline.engine].has_stages or config.pipeline.scan_layers:
        return layer.residuals(REMAT_POLICIES["none"]) + _probabilities(config)
    return layer.result_width + layer.gathered_width + _probabilities(config)


def _scores(config: Config) -> float:
    if config.model.attention != EVERYWHERE:
        return 0.0
    # A ring holds those of one device's keys at a time.
    parts = config.mesh.size("context") if config.sharding.context_strategy == "ring" else 1
    heads = config.model.num_query_heads / config.mesh.size("tensor")
    return heads * config.data.sequence_length / parts


def _probabilities(config: Config) -> float:
    """Return the width of attention's probabilities in float32, which its backward needs."""
    return _scores(config) * FLOAT32 / itemsize(config.model.dtype)


def _held_scores(config: Config) -> float:
    """Return the width of the scores in float32 and in the dtype of activations."""
    return _probabilities(config) + _scores(config)


def _recomputed(config: Config, layer: Layer) -> float:
    """Return the share of a layer's forward that one recomputation of it takes."""
    policy = remat_policy(config.pipeline)
    if policy.everything:
        return 0.0
    flops = layer.recomputed_flops((*policy.device, *policy.host))
    return flops / (layer.weight_flops + layer.activation_flops)
