"""The families whose pictures are prepared, by `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace_router.images import (
    gemma3,
    geometry,
    internvl,
    llava,
    onevision,
    paligemma,
    pixtral,
    qwen_vl,
)
from millrace_router.images.geometry import AnyGeometry, GeometryError

GEOMETRIES: dict[str, type[AnyGeometry]] = {
    **dict.fromkeys(geometry.FAMILIES, geometry.Geometry),
    **dict.fromkeys(gemma3.FAMILIES, gemma3.GemmaGeometry),
    **dict.fromkeys(llava.FAMILIES, llava.LlavaGeometry),
    **dict.fromkeys(onevision.FAMILIES, onevision.OnevisionGeometry),
    **dict.fromkeys(paligemma.FAMILIES, paligemma.PaliGemmaGeometry),
    **dict.fromkeys(internvl.FAMILIES, internvl.InternGeometry),
    **dict.fromkeys(pixtral.FAMILIES, pixtral.PixtralGeometry),
    **dict.fromkeys(qwen_vl.FAMILIES, qwen_vl.QwenGeometry),
}


def geometry_of(family: str, processor: Mapping[str, Any]) -> AnyGeometry:
    """Read preprocessor_config.json, where null is as absent; raises GeometryError for what is not supported."""
    if family not in GEOMETRIES:
        raise GeometryError(f"pictures of the family {family[:100]!r} are not supported")
    settings = {name: value for name, value in processor.items() if value is not None}
    return GEOMETRIES[family].of(family, settings)


def geometry_from(value: Mapping[str, Any]) -> AnyGeometry:
    """Read what `as_json` of a geometry returned."""
    return GEOMETRIES[value["family"]].from_json(value)
