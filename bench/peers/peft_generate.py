"""PEFT's mixed batches: `generate` with an adapter for each row. Runs as `bench.peers.transformers_generate` does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.peers.transformers_generate import PaddedBatches
from bench.peers.worker import Limits, Request, main

BASE = "__base__"
"""PEFT's name for rows without an adapter."""


class AdaptedBatches(PaddedBatches):
    """Padded batches whose rows have adapters; an adapter is loaded, in the model's dtype, at its first use."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._names: dict[str, str] = {}

    def arguments(self, batch: Sequence[Request]) -> dict[str, Any]:
        """The adapter of each row: once one is loaded, rows without a name would have it."""
        if not self._names and not any(request.adapter for request in batch):
            return {}
        return {"adapter_names": [self._name(request.adapter) for request in batch]}

    def _name(self, folder: str) -> str:
        """PEFT's name of the adapter in `folder`."""
        if not folder:
            return BASE
        if folder in self._names:
            return self._names[folder]
        name = f"adapter-{len(self._names)}"
        if self._names:
            self._model.load_adapter(folder, name, autocast_adapter_dtype=False)
        else:
            adapted = PeftModel.from_pretrained(
                self._model, folder, adapter_name=name, autocast_adapter_dtype=False
            )
            self._model = adapted.eval()
        self._names[folder] = name
        return name


def load(model: Path, limits: Limits) -> AdaptedBatches:
    """The model in bfloat16."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(limits.threads)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    return AdaptedBatches(loaded.eval())


if __name__ == "__main__":
    main(load)
