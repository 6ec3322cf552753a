"""Hold the facts about what a model is made of: kernels, routers, blocks and model types."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """An implementation, with a phrase that describes it.

    Attributes:
      implementation: "module:class" or "module:function".
      summary: a phrase for `--help` and the documentation.
    """

    implementation: str
    summary: str = ""


@dataclass(frozen=True, kw_only=True)
class Kernel(Variant):
    """A kernel: a class whose `unfit` says why it cannot serve a configuration.

    Attributes:
      platforms: backends that it runs on.
      preferred_on: backends on which `auto` picks it if the sizes fit.
    """

    platforms: tuple[str, ...]
    preferred_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionKernel(Kernel):
    """`model.attention`: a class with `unfit`, `build` and `build_for_parts`.

    Attributes:
      separates_documents: whether tokens see only tokens of their own segment.
    """

    separates_documents: bool = True


class GroupedKernel(Kernel):
    """A product of rows with the weights of their experts, `model.moe.kernel`.

    It is a class with `unfit`, `layout` and `multiply`; see `maxpipe.model.experts`.
    """


_KERNELS = "maxpipe.model.kernels."
KERNELS: dict[str, AttentionKernel] = {
    "cudnn": AttentionKernel(
        _KERNELS + "cudnn:Cudnn",
        platforms=("gpu",),
        preferred_on=("gpu",),
        summary="cuDNN's flash attention, without packed documents",
        separates_documents=False,
    ),
    "dot_product": AttentionKernel(
        _KERNELS + "dot_product:DotProduct",
        platforms=("cpu", "gpu", "tpu"),
        summary="two matrix products, on every backend",
    ),
    "splash": AttentionKernel(
        _KERNELS + "splash:Splash",
        platforms=("tpu",),
        preferred_on=("tpu",),
        summary="a TPU kernel that never holds all scores",
    ),
}


_EXPERTS = "maxpipe.model.experts."
GROUPED_KERNELS: dict[str, GroupedKernel] = {
    "blocks": GroupedKernel(
        _EXPERTS + "blocks:Blocks",
        platforms=("cpu", "gpu", "tpu"),
        preferred_on=("cpu", "gpu"),
        summary="a loop over blocks of rows of one expert, on every backend",
    ),
    "megablox": GroupedKernel(
        _EXPERTS + "megablox:Megablox",
        platforms=("tpu",),
        preferred_on=("tpu",),
        summary="JAX's TPU kernel for groups of any size",
    ),
}


@dataclass(frozen=True)
class Dispatch(Variant):
    """How tokens reach experts of other devices, `model.moe.dispatch`.

    It is a function that turns the experts of one device into those of all devices.

    Attributes:
      platforms: backends that have the collectives, as JAX names them.
    """

    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")


DISPATCHES: dict[str, Dispatch] = {
    "all_to_all": Dispatch(
        _EXPERTS + "exchange:all_to_all",
        summary="a token goes to the devices that have its experts",
    ),
    "ragged": Dispatch(
        _EXPERTS + "exchange:ragged",
        platforms=("tpu",),
        summary="as all_to_all, without empty places on the way",
    ),
    "ring": Dispatch(_EXPERTS + "exchange:ring", summary="every device gets the tokens of all"),
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
        """Return the keys of `model.moe.*` that have no effect."""
        of_bias = ("groups", "groups_per_token", "selection_bias", "bias_rate")
        return ("normalise",) * self.is_normalised + of_bias * (not self.takes_bias)


ROUTERS: dict[str, Router] = {
    "sigmoid": Router(
        _EXPERTS + "router:sigmoid", takes_bias=True, summary="the sigmoid of each logit"
    ),
    "softmax": Router(
        _EXPERTS + "router:softmax",
        takes_bias=True,
        summary="the softmax over all experts, then the choice",
    ),
    "topk_softmax": Router(
        _EXPERTS + "router:topk_softmax",
        is_normalised=True,
        summary="the choice, then the softmax over it",
    ),
}


class ModelType(Variant):
    """A `model_type` of config.json: a subclass of `maxpipe.hf.family.Family`."""


_FAMILIES = "maxpipe.hf.families."
MODEL_TYPES: dict[str, ModelType] = {
    "deepseek_v3": ModelType(_FAMILIES + "deepseek:DeepseekV3", summary="DeepSeek-V3 and R1"),
    "gemma2": ModelType(_FAMILIES + "gemma:Gemma2", summary="Gemma 2"),
    "gemma3_text": ModelType(_FAMILIES + "gemma:Gemma3", summary="the text part of Gemma 3"),
    "glm4_moe": ModelType(_FAMILIES + "deepseek:Glm4Moe", summary="GLM-4.5 and 4.6"),
    "gpt_oss": ModelType(_FAMILIES + "experts:GptOss", summary="gpt-oss 20B and 120B"),
    "granite": ModelType(_FAMILIES + "llama:Granite", summary="Granite 3, dense"),
    "llama": ModelType(_FAMILIES + "llama:Llama", summary="Llama 2 to 3.3, SmolLM2, Yi"),
    "mistral": ModelType(_FAMILIES + "llama:Mistral", summary="Mistral 7B, Nemo"),
    "mixtral": ModelType(_FAMILIES + "experts:Mixtral", summary="Mixtral 8x7B, 8x22B"),
    "olmo2": ModelType(_FAMILIES + "llama:Olmo2", summary="OLMo 2"),
    "olmo3": ModelType(_FAMILIES + "llama:Olmo3", summary="OLMo 3"),
    "olmoe": ModelType(_FAMILIES + "experts:Olmoe", summary="OLMoE"),
    "phi3": ModelType(_FAMILIES + "llama:Phi3", summary="Phi-3, Phi-3.5, Phi-4"),
    "qwen2": ModelType(_FAMILIES + "llama:Qwen2", summary="Qwen2 and Qwen2.5, dense"),
    "qwen3": ModelType(_FAMILIES + "llama:Qwen3", summary="Qwen3, dense"),
    "qwen3_moe": ModelType(
        _FAMILIES + "experts:Qwen3Moe", summary="Qwen3 with experts, as 30B-A3B and 235B-A22B"
    ),
    "smollm3": ModelType(_FAMILIES + "llama:SmolLm3", summary="SmolLM3"),
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
        """Return the keys of `model.*` that have no effect."""
        return () if self.quantises else ("quantisation",)


BLOCKS: dict[str, Block] = {
    "llama": Block(
        "maxpipe.model.block:LlamaBlock",
        summary="attention, then a gated MLP, each with its norms",
        quantises=True,
        model_types=None,
    )
}


class ModelPlace(Variant):
    """A place of Hugging Face models: a class built with (folder, key that names the folder).

    Its instances implement `maxpipe.config.model_places.ModelFolder`.
    """


MODEL_PLACES: dict[str, ModelPlace] = {
    "directory": ModelPlace("maxpipe.storage.model_folders:LocalFolder", "a directory"),
    "store": ModelPlace("maxpipe.storage.model_folders:StoreFolder", "s3:// or gs://"),
    "hub": ModelPlace("maxpipe.storage.hub:HubFolder", "org/name or org/name@REVISION"),
}


class WeightFormat(Variant):
    """A format of weights for `init_from`: a class built with the resolved configuration.

    Its instances implement `maxpipe.training.initial_weights.InitialWeights`.
    """


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    "hf": WeightFormat("maxpipe.hf.importer:HfWeights", summary="safetensors of Hugging Face"),
    "maxtext": WeightFormat("maxpipe.migration.weights:MaxTextWeights", summary="a MaxText step"),
    "run": WeightFormat("maxpipe.training.initial_weights:RunWeights", summary="a run of maxpipe"),
}
