"""The checked form of an adapter, by the names of the base's modules.

The tensors' names are PEFT's keys, and the variants of them in published files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millrace_router.adapters.fetching.errors import Invalid
from millrace_router.adapters.fetching.peft_config import PeftConfig
from millrace_router.adapters.fetching.source_files import CONFIG_FILE
from millrace_router.adapters.fetching.tensors import (
    Float32,
    SafetensorsFile,
    Tensor,
    all_finite,
    from_float32,
    to_float32,
)
from millrace_router.errors import quoted
from millrace_router.request.adapter import AdapterModule

PREFIX = "base_model.model."
MAX_NAME_LENGTH = 1024
Part = Literal["lora_A", "lora_B", "bias", "base_layer"]

_KEY = re.compile(r"(?P<module>[^\x00]+)\.(?P<part>lora_[AB])(?:\.default)?\.(?P<leaf>weight|bias)")
_COPY = ".base_layer.weight"
_VISION_SEGMENT = "language_model"
_WRAPPERS = ("model", "transformer")
"""Names of the decoder inside a model's class."""
_OF_FILES = (
    ("model.layers.", "backbone.layers."),
    (".mlp.", ".block_sparse_moe."),
    (".forget_gate.", "."),
)
"""Parts of names in classes of `transformers`, and what published files have there: Nemotron-H and Kimi Linear."""


@dataclass(frozen=True, slots=True)
class TensorName:
    """The module that a tensor belongs to, by the name that it was trained with, and its part."""

    module: str
    part: Part

    @classmethod
    def parse(cls, key: str) -> TensorName:
        """Read a key of the file; raises Invalid for everything else.

        `base_layer` is the base's own weight, which PEFT saves with A and B of a head.
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
    names = list(_by_wrappers(trained))
    yield from names
    yield from (name.replace(old, new) for old, new in _OF_FILES for name in names if old in name)


def _by_wrappers(trained: str) -> Iterator[str]:
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


TENSORS_PER_MODULE = 4
PARTS: tuple[Part, ...] = ("lora_A", "lora_B", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """One module of an adapter: delta = ((x Aᵀ) ∘ scales) Bᵀ + bias."""

    name: str
    a: Tensor
    """[rank, inputs]."""
    b: Tensor
    """[outputs, rank]."""
    scales: Float32
    """[rank]: the factor of each rank."""
    bias: Float32 | None = None
    """[outputs], with its factor applied."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def inputs(self) -> int:
        """Inputs of the base's linear layer."""
        return self.a.shape[1]

    @property
    def outputs(self) -> int:
        """Outputs of the base's linear layer."""
        return self.b.shape[0]


@dataclass(frozen=True, slots=True)
class _Found:
    key: str
    trained: str
    tensor: Tensor


def check_adapter(
    config: PeftConfig, file: SafetensorsFile, *, modules: Sequence[AdapterModule], max_rank: int
) -> list[LoraModule]:
    """Check every tensor against the configuration and the base, and return the modules in the base's order.

    Raises:
        Invalid: with the field or the tensor, and both shapes.

    """
    shapes = {module.name: module for module in modules}
    if len(file.tensors) > TENSORS_PER_MODULE * len(shapes):
        raise Invalid(
            f"the file has {len(file.tensors)} tensors, and the model {len(shapes)} modules for adapters"
        )
    if not file.tensors:
        raise Invalid("the file contains no tensors")
    parts_by_module = _by_module(file.tensors, shapes)
    return [
        _module(config, shapes[name], parts_by_module[name], max_rank=max_rank)
        for name in shapes
        if name in parts_by_module
    ]


def missing_targets(config: PeftConfig, file: SafetensorsFile) -> list[str]:
    """Names in `target_modules` without tensors: allowed, but worth a note."""
    return config.missing_targets({TensorName.parse(key).module for key in file.tensors})


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise Invalid for a value that is not finite."""
    if not all_finite(tensor):
        raise Invalid(f"the tensor {quoted(name)} has a value that is not finite")


def _by_module(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, AdapterModule]
) -> dict[str, dict[Part, _Found]]:
    modules: dict[str, dict[Part, _Found]] = {}
    for key, tensor in tensors.items():
        name = TensorName.parse(key)
        base = base_module(name.module, shapes)
        if base is None:
            raise Invalid(
                f"the tensor {quoted(key)} is of a module that the model does not have, or that adapters cannot change"
            )
        parts = modules.setdefault(base, {})
        if name.part in parts:
            raise Invalid(
                f"the tensors {quoted(parts[name.part].key)} and {quoted(key)} are of the same module"
            )
        parts[name.part] = _Found(key, name.module, tensor)
    return modules


def _module(
    config: PeftConfig, shape: AdapterModule, parts: Mapping[Part, _Found], *, max_rank: int
) -> LoraModule:
    any_part = next(iter(parts.values()))
    for name in PARTS if config.lora_bias else PARTS[:2]:
        if name not in parts:
            raise Invalid(f"the tensor {quoted(any_part.key)} comes without its {name}")
    if "bias" in parts and not config.lora_bias:
        raise Invalid(
            f"the tensor {quoted(parts['bias'].key)} is there, but lora_bias of {CONFIG_FILE} is not set"
        )
    rank = config.rank_of(any_part.trained)
    if rank > max_rank:
        raise Invalid(
            f"the rank of the module {quoted(any_part.trained)} is {rank}, and at most {max_rank} is allowed"
        )
    _expect_shape(parts["lora_A"], (rank, shape.inputs), shape)
    _expect_shape(parts["lora_B"], (shape.outputs, rank), shape)
    scale = np.float32(config.scale_of(any_part.trained))
    bias = None
    if "bias" in parts:
        _expect_shape(parts["bias"], (shape.outputs,), shape)
    if "base_layer" in parts:
        # A vocabulary that was resized in training has another shape.
        _expect_shape(parts["base_layer"], (shape.outputs, shape.inputs), shape)
    for part in PARTS:
        if part in parts:
            check_finite(parts[part].key, parts[part].tensor)
    if "bias" in parts:
        with np.errstate(over="ignore"):
            bias = to_float32(parts["bias"].tensor) * scale
        check_finite(parts["bias"].key, from_float32(bias))
    return LoraModule(
        name=shape.name,
        a=parts["lora_A"].tensor,
        b=parts["lora_B"].tensor,
        scales=np.full(rank, scale, dtype=np.float32),
        bias=bias,
    )


def _expect_shape(part: _Found, expected: tuple[int, ...], shape: AdapterModule) -> None:
    if part.tensor.shape != expected:
        raise Invalid(
            f"the tensor {quoted(part.key)} has the shape {list(part.tensor.shape)}, and the module {shape.name}"
            f" of the model, with the rank of {CONFIG_FILE}, needs {list(expected)}"
        )
