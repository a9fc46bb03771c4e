"""Bodies and answers of the routes that load, unload and list adapters."""

from __future__ import annotations

from typing_extensions import TypedDict

from millrace_router.api.body.fields import RequestModel, Switch


class LoadLoraAdapterRequest(RequestModel):
    """vLLM's body; SGLang's has the same first two fields. An adapter keeps its name until it is unloaded."""

    lora_name: str | None = None
    lora_path: str | None = None
    """A folder, or an id on the hub."""
    load_inplace: Switch = False
    """Whether a name that is loaded already gets new files; running requests keep theirs."""


class UnloadLoraAdapterRequest(RequestModel):
    """vLLM's and SGLang's body."""

    lora_name: str | None = None


class LoadedAdaptersJson(TypedDict):
    """SGLang's answer."""

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]
    """The path of each name."""


class AdapterJson(TypedDict):
    """An adapter that the operator named."""

    name: str
    source: str
    """`hub` or `local`."""
    path: str
    revision: str | None
    digest: str | None
    """The version of new requests; null before the first use."""
    versions: list[str]
    """The digests that `name@sha256:…` finds, the newest first."""
    is_default: bool


class AdaptersJson(TypedDict):
    """Answer of `/adapters`."""

    adapters: list[AdapterJson]
