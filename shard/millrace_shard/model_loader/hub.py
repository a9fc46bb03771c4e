"""From a model's name to a local folder that router and shards can read; local files are preferred."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from millrace_shard.errors import ModelError
from millrace_shard.model_loader.checkpoint_files import (
    TOKENIZER,
    IncompleteModelError,
    PickledWeightsError,
    missing_files,
)
from millrace_shard.model_loader.download import TRANSIENT, HubAccess, download_snapshot, first_line
from millrace_shard.variables import Variables

DOWNLOAD_FAILURES: tuple[type[Exception], ...] = (
    *TRANSIENT,
    HFValidationError,
    PickledWeightsError,
    IncompleteModelError,
)

log = logging.getLogger(__name__)


class HubError(ModelError):
    """The model has no local folder; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Settings of the hub, from the environment variables that the hub's tools and TGI read."""

    access: HubAccess
    offline: bool
    side_root: Path
    """A writable folder for files that are added to a model."""
    weights_override: Path | None = None
    """The folder that holds the model, instead of the cache."""

    @classmethod
    def of(cls, variables: Variables) -> HubSettings:
        """The settings that the environment names."""
        override = variables.weights_cache_override
        return cls(
            access=HubAccess(
                endpoint=variables.hf_endpoint.rstrip("/"),
                token=variables.hub_token,
                cache=variables.hub_cache,
            ),
            offline=variables.is_offline,
            side_root=variables.hub_home / "millrace",
            weights_override=override.expanduser() if override else None,
        )


def resolve(model_id: str, *, revision: str | None, settings: HubSettings) -> Path:
    """The local folder with config, safetensors and tokenizer.json of `model_id`, a path or a name on the hub.

    The model is downloaded if the cache lacks it. Raises ModelError, whose text names the remedy.
    """
    if settings.weights_override is not None:
        return _with_tokenizer(_local(settings.weights_override), settings)
    path = Path(model_id).expanduser()
    if path.is_dir():
        return _with_tokenizer(_local(path), settings)
    if model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1:
        raise HubError(f"there is no folder {model_id}")
    return _with_tokenizer(_from_hub(model_id, revision=revision, settings=settings), settings)


def _local(folder: Path) -> Path:
    try:
        missing = missing_files(folder)
    except PickledWeightsError as error:
        raise HubError(
            f"{folder}: {error}; convert them with: millrace-shard convert {folder}"
        ) from error
    if missing:
        raise HubError(f"{folder} has no {', '.join(missing)}")
    return folder.resolve()


def _from_hub(model_id: str, *, revision: str | None, settings: HubSettings) -> Path:
    cached, missing = _cached(model_id, revision=revision, cache=settings.access.cache)
    if cached is not None and not missing:
        log.info("found %s in %s", model_id, cached)
        return cached
    if settings.offline:
        at = f" at revision {revision}" if revision else ""
        what = f"lacks {', '.join(missing)}" if cached is not None else "is not"
        raise HubError(
            f"{model_id}{at} {what} in the cache {settings.access.cache}; HF_HUB_OFFLINE forbids the"
            " download: unset it, or point HUGGINGFACE_HUB_CACHE or HF_HOME at the cache that has the model"
        )
    try:
        folder = download_snapshot(model_id, revision=revision, access=settings.access)
    except DOWNLOAD_FAILURES as error:
        raise HubError(explain(error, model_id, revision=revision, settings=settings)) from error
    missing = missing_files(folder)
    if missing:
        raise HubError(f"the repository {model_id} has no {', '.join(missing)}")
    return folder


def _cached(model_id: str, *, revision: str | None, cache: Path) -> tuple[Path | None, list[str]]:
    """The cached snapshot, if any, and the names of the files that it lacks."""
    config = cached_file(model_id, "config.json", revision=revision, cache=cache)
    if config is None:
        return None, []
    folder = config.parent
    try:
        return folder, missing_files(folder)
    except PickledWeightsError:
        return folder, ["safetensors"]


def cached_file(model_id: str, name: str, *, revision: str | None, cache: Path) -> Path | None:
    """The cached file `name` of a repository, if any."""
    try:
        found = try_to_load_from_cache(model_id, name, revision=revision, cache_dir=cache)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def explain(
    error: BaseException, model_id: str, *, revision: str | None, settings: HubSettings
) -> str:
    """The error text for a failed download, with the remedy."""
    token = (
        "set HF_TOKEN to a token that may read it"
        if settings.access.token is None
        else "check HF_TOKEN's rights"
    )
    match error:
        case GatedRepoError():
            return f"{model_id} is gated: accept its terms on its page and {token}"
        case RevisionNotFoundError():
            return f"{model_id} has no revision {revision}: look at its branches, tags and commits on the hub"
        case RepositoryNotFoundError():
            return f"there is no model {model_id} on {settings.access.endpoint}, or it is private: {token}"
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return (
                f"access to {model_id} was refused (status {error.response.status_code}): {token}"
            )
        case HFValidationError():
            return f"{model_id} is neither a folder nor a name that the hub can have: {error}"
        case PickledWeightsError():
            return (
                f"{model_id}: {error}; download it with `hf download {model_id} --local-dir FOLDER`, then convert it"
                " with: millrace-shard convert FOLDER"
            )
        case IncompleteModelError():
            return f"the repository {model_id} cannot be served: {error}"
    access = settings.access
    return (
        f"{model_id} could not be downloaded from {access.endpoint} to {access.cache}: {first_line(error)};"
        " the partial download is kept, start again to resume it"
    )


def _with_tokenizer(folder: Path, settings: HubSettings) -> Path:
    if (folder / TOKENIZER).is_file():
        return folder
    # Most models need no conversion, and this import takes seconds.
    from millrace_shard.model_loader.fast_tokenizer import with_fast_tokenizer  # noqa: PLC0415

    log.info("building tokenizer.json, which %s lacks", folder)
    try:
        return with_fast_tokenizer(folder, side_root=settings.side_root)
    except PermissionError:
        return with_fast_tokenizer(folder, side_root=private_folder(Path(tempfile.gettempdir())))


def private_folder(shared: Path) -> Path:
    """A folder in `shared`, the same at each start, that only this user can write to. Raises HubError otherwise."""
    path = shared / f"millrace-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    # File names in the folder are predictable, so another user could plant a model there.
    status = path.lstat()
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not mine or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HubError(
            f"{path} can be written by other users: remove it, or set HF_HOME to a folder of yours"
        )
    return path
