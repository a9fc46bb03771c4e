"""Loads a class of transformers: its weights, our modules in place of some of its, and a check of its logits."""

from __future__ import annotations

import copy
import logging
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import WeightsError
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.cpu.int8_linear import Int8Kernels
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.config import CONFIG_ERRORS
from millrace_shard.models.interface import ModelInfo
from millrace_shard.models.kv_scales import read_kv_scales
from millrace_shard.models.transformers_backend.kernel_linear import ProjectionReplacement
from millrace_shard.models.transformers_backend.paged_attention import NAME
from millrace_shard.models.transformers_backend.rotary import use_rotary_table
from millrace_shard.models.transformers_backend.self_check import (
    QUANTIZED_TOLERANCE,
    TOLERANCES,
    SelfCheck,
    eager_logits,
)
from millrace_shard.models.transformers_backend.supported import (
    check_supported,
    class_of,
    is_listed,
)
from millrace_shard.models.transformers_backend.tensor_parallel import (
    TensorParallelPlan,
    plan_for,
    split_modules,
)
from millrace_shard.models.transformers_backend.transformers_model import (
    TransformersModel,
    make_batch_invariant,
    wants_invariance,
)
from millrace_shard.weights.read_ahead import ReadAhead
from millrace_shard.weights.safetensor_files import SafetensorFiles
from millrace_shard.weights.unmapped_tensors import TensorUnmapper


def read_class(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The class with its weights, which stay in the mapped files unless they need conversion. Raises WeightsError."""
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, SafetensorError, *CONFIG_ERRORS) as error:
        raise WeightsError(f"the weights in {folder} cannot be read: {error}") from error
    for name, shape, expected in sorted(report["mismatched_keys"]):
        raise WeightsError(
            f"tensor {name} has shape {list(shape)}, its config says {list(expected)}"
        )
    for name in sorted(report["missing_keys"]):
        raise WeightsError(f"tensor {name} is missing from the checkpoint")
    found_model: PreTrainedModel = model
    return found_model


def mapped_dtype(config: PretrainedConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weights stay in the mapped files, so that a rank converts no more than its part.

    That is the one that the config names, unless the class keeps parameters in float32 by its own rules.
    """
    kind = class_of(config)
    rules = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    has_own_rules = any(getattr(kind, name, None) for name in rules)
    stored = config.dtype
    is_float = isinstance(stored, torch.dtype) and stored.is_floating_point
    return stored if is_float and not has_own_rules else dtype


SMALL_BYTES = 128 << 20
"""Size of a checkpoint that is loaded in float32 too for its check."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersLoader:
    """Loads a rank's part of the checkpoint in `folder`."""

    folder: Path
    config: PretrainedConfig
    info: ModelInfo
    dtype: torch.dtype
    kernels: Kernels
    group: ProcessGroup
    device: torch.device
    max_total_tokens: int | None = None
    adapters: AdapterTable | None = None
    """Of which the projections become sites."""
    allow_unlisted: bool = False
    """Load a class that is not listed too, and compare its logits with its own eager attention's."""

    def load(self) -> TransformersModel:
        """Load the model. Raises UnsupportedModel, also for a class that fails the comparison, or WeightsError."""
        check_supported(self.config, allow_unlisted=self.allow_unlisted)
        plan = plan_for(self.config, self.group.world_size)
        if is_listed(self.config):
            return self._loaded(plan)[0]
        files = SafetensorFiles(self.folder)
        files.close()
        if self.dtype != torch.float32 and files.num_bytes() <= SMALL_BYTES:
            plain = PlainKernels(deterministic=False)
            copy = replace(self, dtype=torch.float32, kernels=plain, adapters=None)
            copy._checked(plan)  # noqa: SLF001
        return self._checked(plan)

    def _checked(self, plan: TensorParallelPlan) -> TransformersModel:
        is_quantized = isinstance(self.kernels, Int8Kernels)
        model, expected = self._loaded(plan)
        check = SelfCheck(
            kernels=self.kernels,
            group=self.group,
            dtype=self.dtype,
            device=self.device,
            tolerance=QUANTIZED_TOLERANCE if is_quantized else TOLERANCES[self.dtype],
        )
        distances = check.run(model, expected)
        distances_text = ", ".join(f"{name} {distance:.2g}" for name, distance in distances.items())
        logger.info(
            "%s passes the self-check in %s: %s", self.config.model_type, self.dtype, distances_text
        )
        return model

    def _loaded(self, plan: TensorParallelPlan) -> tuple[TransformersModel, Tensor | None]:
        """The model and, on rank 0, the logits for the check of a class that is not listed."""
        is_split = self.group.world_size > 1
        files = SafetensorFiles(self.folder)
        with closing(files):
            scales = [
                read_kv_scales(files, f"model.layers.{index}.self_attn")
                for index in range(getattr(self.config.get_text_config(), "num_hidden_layers", 0))
            ]
        with ReadAhead(files.paths()) as ahead:
            stored = mapped_dtype(self.config, self.dtype) if is_split else self.dtype
            model = read_class(self.folder, self.config, stored)
            unmapper = TensorUnmapper(
                model, files.paths(), self.device, ahead, casts=(stored, self.dtype)
            )
            expected = self._expected(model, unmapper)
            if self.device.type != "cpu" and not is_split:
                # Only CPU packs weights; elsewhere a tied head shares memory with the embeddings.
                unmapper.unmap_rest()
            head = model.get_output_embeddings()
            ProjectionReplacement(
                self.kernels, unmapper, self.adapters, head, plan, self.group
            ).apply(model)
            split_modules(model, plan, self.group, unmapper)
            unmapper.unmap_rest()
        use_rotary_table(model, self.info.max_position_embeddings, self.max_total_tokens)
        if wants_invariance(self.kernels, self.device):
            make_batch_invariant(model)
        loaded = TransformersModel(
            model,
            self.info,
            self.kernels,
            self.adapters,
            ranks=self.group.world_size,
            is_listed=is_listed(self.config),
            scales=scales,
        )
        return loaded, expected

    def _expected(self, model: PreTrainedModel, unmapper: TensorUnmapper) -> Tensor | None:
        if is_listed(self.config) or self.group.rank:
            return None
        logits = eager_logits(model)
        unmapper.release_mapped()
        return logits
