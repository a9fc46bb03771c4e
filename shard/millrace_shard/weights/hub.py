"""From a model's name to a local folder that router and shards can read; local files are preferred."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from millrace_shard.errors import ModelError
from millrace_shard.variables import Variables
from millrace_shard.weights.checkpoint_files import (
    TOKENIZER,
    TOKENIZER_SOURCES,
    IncompleteModelError,
    PickledWeightsError,
    missing_files,
    missing_small_files,
    no_such_tag,
    refuse_other_kinds,
)
from millrace_shard.weights.download import (
    REPORT_SECONDS,
    TRANSIENT,
    HubAccess,
    HubUnreachableError,
    download_snapshot,
    first_line,
)
from millrace_shard.weights.gguf.file_names import (
    SUFFIX,
    chosen,
    in_short,
    lines_aside,
    mmproj_beside,
    models,
    part_names,
)
from millrace_shard.weights.gguf.known_folders import Beside, prepared_folder
from millrace_shard.weights.published import (
    NO_SAMPLING,
    PublishedModel,
    fetch_published,
    published_model,
)


def private_folder(shared: Path) -> Path:
    """A folder in `shared`, the same at each start, that only this user can write to. Raises ModelError otherwise."""
    path = shared / f"millrace-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    # File names in the folder are predictable, so another user could plant a model there.
    status = path.lstat()
    folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not folder or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ModelError(
            f"{path} can be written by other users: remove it, or set HF_HOME to a folder of yours"
        )
    return path


OFF = "off"
"""In place of the name of a file with an encoder of images."""
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
    needs_weights: bool = True
    """False: only configuration and tokenizer, for a router whose ranks are on other hosts."""
    needs_mmproj: bool = True
    """Whether the file with a GGUF model's encoder of images is downloaded with it."""

    @classmethod
    def of(
        cls,
        variables: Variables,
        *,
        progress_seconds: float = REPORT_SECONDS,
        needs_weights: bool = True,
    ) -> HubSettings:
        """The settings that the environment names; downloads log a line every `progress_seconds`."""
        override = variables.weights_cache_override
        return cls(
            access=HubAccess(
                endpoint=variables.hf_endpoint.rstrip("/"),
                token=variables.hub_token,
                cache=variables.hub_cache,
                progress_seconds=progress_seconds,
            ),
            offline=variables.is_offline,
            side_root=variables.hub_home / "millrace",
            weights_override=override.expanduser() if override else None,
            needs_weights=needs_weights,
        )

    def missing(self, folder: Path) -> list[str]:
        """The names of files that `folder` lacks. Raises PickledWeightsError."""
        return missing_files(folder) if self.needs_weights else missing_small_files(folder)


def resolve(
    model_id: str,
    *,
    revision: str | None,
    settings: HubSettings,
    tokenizer: str | None = None,
    mmproj: str | None = None,
) -> Path:
    """The local folder with config, weights and tokenizer.json of `model_id`: a path, a published model, a hub name.

    The model is downloaded if the cache lacks it. The path may name a GGUF file, and the name on the hub one by its
    block type, as in `org/repo:Q4_K_M`. Its tokenizer may come from another model, `tokenizer`, and its encoder of
    images from the file `mmproj` in place of the one next to it; OFF is none. Raises ModelError, whose text names the
    remedy.
    """
    if mmproj not in {None, OFF} and not Path(mmproj).expanduser().is_file():
        raise HubError(f"file {mmproj} of --mmproj does not exist")
    from_gguf = partial(_from_gguf, tokenizer=tokenizer, mmproj=mmproj, settings=settings)
    path, (name, tag) = Path(model_id).expanduser(), split_tag(model_id)
    if settings.weights_override is None:
        if (published := published_model(model_id)) is not None:
            path = _published_file(published, revision=revision, settings=settings)
            return from_gguf(path, sampling=published.sampling)
        if is_file_name(model_id):
            return from_gguf(path)
    folder = settings.weights_override or (path if path.is_dir() else None)
    if folder is None and is_path(model_id):
        raise HubError(f"folder {model_id} does not exist")
    if folder is None:
        settings = replace(settings, needs_mmproj=mmproj is None)
        found = _from_hub(name, tag, revision, settings, may_lack_weights=tokenizer is not None)
    else:
        found = only_gguf(folder, None if path.is_dir() else tag) or folder
    if found.is_file():
        return from_gguf(found)
    if tokenizer is not None:
        raise HubError(
            f"--tokenizer-name={tokenizer} is for GGUF files only; {model_id} has its own tokenizer"
        )
    if mmproj not in {None, OFF}:
        raise HubError(f"--mmproj={mmproj} is for GGUF files only; {model_id} has its own encoder")
    return _with_tokenizer(found if folder is None else _local(folder, settings), settings)


def split_tag(model_id: str) -> tuple[str, str | None]:
    """The parts of `org/repo:Q4_K_M`: a name on the hub and a block type, None where there is only a name."""
    name, _, tag = model_id.partition(":")
    if not tag or is_path(name) or "/" not in name or Path(model_id).exists():
        return model_id, None
    return name, tag


def is_path(model_id: str) -> bool:
    """Whether `model_id` cannot be a name on the hub."""
    return model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1


def only_gguf(folder: Path, tag: str | None = None) -> Path | None:
    """The one GGUF file of a folder without other weights, or a part of the one split file; None for other folders.

    With a `tag`, it is the one of that block type. Raises HubError if there is none.
    """
    if not folder.is_dir() or (tag is None and any(folder.glob("*.safetensors"))):
        return None
    names = models(path.name for path in folder.iterdir())
    if tag is not None:
        if (name := chosen(names, tag)) is None:
            raise HubError(f"{folder}: {no_such_tag(tag, names)}")
        return folder / name
    return folder / names[0] if len(names) == 1 else None


def is_file_name(model_id: str) -> bool:
    """Whether `model_id` names a GGUF file, which need not exist."""
    path = Path(model_id).expanduser()
    if path.suffix == SUFFIX:
        return not path.is_dir()
    return is_path(model_id) and path.is_file()


def _published_file(model: PublishedModel, *, revision: str | None, settings: HubSettings) -> Path:
    if revision is not None:
        raise HubError(
            f"revision {revision} of {model.name} does not exist: start without --revision"
        )
    return fetch_published(
        model,
        root=settings.side_root / "published",
        offline=settings.offline,
        progress_seconds=settings.access.progress_seconds,
    )


def _from_gguf(
    path: Path,
    *,
    tokenizer: str | None,
    mmproj: str | None,
    settings: HubSettings,
    sampling: Mapping[str, float] = NO_SAMPLING,
) -> Path:
    if not path.is_file():
        raise HubError(f"file {path} does not exist")
    images = mmproj_beside(path) if mmproj is None else Path(mmproj).expanduser()
    if mmproj == OFF:
        images = None
    used = {path.name} | (set() if images is None else {images.name})
    for line in lines_aside(each.name for each in path.parent.iterdir() if each.name not in used):
        log.info("%s", line)
    source = None if tokenizer is None else _tokenizer_folder(tokenizer, settings)
    beside = Beside(
        tokenizer=source, sampling=sampling, mmproj=images, may_lack_images=mmproj is None
    )
    return _beside(settings, lambda root: prepared_folder(path, root / "gguf", beside))


def _beside(settings: HubSettings, make: Callable[[Path], Path]) -> Path:
    """Make files in the folder for such files, or in one below the system's temporary folder if it is read-only."""
    try:
        return make(settings.side_root)
    except PermissionError:
        return make(private_folder(Path(tempfile.gettempdir())))


def _tokenizer_folder(name: str, settings: HubSettings) -> Path:
    """The local folder with the tokenizer.json of `name`, a folder or a name on the hub."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if is_path(name):
            raise HubError(f"folder {name} of --tokenizer-name does not exist")
        folder = _tokenizer_from_hub(name, settings)
    if not any((folder / source).is_file() for source in TOKENIZER_SOURCES):
        raise HubError(f"{folder} has no {TOKENIZER} for --tokenizer-name")
    return _with_tokenizer(folder, settings)


def _tokenizer_from_hub(name: str, settings: HubSettings) -> Path:
    cached = cached_file(name, TOKENIZER, revision=None, cache=settings.access.cache)
    if cached is not None:
        return cached.parent
    if settings.offline:
        raise HubError(
            f"{TOKENIZER} of {name} is not in the cache {settings.access.cache}; HF_HUB_OFFLINE forbids the download"
        )
    try:
        return download_snapshot(
            name, revision=None, access=settings.access, needs_weights=False, may_be_gguf=False
        )
    except DOWNLOAD_FAILURES as error:
        raise HubError(explain(error, name, revision=None, settings=settings)) from error


def _local(folder: Path, settings: HubSettings) -> Path:
    try:
        refuse_other_kinds(folder)
        missing = settings.missing(folder)
    except PickledWeightsError as error:
        raise HubError(
            f"{folder}: {error}; convert them with: millrace-shard convert {folder}"
        ) from error
    if missing:
        files = models(path.name for path in folder.iterdir())
        several = f" (it has {in_short(files)})" if len(files) > 1 else ""
        hint = f"; name the file to serve{several}: --model-id {folder / files[0]}" if files else ""
        raise HubError(f"{folder} has no {', '.join(missing)}{hint}")
    return folder.resolve()


def _from_hub(
    model_id: str,
    tag: str | None,
    revision: str | None,
    settings: HubSettings,
    *,
    may_lack_weights: bool,
) -> Path:
    """The folder of a model, or the GGUF file of the block type `tag`; a GGUF file also if safetensors are missing.

    With `may_lack_weights`, safetensors are not downloaded.
    """
    cached, missing = (None, []) if tag else _cached(model_id, revision, settings)
    # Only the hub knows whether a repository has safetensors, too, and all its types.
    file = _cached_gguf(model_id, tag, revision, settings) if tag or settings.offline else None
    if file is not None and (cached is None or missing):
        cached, missing = file, []
    if cached is not None and not missing:
        log.info("found %s in %s", model_id, cached)
        return cached
    if settings.offline:
        at = f":{tag}" if tag else ""
        at += f" at revision {revision}" if revision else ""
        what = f"lacks {', '.join(missing)}" if cached is not None else "is not"
        raise HubError(
            f"{model_id}{at} {what} in the cache {settings.access.cache}; HF_HUB_OFFLINE forbids the"
            " download: unset it, or point HUGGINGFACE_HUB_CACHE or HF_HOME at the cache that has the model"
        )
    try:
        folder = download_snapshot(
            model_id,
            revision=revision,
            access=settings.access,
            needs_weights=settings.needs_weights and not may_lack_weights,
            tag=tag,
            needs_mmproj=settings.needs_mmproj,
        )
    except DOWNLOAD_FAILURES as error:
        file = _cached_gguf(model_id, tag, revision, settings)
        if isinstance(error, HubUnreachableError) and file is not None:
            log.warning("%s; serving %s, which is in the cache", error, file)
            return file
        raise HubError(explain(error, model_id, revision=revision, settings=settings)) from error
    missing = [] if folder.is_file() or may_lack_weights else settings.missing(folder)
    if missing:
        raise HubError(f"the repository {model_id} has no {', '.join(missing)}")
    return folder


def _cached_gguf(
    model_id: str, tag: str | None, revision: str | None, settings: HubSettings
) -> Path | None:
    """The GGUF file that the rule chooses among those in the cache; None if it lacks a part."""
    try:
        # Without patterns it would ask for all files of the repository.
        snapshot = snapshot_download(
            model_id,
            revision=revision,
            cache_dir=settings.access.cache,
            local_files_only=True,
            allow_patterns=[],
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    folder = Path(snapshot)
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    name = chosen(names, tag)
    if name is None or any(part not in names for part in part_names(name)):
        return None
    return folder / name


def _cached(
    model_id: str, revision: str | None, settings: HubSettings
) -> tuple[Path | None, list[str]]:
    """The cached snapshot, if any, and the names of the files that it lacks."""
    config = cached_file(model_id, "config.json", revision=revision, cache=settings.access.cache)
    if config is None:
        return None, []
    folder = config.parent
    try:
        return folder, settings.missing(folder)
    except PickledWeightsError:
        return folder, ["safetensors"]


def cached_file(model_id: str, name: str, *, revision: str | None, cache: Path) -> Path | None:
    try:
        file = try_to_load_from_cache(model_id, name, revision=revision, cache_dir=cache)
    except HFValidationError:
        return None
    return Path(file) if isinstance(file, str) else None


def explain(  # noqa: PLR0911
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
            return f"revision {revision} of {model_id} does not exist: look at its branches and tags on the hub"
        case RepositoryNotFoundError():
            return f"model {model_id} does not exist on {settings.access.endpoint}, or is private: {token}"
        case HubUnreachableError():
            return f"{model_id} is not a folder and is not in the cache {settings.access.cache}; {error}"
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
    log.info("building tokenizer.json, which %s lacks", folder)
    return _beside(settings, lambda root: with_fast_tokenizer(folder, side_root=root))


def with_fast_tokenizer(folder: Path, *, side_root: Path) -> Path:
    """A folder below `side_root` with links to the files of `folder` and the tokenizer.json that `transformers` builds.

    `folder` may be read-only and does not change. Raises ModelError if no fast tokenizer can be built.
    """
    target = side_root / f"{folder.resolve().name}-{_digest(folder)}"
    if (target / TOKENIZER).is_file():
        return target
    side_root.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=side_root))
    try:
        for path in folder.iterdir():
            (building / path.name).symlink_to(path.resolve())
        _save(folder, building / TOKENIZER)
        try:
            building.rename(target)
        except OSError:
            # Another process was faster, and its folder has the same contents.
            if not (target / TOKENIZER).is_file():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _save(folder: Path, path: Path) -> None:
    # The import takes seconds, and most models have a tokenizer.json.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, use_fast=True, trust_remote_code=False
        )
        backend = tokenizer.backend_tokenizer
    except (AttributeError, ImportError, OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder} has no {TOKENIZER}, and none can be built from its tokenizer files ({error});"
            f" put a {TOKENIZER} into the folder"
        ) from error
    backend.save(str(path))


def _digest(folder: Path) -> str:
    """A digest that changes when any file of the folder is replaced."""
    state = [str(folder.resolve())]
    for path in sorted(folder.iterdir()):
        stat = path.stat()
        state.append(f"{path.name} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(state).encode()).hexdigest()[:12]
