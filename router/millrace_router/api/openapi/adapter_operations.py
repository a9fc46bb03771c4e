"""The routes about adapters in the table of routes."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus

from millrace_router.api.admin.routes import (
    AdaptersJson,
    LoadedAdaptersJson,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
)
from millrace_router.api.openapi.operation import READING, Operation

CHANGING = (*READING, HTTPStatus.NOT_FOUND)

_vllm = partial(Operation, method="post", is_admin=True, openai=True, answer=bytes)
_sglang = partial(
    Operation,
    method="post",
    is_admin=True,
    openai=True,
    answer=LoadedAdaptersJson,
    failures=CHANGING,
    failure=LoadedAdaptersJson,
)

ADAPTER_OPERATIONS = (
    _vllm(
        path="/v1/load_lora_adapter",
        id="load_lora_adapter",
        summary="Let requests name a LoRA adapter, or give a name new files",
        body=LoadLoraAdapterRequest,
        failures=(*CHANGING, HTTPStatus.SERVICE_UNAVAILABLE),
    ),
    _vllm(
        path="/v1/unload_lora_adapter",
        id="unload_lora_adapter",
        summary="Take the name of a LoRA adapter away",
        body=UnloadLoraAdapterRequest,
        failures=CHANGING,
    ),
    _sglang(
        path="/load_lora_adapter",
        id="sglang_load_lora_adapter",
        summary="The same as `/v1/load_lora_adapter`, in SGLang's form",
        body=LoadLoraAdapterRequest,
    ),
    _sglang(
        path="/unload_lora_adapter",
        id="sglang_unload_lora_adapter",
        summary="The same as `/v1/unload_lora_adapter`, in SGLang's form",
        body=UnloadLoraAdapterRequest,
    ),
    Operation(
        method="get",
        is_admin=True,
        path="/adapters",
        id="adapters",
        summary="The LoRA adapters that the operator named, and their versions",
        answer=AdaptersJson,
        failures=(HTTPStatus.NOT_FOUND,),
        openai=True,
    ),
)
