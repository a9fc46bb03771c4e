"""Reads what guesses: a draft model, or Medusa heads for a decoder."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.model_loader.checkpoint_files import TOKENIZER
from millrace_shard.models.decoder import Decoder
from millrace_shard.models.interface import CausalModel
from millrace_shard.models.load import load_model
from millrace_shard.speculation.factory import Speculation
from millrace_shard.speculation.medusa import MedusaModel
from millrace_shard.speculation.medusa_config import MedusaConfig

GUESSES_OF_DRAFT_MODEL = 4
"""Where `--speculate` does not say: a draft model costs a pass for each."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationLoader:
    """Where and how the model itself was loaded."""

    folder: Path
    dtype: torch.dtype
    kernels: Kernels
    group: ProcessGroup
    device: torch.device
    max_total_tokens: int | None = None

    def load(
        self, model: CausalModel, *, draft_folder: Path | None, speculate: int | None
    ) -> tuple[CausalModel, Speculation | None]:
        """The model to run, which keeps its states where heads read them, and how to guess, if at all.

        `speculate` is the most guesses: when absent, as many as there are heads, a few with a draft model, else none.
        Raises ModelError.
        """
        if speculate == 0 or (speculate is None and draft_folder is None):
            return model, None
        if draft_folder is None:
            assert speculate is not None
            logger.info("guessing up to %d tokens by n-grams", speculate)
            return model, Speculation(most=speculate)
        heads = MedusaConfig.read(draft_folder)
        if heads is not None:
            return self._with_heads(model, draft_folder, heads, speculate)
        draft = self._draft(model, draft_folder)
        most = GUESSES_OF_DRAFT_MODEL if speculate is None else speculate
        logger.info("guessing up to %d tokens by the model in %s", most, draft_folder)
        return model, Speculation(most=most, draft=draft)

    def _with_heads(
        self, model: CausalModel, folder: Path, heads: MedusaConfig, speculate: int | None
    ) -> tuple[CausalModel, Speculation]:
        most = heads.num_heads if speculate is None else speculate
        if most > heads.num_heads:
            raise UnsupportedModel(
                f"--speculate {most}, but there are {heads.num_heads} Medusa heads in {folder}"
            )
        if not isinstance(model, Decoder):
            raise UnsupportedModel(f"{model.info.model_type} runs without Medusa heads")
        logger.info("guessing up to %d tokens by the Medusa heads in %s", most, folder)
        whole = MedusaModel(
            model,
            folder,
            heads,
            dtype=self.dtype,
            kernels=self.kernels,
            group=self.group,
            device=self.device,
        )
        return whole, Speculation(most=most)

    def _draft(self, model: CausalModel, folder: Path) -> CausalModel:
        ours, theirs = _vocabulary(self.folder), _vocabulary(folder)
        if ours is not None and theirs is not None and ours != theirs:
            raise UnsupportedModel(f"the draft model in {folder} has other tokens than the model")
        draft = load_model(
            folder,
            dtype=self.dtype,
            kernels=self.kernels,
            group=self.group,
            device=self.device,
            max_total_tokens=self.max_total_tokens,
        )
        num_ours, num_theirs = model.info.vocab_size, draft.info.vocab_size
        # Tables of models with one tokenizer may be padded differently.
        if num_ours != num_theirs and (ours is None or theirs is None):
            raise UnsupportedModel(
                f"the draft model in {folder} has {num_theirs} token ids, the model {num_ours}"
            )
        return draft


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Tokens of tokenizer.json; None where there is none, or of another form."""
    path = folder / TOKENIZER
    try:
        found = json.loads(path.read_bytes())["model"]["vocab"]
    except (OSError, KeyError, TypeError):
        return None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    return found if isinstance(found, dict) else None
