"""Fields of config.json that flags replace, `--hf-overrides` and `--rope-scaling`.

The model's files are linked into a folder with the changed config.json, so that all readers of the model see the same.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.models.config import text_part
from millrace_shard.models.description import ModelDescription, family_of
from millrace_shard.weights.json_object import read_json_object

CONFIG = "config.json"
TEXT = "text_config"
ROPE = ("rope_parameters", "rope_scaling")
KEPT = ("rope_theta", "partial_rotary_factor")
"""Of the rotary embedding, where its scaling is replaced by one that does not name them."""


def folder_with(
    folder: Path, overrides: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None, root: Path
) -> Path:
    """A folder below `root` with the files of `folder` and a config.json with these changes; made at the first call.

    `rope_scaling` replaces the scaling of the rotary embedding of the text model. Raises ModelError.
    """
    raw = read_json_object(folder / CONFIG)
    if raw is None:
        raise ModelError(f"no config.json in {folder}")
    changed = _overridden(raw, overrides)
    if rope_scaling is not None:
        is_nested = isinstance(changed.get(TEXT), dict)
        change = {ROPE[0]: rope_scaling}
        changed = _overridden(changed, {TEXT: change} if is_nested else change)
    text = json.dumps(changed, indent=2, sort_keys=True)
    target = root / hashlib.sha256(f"{folder.absolute()}\n{text}".encode()).hexdigest()[:32]
    if not target.is_dir():
        try:
            _write(folder, target, text)
        except OSError as error:
            raise ModelError(f"the changed config.json cannot be written: {error}") from error
    _check_names(target, raw, overrides)
    return target


def _write(folder: Path, target: Path, text: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        for path in folder.iterdir():
            if path.name != CONFIG:
                (building / path.name).symlink_to(path.absolute())
        (building / CONFIG).write_text(text)
        if not target.is_dir():
            # Another rank may be there first, with the same.
            building.rename(target)
    except FileExistsError:
        pass
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _overridden(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The object with other fields; the object of a text model is changed field by field, too."""
    changed = {**raw, **changes}
    old, new = raw.get(TEXT), changes.get(TEXT)
    if isinstance(old, dict) and isinstance(new, dict):
        changed[TEXT] = _overridden(old, new)
    if any(name in changes for name in ROPE):
        rope = next(changes[name] for name in ROPE if name in changes) or {"rope_type": "default"}
        for name in ROPE:
            changed.pop(name, None)
        changed[ROPE[0]] = _rope(raw, rope)
    return changed


def _rope(raw: Mapping[str, Any], rope: object) -> dict[str, Any]:
    """The parameters `rope`, with the base and the rotated share of `raw` where they name none."""
    if not isinstance(rope, dict):
        raise UnsupportedModel(f"rope_parameters={rope!r} must be an object")
    old = raw.get(ROPE[1]) or raw.get(ROPE[0]) or {}
    kinds = {name for name, each in old.items() if isinstance(each, dict)}
    if kinds and not kinds & rope.keys():
        raise UnsupportedModel(
            f"the layers of this model have rotary embeddings by kind: --hf-overrides with rope_parameters"
            f" that hold an object for each of {', '.join(sorted(kinds))} replaces them"
        )
    return {**{name: old[name] for name in KEPT if name in old and not kinds}, **rope}


def _check_names(target: Path, raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for a field that neither the file nor the model has: it would have no effect."""
    changed = read_json_object(target / CONFIG) or {}
    text = text_part(changed)
    family = family_of(text)
    if family is None:
        kind = type(ModelDescription.read(target).config)
        known = {*dir(kind), *getattr(kind, "attribute_map", {})}
    else:
        known = set(family.fields(text))
    before, own = text_part(raw), overrides.get(TEXT)
    names = {*overrides, *(own if isinstance(own, dict) else ())}
    unknown = sorted(names - known - before.keys() - raw.keys() - set(ROPE))
    if unknown:
        raise UnsupportedModel(
            f"--hf-overrides: {', '.join(unknown)} is not in config.json, and"
            f" {text.get('model_type')} does not read it"
        )
