"""A usual config.json of the Llama family, read without `transformers`.

The import of transformers' config classes would add 1.5 s and 150 MB to every start of a shard. A config is accepted
only if it has the same meaning in `transformers`; every other config is read by `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)


def _no_integer(value: object) -> object:
    if isinstance(value, int):
        raise ValueError("transformers refuses it")  # noqa: TRY004
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())


class _DefaultRope(_Strict):
    rope_type: Literal["default"] = "default"
    rope_theta: PositiveFloat


class _Llama3Rope(_Strict):
    rope_type: Literal["llama3"]
    rope_theta: PositiveFloat
    factor: Annotated[float, Field(ge=1)]
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


class PlainConfig(_Strict):
    """The fields of all four models, under transformers' names; fields that matter are required."""

    model_type: str
    architectures: list[str] | None = None
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: Annotated[PositiveFloat, BeforeValidator(_no_integer)]
    hidden_act: Literal["silu"]
    tie_word_embeddings: bool
    rope: _DefaultRope | _Llama3Rope
    eos_token_id: int | list[int] | None
    torch_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    head_dim: PositiveInt | None = None
    """None stands for hidden_size / num_attention_heads."""

    # These fields do not affect the computation.
    attention_dropout: float = 0
    bos_token_id: int | None = None
    initializer_range: Annotated[float, Field(ge=0, le=1), BeforeValidator(_no_integer)] = 0.0
    name_or_path: Annotated[str, Field(alias="_name_or_path")] = ""
    pad_token_id: int | None = None
    transformers_version: str = ""
    use_cache: bool = True

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the weights, if given."""
        return self.torch_dtype and getattr(torch, self.torch_dtype)

    @property
    def window(self) -> int | None:
        """Attention window of every layer."""
        return None

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Parameters of RoPE, under transformers' names."""
        return self.rope.model_dump()

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("transformers refuses some of these")
        return self


class _Llama(PlainConfig):
    model_type: Literal["llama"]
    attention_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: Literal[1] = 1


class _Mistral(PlainConfig):
    model_type: Literal["mistral"]
    sliding_window: PositiveInt | None

    @property
    def window(self) -> int | None:
        """Attention window of every layer."""
        return self.sliding_window


class _Qwen(PlainConfig):
    """Qwen without a window: `sliding_window` has no effect, and `layer_types` names full attention, if given."""

    use_sliding_window: Literal[False]
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: list[Literal["full_attention"]] | None = None

    @model_validator(mode="after")
    def _every_layer_is_named(self) -> Self:
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError("transformers refuses it")
        return self


class _Qwen2(_Qwen):
    model_type: Literal["qwen2"]
    head_dim: None = None


class _Qwen3(_Qwen):
    model_type: Literal["qwen3"]
    head_dim: PositiveInt
    attention_bias: bool = False


_Any: TypeAdapter[PlainConfig] = TypeAdapter(
    Annotated[_Llama | _Mistral | _Qwen2 | _Qwen3, Field(discriminator="model_type")]
)


def plain_config(raw: Mapping[str, Any]) -> PlainConfig | None:
    """The config in `raw`, the object of a config.json; None if only `transformers` can interpret it."""
    try:
        return _Any.validate_python(_in_one_dialect(raw))
    except ValidationError:
        return None


def _in_one_dialect(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Unify the formats: versions of `transformers` before 5 write `torch_dtype`, and RoPE at the top level."""
    fields = dict(raw)
    if "dtype" in fields and "torch_dtype" not in fields:
        fields["torch_dtype"] = fields.pop("dtype")
    if "rope_parameters" in fields:
        fields["rope"] = fields.pop("rope_parameters")
    elif "rope_theta" in fields:
        scaling = fields.pop("rope_scaling", None) or {}
        fields["rope"] = {"rope_theta": fields.pop("rope_theta"), **scaling}
    return fields
