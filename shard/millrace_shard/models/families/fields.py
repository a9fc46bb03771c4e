"""Fields that most families have under the same names."""

from __future__ import annotations

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.layer_weights import Activation
from millrace_shard.models.config import ConfigReader

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


class Heads:
    """The numbers of heads and channels."""

    def __init__(self, config: ConfigReader) -> None:
        self.count = config.count("num_attention_heads")
        self.kv_count = config.optional_count("num_key_value_heads") or self.count
        if self.count % self.kv_count:
            raise UnsupportedModel(
                f"num_key_value_heads={self.kv_count} does not divide num_attention_heads={self.count}"
            )
        hidden_size, head_dim = config.count("hidden_size"), config.optional_count("head_dim")
        if head_dim is None and hidden_size % self.count:
            raise UnsupportedModel(
                f"num_attention_heads={self.count} does not divide hidden_size={hidden_size}"
            )
        self.dim = head_dim or hidden_size // self.count


def activation(config: ConfigReader, field: str = "hidden_act") -> Activation:
    name = config.value(field)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModel(f"{field}={name!r} is not supported for {config.model_type}")
    return _ACTIVATIONS[name]


def qwen_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """The window of each layer: `sliding_window` counts with `use_sliding_window`, from `max_window_layers` on."""
    num_layers = config.count("num_hidden_layers")
    is_used, first = config.flag("use_sliding_window"), config.whole("max_window_layers")
    window = config.value("sliding_window")
    if is_used and window is not None:
        window = config.count("sliding_window")
    kinds = config.layer_types(num_layers)
    if kinds is None:
        return tuple(window if is_used and layer >= first else None for layer in range(num_layers))
    if "sliding_attention" in kinds and (window is None or not is_used):
        raise UnsupportedModel("layer_types asks for sliding_attention, but sliding_window is off")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def window_kinds(config: ConfigReader, pattern: int | None) -> tuple[str, ...]:
    """The kind of each layer from `layer_types`; without it, every `pattern`-th layer attends without a window."""
    num_layers = config.count("num_hidden_layers")
    kinds = config.layer_types(num_layers)
    if kinds is not None:
        return kinds
    if pattern is None:
        raise UnsupportedModel(f"layer_types is missing from the config of {config.model_type}")
    return tuple(
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(num_layers)
    )
