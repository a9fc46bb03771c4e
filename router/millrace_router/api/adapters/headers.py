"""LoRAX's headers of answers."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from millrace_router.request.adapter import AdapterReference
from millrace_router.server.services import Services

_KEPT = "/:@._-+~ "
"""Characters of ids that need no encoding, beside letters and digits."""


def lorax_headers(services: Services, adapter: AdapterReference | None) -> dict[str, str]:
    """Return the headers of an answer to one of LoRAX's clients; `adapter` is None for the base model."""
    headers = {"x-model-id": header_value([services.config.model_id])}
    if adapter is None:
        return headers
    names = [adapter.name] if adapter.merged is None else adapter.merged.ids
    headers["x-adapter-id"] = header_value(names)
    headers["x-adapter-source"] = _source(services, adapter)
    return headers


def header_value(ids: Sequence[str]) -> str:
    """Join ids with commas; characters that a header cannot have, and commas, are percent-encoded."""
    return ",".join(quote(one, safe=_KEPT, errors="replace") for one in ids)


def _source(services: Services, adapter: AdapterReference) -> str:
    if adapter.source is not None:
        return adapter.source
    resolver = services.adapters
    registration = None if resolver is None else resolver.registry.get(adapter.name)
    return services.config.adapter_source if registration is None else registration.source.kind
