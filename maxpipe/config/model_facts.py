"""Hold the facts about what a model is made of: kernels, routers, blocks and model types."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """An implementation, "module:class" or "module:function", and a phrase for `--help`."""

    implementation: str
    summary: str = ""


@dataclass(frozen=True, kw_only=True)
class Kernel(Variant):
    """A kernel: a class whose `unfit` says why it cannot serve a configuration.

    It runs on the backends `platforms`; `auto` picks it on those `preferred_on` if the sizes fit.
    """

    platforms: tuple[str, ...]
    preferred_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionKernel(Kernel):
    """`model.attention`: a class with `unfit`, `build` and `build_for_parts`.

    `separates_documents` says whether tokens see only tokens of their own segment, `in_ring`
    whether it has `build_for_ring`.
    """

    separates_documents: bool = True
    in_ring: bool = False


_KERNELS = "maxpipe.model.kernels."
_ANY = ("cpu", "gpu", "tpu")
KERNELS: dict[str, AttentionKernel] = {
    "cudnn": AttentionKernel(
        _KERNELS + "cudnn:Cudnn",
        "cuDNN's flash attention, without packed documents",
        platforms=("gpu",),
        preferred_on=("gpu",),
        separates_documents=False,
    ),
    "dot_product": AttentionKernel(
        _KERNELS + "dot_product:DotProduct",
        "two matrix products, on every backend",
        platforms=_ANY,
        in_ring=True,
    ),
    "splash": AttentionKernel(
        _KERNELS + "splash:Splash",
        "a TPU kernel that never holds all scores",
        platforms=("tpu",),
        preferred_on=("tpu",),
        in_ring=True,
    ),
}


_EXPERTS = "maxpipe.model.experts."
GROUPED_KERNELS: dict[str, Kernel] = {
    "blocks": Kernel(
        _EXPERTS + "blocks:Blocks",
        "a loop over blocks of rows of one expert, on every backend",
        platforms=_ANY,
        preferred_on=("cpu", "gpu"),
    ),
    "megablox": Kernel(
        _EXPERTS + "megablox:Megablox",
        "JAX's TPU kernel for groups of any size",
        platforms=("tpu",),
        preferred_on=("tpu",),
    ),
}


@dataclass(frozen=True)
class Dispatch(Variant):
    """How tokens reach experts of other devices, `model.moe.dispatch`.

    It is a function that turns the experts of one device into those of all devices, on backends
    that have its collectives.
    """

    platforms: tuple[str, ...] = _ANY


DISPATCHES: dict[str, Dispatch] = {
    "all_to_all": Dispatch(
        _EXPERTS + "exchange:all_to_all", "a token goes to the devices that have its experts"
    ),
    "ragged": Dispatch(
        _EXPERTS + "exchange:ragged", "all_to_all without empty places", platforms=("tpu",)
    ),
    "ring": Dispatch(_EXPERTS + "exchange:ring", "every device gets the tokens of all"),
}


@dataclass(frozen=True)
class Router(Variant):
    """A function that chooses experts by logits, `model.moe.router`.

    Attributes:
      takes_bias: whether it takes a selection bias, and keeps to groups.
      is_normalised: whether the weights of a token's experts add up to 1 in any case.
    """

    takes_bias: bool = False
    is_normalised: bool = False

    @property
    def refused(self) -> tuple[str, ...]:
        of_bias = ("groups", "groups_per_token", "selection_bias", "bias_rate")
        return ("normalise",) * self.is_normalised + of_bias * (not self.takes_bias)


ROUTERS: dict[str, Router] = {
    "sigmoid": Router(_EXPERTS + "router:sigmoid", "the sigmoid of each logit", takes_bias=True),
    "softmax": Router(
        _EXPERTS + "router:softmax",
        "the softmax over all experts, then the choice",
        takes_bias=True,
    ),
    "topk_softmax": Router(
        _EXPERTS + "router:topk_softmax", "the choice, then the softmax over it", is_normalised=True
    ),
}


_FAMILIES = "maxpipe.hf.families."
# Subclasses of `maxpipe.hf.family.Family` by the `model_type` of config.json.
MODEL_TYPES: dict[str, Variant] = {
    "deepseek_v3": Variant(_FAMILIES + "deepseek:DeepseekV3", "DeepSeek-V3 and R1"),
    "gemma2": Variant(_FAMILIES + "gemma:Gemma2", "Gemma 2"),
    "gemma3_text": Variant(_FAMILIES + "gemma:Gemma3", "the text part of Gemma 3"),
    "glm4_moe": Variant(_FAMILIES + "deepseek:Glm4Moe", "GLM-4.5 and 4.6"),
    "gpt_oss": Variant(_FAMILIES + "experts:GptOss", "gpt-oss 20B and 120B"),
    "granite": Variant(_FAMILIES + "llama:Granite", "Granite 3, dense"),
    "llama": Variant(_FAMILIES + "llama:Llama", "Llama 2 to 3.3, SmolLM2, Yi"),
    "mistral": Variant(_FAMILIES + "llama:Mistral", "Mistral 7B, Nemo"),
    "mixtral": Variant(_FAMILIES + "experts:Mixtral", "Mixtral 8x7B, 8x22B"),
    "olmo2": Variant(_FAMILIES + "llama:Olmo2", "OLMo 2"),
    "olmo3": Variant(_FAMILIES + "llama:Olmo3", "OLMo 3"),
    "olmoe": Variant(_FAMILIES + "experts:Olmoe", "OLMoE"),
    "phi3": Variant(_FAMILIES + "llama:Phi3", "Phi-3, Phi-3.5, Phi-4"),
    "qwen2": Variant(_FAMILIES + "llama:Qwen2", "Qwen2 and Qwen2.5, dense"),
    "qwen3": Variant(_FAMILIES + "llama:Qwen3", "Qwen3, dense"),
    "qwen3_moe": Variant(_FAMILIES + "experts:Qwen3Moe", "Qwen3 with experts, as 30B-A3B"),
    "smollm3": Variant(_FAMILIES + "llama:SmolLm3", "SmolLM3"),
}


@dataclass(frozen=True)
class Block(Variant):
    """A decoder block, `model.block`: a Flax NNX module built from `model.*`.

    Attributes:
      quantises: whether its projections come from `maxpipe.model.layers.projection`.
      model_types: those of `MODEL_TYPES` that compute the same with the same parameters;
        None for all of them.
    """

    quantises: bool = False
    model_types: tuple[str, ...] | None = ()

    @property
    def refused(self) -> tuple[str, ...]:
        return () if self.quantises else ("quantisation",)


BLOCKS: dict[str, Block] = {
    "llama": Block(
        "maxpipe.model.block:LlamaBlock",
        "attention, then a gated MLP, each with its norms",
        quantises=True,
        model_types=None,
    )
}


# Classes built with (folder, key that names it); instances are `model_places.ModelFolder`.
MODEL_PLACES: dict[str, Variant] = {
    "directory": Variant("maxpipe.storage.model_folders:LocalFolder", "a directory"),
    "store": Variant("maxpipe.storage.model_folders:StoreFolder", "s3:// or gs://"),
    "hub": Variant("maxpipe.storage.model_folders:HubFolder", "org/name or org/name@REVISION"),
}


# Formats for `init_from`: classes built with the resolved configuration, whose instances implement
# `maxpipe.training.initial_weights.InitialWeights`.
WEIGHT_FORMATS: dict[str, Variant] = {
    "hf": Variant("maxpipe.hf.importer:HfWeights", "safetensors of Hugging Face"),
    "maxtext": Variant("maxpipe.migration.weights:MaxTextWeights", "a MaxText step"),
    "run": Variant("maxpipe.training.initial_weights:RunWeights", "a run of maxpipe"),
}
