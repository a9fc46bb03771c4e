"""The folders of a model and of its draft model or heads, found by their names."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open

from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.weights.checkpoint_files import SINGLE
from millrace_shard.weights.download import download_file
from millrace_shard.weights.hub import (
    DOWNLOAD_FAILURES,
    OFF,
    HubError,
    HubSettings,
    cached_file,
    explain,
    is_file_name,
    is_path,
    resolve,
    split_tag,
)
from millrace_shard.weights.json_object import parse_json_file
from millrace_shard.weights.published import published_model

WEIGHTS = "medusa_lm_head.safetensors"
PICKLE = "medusa_lm_head.pt"
HEADS = "medusa_num_heads"
MTP = Path("mtp")
"""What names the MTP layers of the model itself in place of a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Fields of config.json, by the names in Medusa's checkpoints."""

    num_heads: int
    num_layers: int
    base_model: str
    """Folder or hub name of the model that the heads were trained for."""

    @classmethod
    def read(cls, folder: Path) -> MedusaConfig | None:
        """The config in `folder`, or None if it has no Medusa heads. Raises ModelError if they are unusable."""
        raw = read_config(folder)
        if HEADS not in raw:
            return None
        num_heads, num_layers = raw[HEADS], raw.get("medusa_num_layers", 1)
        base = raw.get("base_model_name_or_path")
        counts = (num_heads, num_layers)
        if not all(isinstance(count, int) and count > 0 for count in counts):
            raise ModelError(
                f"{folder}: {num_heads=} and {num_layers=} of Medusa have to be positive integers"
            )
        if not isinstance(base, str) or not base:
            raise ModelError(f"{folder}: config.json has no base_model_name_or_path")
        if not (folder / WEIGHTS).is_file():
            has_pickle = (folder / PICKLE).is_file()
            hint = f"; {PICKLE} may run code when read, and is ignored" if has_pickle else ""
            raise UnsupportedModel(f"there is no {WEIGHTS} in {folder}{hint}")
        return cls(num_heads=num_heads, num_layers=num_layers, base_model=base)


def is_medusa(folder: Path) -> bool:
    """Whether the config in `folder` describes Medusa heads."""
    return HEADS in read_config(folder)


def is_eagle(folder: Path) -> bool:
    """Whether the files in `folder` are an EAGLE or EAGLE-3 head, by its config or its header."""
    raw = read_config(folder)
    classes = raw.get("architectures")
    names = " ".join(map(str, classes)) if isinstance(classes, list) else ""
    if "eagle" in names.lower() or "draft_vocab_size" in raw or "speculators_model_type" in raw:
        return True
    if raw.get("model_type") != "llama" or not (folder / SINGLE).is_file():
        return False
    try:
        with safe_open(folder / SINGLE, framework="numpy") as file:
            names = file.keys()
            return "fc.weight" in names
    except (OSError, SafetensorError):
        # Loading the file says what is wrong with it.
        return False


def is_head(folder: Path) -> bool:
    """Whether `folder` has, or is the name of, something that is no model by itself."""
    return folder == MTP or is_medusa(folder) or is_eagle(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """The object of config.json, or an empty one."""
    try:
        value = parse_json_file(folder / "config.json")
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The folders of a model to serve."""

    model: Path
    draft: Path | None = None
    """A draft model, a folder with heads, or `MTP`."""

    @classmethod
    def find(
        cls,
        model_id: str,
        *,
        draft_model: str | None,
        revision: str | None,
        settings: HubSettings,
        tokenizer: str | None = None,
        mmproj: str | None = None,
    ) -> Checkpoints:
        """Both names are folders, GGUF files, published models or names on the hub.

        If `model_id` names Medusa heads, their config names the model. `tokenizer` is the model that the tokenizer of
        a GGUF file comes from, and `mmproj` the file with its encoder of images, as in `resolve`. Raises ModelError,
        whose text names the remedy.
        """
        heads = None
        if settings.weights_override is None:
            heads = _heads(model_id, revision=revision, settings=settings)
        if heads is None:
            model = resolve(
                model_id, revision=revision, settings=settings, tokenizer=tokenizer, mmproj=mmproj
            )
            return cls(model, None if draft_model is None else find_draft(draft_model, settings))
        if draft_model is not None:
            raise HubError(f"{model_id} has Medusa heads; start without --draft-model")
        config = MedusaConfig.read(heads)
        assert config is not None
        logger.info("Medusa heads in %s for %s", heads, config.base_model)
        model = resolve(
            config.base_model, revision=None, settings=settings, tokenizer=tokenizer, mmproj=mmproj
        )
        return cls(model, heads)


def find_draft(draft_model: str, settings: HubSettings) -> Path:
    """The folder of a draft model or of heads; `MTP` as it is. Raises ModelError."""
    if draft_model == str(MTP):
        return MTP
    # The override of weights is for the model only.
    settings = replace(settings, weights_override=None)
    heads = _heads(draft_model, revision=None, settings=settings, eagle=True)
    return heads or resolve(draft_model, revision=None, settings=settings, mmproj=OFF)


def _heads(
    model_id: str, *, revision: str | None, settings: HubSettings, eagle: bool = False
) -> Path | None:
    """The folder of Medusa heads, or of an EAGLE head; None if `model_id` names something else or is not found."""
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        return folder.resolve() if is_medusa(folder) or (eagle and is_eagle(folder)) else None
    is_elsewhere = is_path(model_id) or is_file_name(model_id) or split_tag(model_id)[1] is not None
    if is_elsewhere or published_model(model_id) is not None:
        return None
    try:
        config = _file(model_id, "config.json", revision=revision, settings=settings)
    except HubError as error:
        cause = error.__cause__
        # What the hub says is an OSError, too.
        is_absent = isinstance(cause, EntryNotFoundError)
        is_absent = is_absent and not isinstance(cause, FileNotFoundError)
        if settings.offline or is_absent:
            # The search for a model reports the error.
            return None
        raise
    if is_medusa(config.parent):
        return _file(model_id, WEIGHTS, revision=revision, settings=settings).parent
    if eagle and is_eagle(config.parent):
        return _file(model_id, SINGLE, revision=revision, settings=settings).parent
    return None


def _file(model_id: str, name: str, *, revision: str | None, settings: HubSettings) -> Path:
    cached = cached_file(model_id, name, revision=revision, cache=settings.access.cache)
    if cached is not None:
        return cached
    if settings.offline:
        raise HubError(
            f"{name} of {model_id} is not in {settings.access.cache}, and HF_HUB_OFFLINE forbids the download"
        )
    try:
        return download_file(model_id, name, revision=revision, access=settings.access)
    except DOWNLOAD_FAILURES as error:
        raise HubError(explain(error, model_id, revision=revision, settings=settings)) from error
