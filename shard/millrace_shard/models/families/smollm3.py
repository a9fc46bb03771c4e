"""SmolLM 3: Llama without rotary embeddings on every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from millrace_shard.models.config import ConfigReader
from millrace_shard.models.families.family import Family
from millrace_shard.models.families.fields import qwen_windows
from millrace_shard.models.families.llama import llama_attention, llama_decoder
from millrace_shard.models.spec import AttentionSpec, DecoderSpec


def _spec(config: ConfigReader) -> DecoderSpec:
    num_layers = config.count("num_hidden_layers")
    attention = llama_attention(config, bias=config.flag("attention_bias"))
    interval = config.count("no_rope_layer_interval")
    # A 1 stands for a layer that rotates.
    rotates = config.numbers("no_rope_layers", num_layers) or tuple(
        int((layer + 1) % interval != 0) for layer in range(num_layers)
    )
    windows = _windows(config, rotates)

    def layer(window: int | None, rotates: int) -> AttentionSpec:
        return replace(attention, window=window, rope=attention.rope if rotates else None)

    layers = [layer(*each) for each in zip(windows, rotates, strict=True)]
    return llama_decoder(config, layers, mlp_bias=config.flag("mlp_bias"))


def _windows(config: ConfigReader, rotates: tuple[int, ...]) -> tuple[int | None, ...]:
    """With `use_sliding_window`, layers that do not rotate have the window unless `layer_types` differs."""
    if config.value("layer_types") is not None:
        return qwen_windows(config)
    window = config.value("sliding_window")
    if not config.flag("use_sliding_window") or window is None:
        return (None,) * len(rotates)
    return tuple(None if each else config.count("sliding_window") for each in rotates)


FAMILY = Family(
    model_type="smollm3",
    classes=("SmolLM3ForCausalLM",),
    spec=_spec,
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
        "eos_token_id": 128_001,
    },
)
