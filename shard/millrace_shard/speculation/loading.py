"""Loads a draft model, or heads for a decoder, and makes the proposer of a loaded model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from millrace_shard.arrays import Ints, no_ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import DraftTokens, StepRows
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.models.decoder import Decoder
from millrace_shard.models.interface import CausalModel, KVLayer
from millrace_shard.models.load import load_model
from millrace_shard.models.quantized import quantization_of
from millrace_shard.models.rope import RopeTables
from millrace_shard.speculation.checkpoints import MTP, MedusaConfig, is_eagle
from millrace_shard.speculation.draft_model import DraftProposer
from millrace_shard.speculation.head_spec import HeadKind, read_head
from millrace_shard.speculation.hidden_state_heads import DraftHead, HeadProposer, TappedModel
from millrace_shard.speculation.medusa import MedusaModel, MedusaProposer
from millrace_shard.speculation.proposer import Proposer
from millrace_shard.weights.checkpoint_files import TOKENIZER
from millrace_shard.weights.json_object import parse_json_file
from millrace_shard.weights.weights import Weights

LONGEST_SUFFIX = 3


class NgramProposer(Proposer):
    """Searches a token table on the host."""

    def __init__(self, tokens: NDArray[np.int32], device: torch.device) -> None:
        """`tokens` [slots or more, length] has all tokens of a sequence when the proposer drafts."""
        self._tokens = tokens
        self._device = device

    def has_drafts(self, slots: Ints, lengths: Ints) -> bool:
        """Whether the last token of a sequence occurs earlier in it."""
        rows = zip(slots.tolist(), (lengths - 1).tolist(), strict=True)
        return any(
            (self._tokens[slot, :last] == self._tokens[slot, last]).any() for slot, last in rows
        )

    def propose(self, rows: StepRows) -> DraftTokens:
        """Draft tokens for each row that may have some and whose last token occurs earlier."""
        drafts = [
            lookup(self._tokens[slot, :length], int(count)) if count else no_ints()
            for slot, length, count in zip(
                rows.slots, rows.num_tokens, rows.max_draft_tokens, strict=True
            )
        ]
        return DraftTokens.of(drafts, self._device)


class CopyingNgramProposer(NgramProposer):
    """Keeps a copy of all tokens on the host."""

    reads_tokens = True

    def __init__(self, num_slots: int, max_tokens: int, device: torch.device) -> None:
        super().__init__(np.zeros((num_slots, max_tokens), dtype=np.int32), device)

    def admit(self, sequence: Sequence) -> None:
        self._tokens[sequence.slot, : sequence.num_inputs] = sequence.input_ids

    def read(self, slots: Ints, positions: Ints, ids: Ints) -> None:
        self._tokens[slots, positions] = ids


def lookup(tokens: NDArray[np.int32], count: int) -> Ints:
    """`count` tokens that may follow `tokens` [n], or none if their last token does not occur earlier.

    If the earlier occurrence has fewer tokens after it, they repeat.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    if not len(ends):
        return no_ints()
    for back in range(1, LONGEST_SUFFIX):
        if len(tokens) <= back:
            break
        longer = ends[(ends >= back) & (tokens[ends - back] == tokens[-1 - back])]
        if not len(longer):
            break
        ends = longer
    period = len(tokens) - 1 - int(ends[-1])
    places = len(tokens) - period + np.arange(count) % period
    return tokens[places].astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Draft tokens from a draft model or heads if there are any, else from n-grams."""

    max_draft_tokens: int
    """For one sequence in one step, at least 1."""
    draft: CausalModel | None = None
    head: DraftHead | None = None
    """A head that reads hidden states of the model, which is a TappedModel then."""

    @property
    def layers(self) -> tuple[KVLayer, ...]:
        """The layers of the draft model or the head, which need a KV cache."""
        if self.head is not None:
            return self.head.geometry
        return () if self.draft is None else self.draft.geometry.layers

    def proposer(
        self,
        model: CausalModel,
        kernels: Kernels,
        cache: list[LayerCache],
        batch: Batch,
        dtype: torch.dtype,
    ) -> Proposer:
        """A proposer for the sequences of `batch`, which `model` runs; `cache` is the KV cache of `layers`."""
        if self.draft is not None:
            return DraftProposer(self.draft, kernels, cache, batch, dtype)
        if self.head is not None:
            assert isinstance(model, TappedModel)
            return HeadProposer(self.head, model, kernels, cache[0], batch, dtype)
        if isinstance(model, MedusaModel):
            return MedusaProposer(model, batch, dtype)
        if (tokens := batch.token_table.on_host) is not None:
            return NgramProposer(tokens, batch.device)
        limits = batch.limits
        return CopyingNgramProposer(limits.max_batch_size, limits.max_tokens + 1, batch.device)


DRAFT_MODEL_TOKENS = 4
"""Draft tokens without `--speculate`: each of them costs a forward pass of the draft model, or of the head's layer."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationLoader:
    """The folder and the settings that the model was loaded with."""

    folder: Path
    dtype: torch.dtype
    kernels: Kernels
    group: ProcessGroup
    device: torch.device
    max_total_tokens: int | None = None
    allow_unlisted: bool = False

    def load(
        self, model: CausalModel, *, draft_folder: Path | None, max_draft_tokens: int | None
    ) -> tuple[CausalModel, Speculation | None]:
        """The model to run, with its heads if there are any, and the settings of speculative decoding, if any.

        Without `max_draft_tokens` there is a draft token for each head, a few with a draft model, and none otherwise.

        Raises ModelError.
        """
        if max_draft_tokens == 0 or (max_draft_tokens is None and draft_folder is None):
            return model, None
        if draft_folder is None:
            assert max_draft_tokens is not None
            logger.info("up to %d draft tokens from n-grams", max_draft_tokens)
            return model, Speculation(max_draft_tokens=max_draft_tokens)
        if draft_folder == MTP or is_eagle(draft_folder):
            return self._with_head(model, draft_folder, max_draft_tokens or DRAFT_MODEL_TOKENS)
        heads = MedusaConfig.read(draft_folder)
        if heads is not None:
            return self._with_heads(model, draft_folder, heads, max_draft_tokens)
        draft = self._draft(model, draft_folder)
        if max_draft_tokens is None:
            max_draft_tokens = DRAFT_MODEL_TOKENS
        logger.info("up to %d draft tokens from the model in %s", max_draft_tokens, draft_folder)
        return model, Speculation(max_draft_tokens=max_draft_tokens, draft=draft)

    def _with_heads(
        self,
        model: CausalModel,
        folder: Path,
        heads: MedusaConfig,
        max_draft_tokens: int | None,
    ) -> tuple[CausalModel, Speculation]:
        if max_draft_tokens is None:
            max_draft_tokens = heads.num_heads
        if max_draft_tokens > heads.num_heads:
            raise UnsupportedModel(
                f"--speculate {max_draft_tokens}, but there are {heads.num_heads} Medusa heads in {folder}"
            )
        if not isinstance(model, Decoder):
            raise UnsupportedModel(f"{model.info.model_type} runs without Medusa heads")
        logger.info("up to %d draft tokens from the Medusa heads in %s", max_draft_tokens, folder)
        whole = MedusaModel(
            model,
            folder,
            heads,
            dtype=self.dtype,
            kernels=self.kernels,
            group=self.group,
            device=self.device,
        )
        return whole, Speculation(max_draft_tokens=max_draft_tokens)

    def _with_head(
        self, model: CausalModel, folder: Path, max_draft_tokens: int
    ) -> tuple[CausalModel, Speculation]:
        if not isinstance(model, Decoder):
            raise UnsupportedModel(f"{model.info.model_type} runs without heads that draft")
        spec = read_head(folder, self.folder, model.spec, self.group.world_size)
        quantization = None
        if spec.kind is HeadKind.MTP:
            ranks = self.group.world_size
            quantization = quantization_of(self.folder, None, spec.decoder, ranks)
        weights = Weights(
            spec.folder,
            dtype=self.dtype,
            device=self.device,
            group=self.group,
            quantization=quantization,
        )
        ropes = RopeTables(self.max_total_tokens, self.device)
        ropes.limit(model.geometry.layers)
        head = DraftHead(spec, model, weights, self.kernels, self.group, ropes)
        logger.info(
            "up to %d draft tokens from the %s head in %s, which reads hidden states after layers %s of %d",
            max_draft_tokens,
            spec.kind.value,
            spec.folder,
            ", ".join(map(str, spec.taps)),
            len(model.spec.layers),
        )
        tapped = TappedModel(model, self.kernels, spec.taps)
        return tapped, Speculation(max_draft_tokens=max_draft_tokens, head=head)

    def _draft(self, model: CausalModel, folder: Path) -> CausalModel:
        are_known = check_draft_tokens(self.folder, folder)
        draft = load_model(
            folder,
            dtype=self.dtype,
            kernels=self.kernels,
            group=self.group,
            device=self.device,
            max_total_tokens=self.max_total_tokens,
            allow_unlisted=self.allow_unlisted,
        )
        num_ours, num_theirs = model.info.vocab_size, draft.info.vocab_size
        # Models with the same tokenizer may have embedding tables with different padding.
        if num_ours != num_theirs and not are_known:
            raise UnsupportedModel(
                f"the draft model in {folder} has {num_theirs} token ids, the model {num_ours}"
            )
        return draft


def check_draft_tokens(folder: Path, draft: Path) -> bool:
    """Whether the tokens of both models are known. Raises UnsupportedModel if they are and differ."""
    ours, theirs = _vocabulary(folder), _vocabulary(draft)
    if ours is None or theirs is None:
        return False
    if ours != theirs:
        raise UnsupportedModel(f"the draft model in {draft} has other tokens than the model")
    return True


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """The tokens of tokenizer.json; None without such a file, or if its vocabulary is not a mapping."""
    path = folder / TOKENIZER
    try:
        vocabulary = parse_json_file(path)["model"]["vocab"]
    except (OSError, KeyError, TypeError):
        return None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    return vocabulary if isinstance(vocabulary, dict) else None
