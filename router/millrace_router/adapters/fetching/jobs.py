"""The jobs of the fetching process: a request of the router becomes its answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace_router.adapters.fetching.canonical import LoraModule, check_adapter, missing_targets
from millrace_router.adapters.fetching.canonical_file import read_adapter, write_adapter
from millrace_router.adapters.fetching.errors import FetchError, Invalid
from millrace_router.adapters.fetching.hub import Hub
from millrace_router.adapters.fetching.local import read_folder
from millrace_router.adapters.fetching.merging import merge
from millrace_router.adapters.fetching.peft_config import PeftConfig
from millrace_router.adapters.fetching.source_files import CONFIG_FILE, SourceFiles
from millrace_router.adapters.fetching.tensors import parse_safetensors
from millrace_router.errors import quoted
from millrace_router.request.adapter import (
    AdapterModule,
    AdapterSource,
    MergeRecipe,
    MergeStrategy,
    SignMethod,
)

JsonObject = dict[str, Any]
MAX_NOTED = 8


def answer(request: JsonObject) -> JsonObject:
    """Do the job of `request`; every FetchError is an answer too."""
    job = {"fetch": _fetch, "merge": _merge, "commit": _commit}[request["job"]]
    try:
        return job(request)
    except FetchError as error:
        return error.answer()


def _commit(request: JsonObject) -> JsonObject:
    source = request["source"]
    hub = Hub(source["endpoint"], source["token"])
    return {"commit": hub.commit_of(source["id"], source["revision"]).commit}


def _fetch(request: JsonObject) -> JsonObject:
    source, max_bytes = request["source"], request["limits"]["max_bytes"]
    if source["kind"] == AdapterSource.HUB:
        hub = Hub(source["endpoint"], source["token"])
        commit = hub.commit_of(source["id"], source["revision"])
        return _unless_known(commit.digest(), lambda: hub.read(commit, max_bytes), request)
    files = read_folder(source["id"], source["root"], max_bytes)
    return _unless_known(files.digest(), lambda: files, request)


def _unless_known(
    source_digest: str, read: Callable[[], SourceFiles], request: JsonObject
) -> JsonObject:
    """Check the files, unless the router already knows the result for them."""
    if source_digest == request["known"]:
        return {"is_known": True}
    try:
        return _checked(read(), request) | {"source_digest": source_digest}
    except Invalid as error:
        return error.answer() | {"source_digest": source_digest}


def _checked(files: SourceFiles, request: JsonObject) -> JsonObject:
    config = PeftConfig.parse(files.config)
    file = parse_safetensors(files.weights)
    shapes = [
        AdapterModule(name=name, inputs=inputs, outputs=outputs, bytes_per_slice=0)
        for name, inputs, outputs in request["modules"]
    ]
    modules = check_adapter(config, file, modules=shapes, max_rank=request["limits"]["max_rank"])
    missing = missing_targets(config, file)
    note = (
        f"target_modules of {CONFIG_FILE} names modules without tensors: "
        + ", ".join(quoted(name) for name in missing[:MAX_NOTED])
        if missing
        else None
    )
    return _written(modules, request) | {"note": note}


def _merge(request: JsonObject) -> JsonObject:
    cache, digests = Path(request["cache"]), request["digests"]
    adapters = [read_adapter(digest, cache) for digest in digests]
    recipe = MergeRecipe(
        ids=tuple(digests),
        weights=tuple(request["weights"]),
        strategy=MergeStrategy(request["strategy"]),
        density=request["density"],
        majority_sign_method=SignMethod(request["majority_sign_method"]),
    )
    return _written(merge(adapters, digests, recipe), request)


def _written(modules: list[LoraModule], request: JsonObject) -> JsonObject:
    version = write_adapter(modules, Path(request["cache"]))
    return {
        "digest": version.digest,
        "num_bytes": version.num_bytes,
        "modules": [[module.name, module.rank, module.bias is not None] for module in modules],
    }
