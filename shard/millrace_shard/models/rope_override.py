"""The flags `--rope-scaling` and `--rope-factor`, which replace the scaling of the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from millrace_shard.errors import UnsupportedModel
from millrace_shard.models.spec.decoder_spec import DecoderSpec, LayerSpec
from millrace_shard.models.spec.rope_spec import DynamicScaling, LinearScaling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_KINDS: dict[str, type[LinearScaling] | type[DynamicScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
}


@dataclass(frozen=True, slots=True)
class RopeOverride:
    """A scaling. Raises UnsupportedModel for an unknown kind and for factors below 1."""

    kind: str
    """"linear" or "dynamic"."""
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise UnsupportedModel(f"rope scaling {self.kind!r} is not one of: {', '.join(_KINDS)}")
        if not self.factor >= 1:
            raise UnsupportedModel(f"a rope factor is at least 1, not {self.factor}")


def override_spec(spec: DecoderSpec, override: RopeOverride) -> DecoderSpec:
    """`spec` with the scaling of `override` in every layer that rotates."""
    scaling = _KINDS[override.kind](factor=override.factor)

    def scaled(layer: LayerSpec) -> LayerSpec:
        rope = layer.attention.rope
        if rope is None:
            return layer
        rope = replace(rope, scaling=scaling)
        return replace(layer, attention=replace(layer.attention, rope=rope))

    return replace(spec, layers=tuple(map(scaled, spec.layers)))


def override_config(config: PretrainedConfig, override: RopeOverride) -> None:
    """Replace the scaling of `config` but keep its base and rotary share, as TGI does. Raises UnsupportedModel."""
    found = getattr(config, "rope_parameters", None)
    if not found:
        raise UnsupportedModel(f"{config.model_type} has no rotary embedding to scale")
    if "rope_type" not in found:
        raise UnsupportedModel(f"rope_parameters {found!r} are not of one kind for all layers")
    kept = {k: v for k, v in found.items() if k in {"rope_theta", "partial_rotary_factor"}}
    config.rope_parameters = {"rope_type": override.kind, "factor": override.factor, **kept}
