"""The form of weights, drafts and the KV cache."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Quantization = Literal[
    "awq",
    "compressed-tensors",
    "eetq",
    "exl2",
    "gptq",
    "marlin",
    "bitsandbytes",
    "bitsandbytes-nf4",
    "bitsandbytes-fp4",
    "fp8",
    "int4",
    "int8",
]


class WeightFlags(BaseModel):
    """How a checkpoint is read, quantised and extended."""

    allow_unlisted_model: bool = Field(
        default=False,
        description="Start classes of transformers that no test knows, after a check of their logits;"
        " the output of such a model may depend on its batch.",
    )
    trust_remote_code: bool = Field(
        default=False, description="No effect: code from a model repository is never run."
    )
    max_input_tokens: int | None = Field(
        default=None, ge=1, description="No effect: the router limits prompts."
    )

    quantize: Quantization | None = Field(
        default=None,
        description="How weights are quantized; config.json decides when absent. awq, compressed-tensors, gptq, marlin"
        " are for such checkpoints, and so are fp8 and bitsandbytes where the checkpoint has them. On other checkpoints"
        " fp8, int4, eetq (int8) and bitsandbytes (int8, nf4, fp4) quantize weights as they are loaded, and int8"
        " weights and activations of bfloat16 models on CPU. exl2 is refused.",
    )
    quantize_activations: Literal["auto", "exact", "int8"] = Field(
        default="auto",
        description="What quantized weights are multiplied with on CPU in bfloat16 models: int8 rounds activations to"
        " int8 with a scale for every 32 of a row, where the weights are integers, which is faster; exact keeps them."
        " auto is int8.",
    )
    speculate: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Most tokens guessed ahead for one sequence: by --draft-model or Medusa heads, else by what"
        " followed the last tokens before. When absent as many as there are heads, 4 with a draft model, else none.",
    )
    draft_model: str | None = Field(
        default=None,
        description="Smaller model of the same tokens that guesses ahead, or Medusa heads for the model:"
        " a folder or a name on the Hugging Face hub.",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3fn", "fp8_e5m2", "int8"] = Field(
        default="auto",
        description="Type of keys and values in the KV cache. int8 has a scale for each token and head, fp8 those of"
        " the checkpoint, else 1. auto: the model's type, or on CPU fp8_e4m3fn where kv_cache_scheme in config.json"
        " says so. CUDA has auto alone.",
    )
    rope_scaling: Literal["linear", "dynamic"] | None = Field(
        default=None, description="Scaling of the position encoding, in place of config.json's."
    )
    rope_factor: float | None = Field(
        default=None,
        gt=0,
        description="Factor of --rope-scaling, 1.0 when absent; alone it implies linear.",
    )
