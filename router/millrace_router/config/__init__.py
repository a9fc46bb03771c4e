"""The router's settings: flags, each with its environment variable, default and meaning, and variables without a flag.

Entry point: `RouterConfig`. Each flag is a field of the group that it belongs to. The launcher imports this room, so it
may import nothing heavier than pydantic.
Imports: millrace_proto.
"""

from millrace_router.config.adapter_specs import (
    AdapterSpec,
    sglang_adapter,
    split_adapters,
    tgi_adapter,
    vllm_adapter,
)
from millrace_router.config.listening import ANY_ADDRESS, listen_address
from millrace_router.config.router_config import RouterConfig
from millrace_router.config.traces import TraceTarget, trace_target
from millrace_router.config.values import OnOff, split_commas

__all__ = [
    "ANY_ADDRESS",
    "AdapterSpec",
    "OnOff",
    "RouterConfig",
    "TraceTarget",
    "listen_address",
    "sglang_adapter",
    "split_adapters",
    "split_commas",
    "tgi_adapter",
    "trace_target",
    "vllm_adapter",
]
