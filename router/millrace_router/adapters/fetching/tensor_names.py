"""Names of an adapter's tensors: PEFT's keys, the variants of them in published files, and the base's modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from millrace_router.adapters.fetching.errors import Invalid
from millrace_router.errors import quoted

PREFIX = "base_model.model."
MAX_NAME_LENGTH = 1024
Part = Literal["lora_A", "lora_B", "bias", "base_layer"]

_KEY = re.compile(r"(?P<module>[^\x00]+)\.(?P<part>lora_[AB])(?:\.default)?\.(?P<leaf>weight|bias)")
_COPY = ".base_layer.weight"
_VISION_SEGMENT = "language_model"
_WRAPPERS = ("model", "transformer")
"""Names of the decoder inside a model's class."""


@dataclass(frozen=True, slots=True)
class TensorName:
    """The module that a tensor belongs to, by the name that it was trained with, and its part."""

    module: str
    part: Part

    @classmethod
    def parse(cls, key: str) -> TensorName:
        """Read a key of the file; raises Invalid for everything else.

        `base_layer` is the base's own weight, which PEFT saves beside A and B of a head.
        """
        if len(key) > MAX_NAME_LENGTH:
            raise Invalid(f"the name of the tensor {quoted(key)} is too long")
        if key.endswith(_COPY):
            return cls(_without_prefix(key.removesuffix(_COPY)), "base_layer")
        match = _KEY.fullmatch(key)
        is_bias = match is not None and match["leaf"] == "bias"
        if match is None or (is_bias and match["part"] == "lora_A"):
            raise Invalid(f"the tensor {quoted(key)} {_why_not(key)}")
        module = _without_prefix(match["module"])
        if is_bias:
            return cls(module, "bias")
        return cls(module, "lora_A" if match["part"] == "lora_A" else "lora_B")


def base_module(trained: str, modules: Collection[str]) -> str | None:
    """Find the base's module for a name that an adapter was trained with; None: there is no such module.

    Another class of the model may have given the name.
    """
    return next((name for name in _candidates(trained) if name in modules), None)


def _without_prefix(module: str) -> str:
    while module.startswith(PREFIX):
        module = module.removeprefix(PREFIX)
    return module


def _candidates(trained: str) -> Iterator[str]:
    yield trained
    segments = trained.split(".")
    plain = [segment for segment in segments if segment != _VISION_SEGMENT]
    yield ".".join(plain)
    for wrapper in _WRAPPERS:
        yield ".".join([wrapper, *plain])
    if plain[0] in _WRAPPERS:
        yield ".".join(plain[1:])


def _why_not(key: str) -> str:
    if "lora_magnitude_vector" in key:
        return "is of DoRA, which is not supported"
    if "lora_embedding_" in key:
        return "changes an embedding, which is not supported"
    if ".lora_" not in key and key.endswith((".weight", ".bias")):
        return "replaces a weight of the model, which is not supported"
    return "is not of LoRA"
