"""LoRA adapters in requests and answers: LoRAX's fields, names of models, and headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import quote

from aiohttp import web
from pydantic import Field

from millrace_router.adapters.names import check_name
from millrace_router.api.body.fields import Float32, Items, NullIs, RequestModel
from millrace_router.errors import AdapterNotFound, AdapterRemoved, UnknownModel, ValidationError
from millrace_router.request.adapter import (
    ADAPTER_TOKEN_HEADER,
    AdapterReference,
    AdapterSource,
    MergeRecipe,
    MergeStrategy,
    SignMethod,
)
from millrace_router.server.services import SERVICES, Services

MAX_MERGED_ADAPTERS = 32
_PRUNING = frozenset({MergeStrategy.TIES, MergeStrategy.DARE_LINEAR, MergeStrategy.DARE_TIES})
OWN_NAME = "tgi"
"""The model name that clients without a preference send."""
NO_NAMES = frozenset({None, "", OWN_NAME})
MAX_TOKEN_LENGTH = 1024
NOT_HERE = frozenset({"s3", "pbase"})
"""Sources of LoRAX that are not supported."""
_KEPT = "/:@._-+~ "
"""Characters of ids, besides letters and digits, that need not be encoded."""


class MergedAdapters(RequestModel):
    """Several adapters with a weight each."""

    ids: Annotated[Items[str], NullIs(list)] = Field(default_factory=list)
    weights: Items[Float32] | None = None
    """1 each when absent."""
    merge_strategy: str | None = None
    """`linear` when absent; `cat`, the exact weighted sum, is not in LoRAX."""
    density: Float32 | None = None
    """The share of parameters that `ties`, `dare_linear` and `dare_ties` keep."""
    majority_sign_method: str | None = None

    def recipe(self) -> MergeRecipe:
        """Check, and translate; raises ValidationError."""
        if not self.ids:
            raise ValidationError(
                "at least one adapter ID must be provided when setting `adapters`"
            )
        if len(self.ids) > MAX_MERGED_ADAPTERS:
            raise ValidationError(
                f"`ids` must be at most {MAX_MERGED_ADAPTERS}. Given: {len(self.ids)}"
            )
        weights = (1.0,) * len(self.ids) if self.weights is None else tuple(self.weights)
        if len(weights) != len(self.ids):
            raise ValidationError("number of adapter IDs must match number of adapter weights")
        strategy = self._strategy()
        return MergeRecipe(
            ids=tuple(self.ids),
            weights=weights,
            strategy=strategy,
            density=self._density(strategy),
            majority_sign_method=self._sign_method(),
        )

    def _strategy(self) -> MergeStrategy:
        try:
            return MergeStrategy(self.merge_strategy or MergeStrategy.LINEAR)
        except ValueError:
            words = ", ".join(f"`{word}`" for word in MergeStrategy)
            raise ValidationError(f"`merge_strategy` must be one of {words}") from None

    def _density(self, strategy: MergeStrategy) -> float:
        if strategy not in _PRUNING:
            return 1.0
        if self.density is None or not 0 < self.density <= 1:
            raise ValidationError(
                f"`density` must be > 0.0 and <= 1.0 with the strategy `{strategy}`"
            )
        return self.density

    def _sign_method(self) -> SignMethod:
        try:
            return SignMethod(self.majority_sign_method or SignMethod.TOTAL)
        except ValueError:
            raise ValidationError("`majority_sign_method` must be `total` or `frequency`") from None


def adapter_of_fields(
    request: web.Request,
    *,
    adapter_id: str | None,
    merged: MergedAdapters | None = None,
    lora_path: str | None = None,
    source: str | None = None,
    token: str | None = None,
) -> AdapterReference | None:
    """Return the adapter of a request of the native routes; None for the base model. Raises RouterError."""
    services = request.app[SERVICES]
    adapter_source, presented = source_of(source), token_of(request, token)
    if merged is not None:
        if adapter_id:
            raise ValidationError("at most one of `adapter_id` or `adapters` may be provided")
        return AdapterReference(merged=merged.recipe(), source=adapter_source, token=presented)
    if services.config.names_the_model(adapter_id):
        return None
    if adapter_id:
        return AdapterReference(name=check_name(adapter_id), source=adapter_source, token=presented)
    if lora_path:
        return _by_name(services, lora_path)
    return _default(services)


def adapter_of_model(
    request: web.Request,
    model: str | None,
    *,
    lora_path: str | None = None,
    source: str | None = None,
    token: str | None = None,
) -> AdapterReference | None:
    """Return the adapter that the name of a model means, or else SGLang's `lora_path`; None for the base model.

    Raises:
        UnknownModel: nothing has this name, and the server refuses such names.
        ValidationError: another field is wrong.

    """
    services = request.app[SERVICES]
    config = services.config
    adapter_source, presented = source_of(source), token_of(request, token)
    name = model or ""
    if name in NO_NAMES:
        return _by_name(services, lora_path) if lora_path else _default(services)
    # LoRAX's form, base:adapter; a name of the model may have colons too.
    base = next((one for one in config.all_names if name.startswith(f"{one}:")), None)
    if base is not None and not config.names_the_model(name):
        name = check_name(name.removeprefix(f"{base}:"))
        return AdapterReference(name=name, source=adapter_source, token=presented)
    if not config.names_the_model(name):
        resolver = services.adapters
        if adapter_source is not None or (resolver is not None and resolver.is_adapter(name)):
            return AdapterReference(name=check_name(name), source=adapter_source, token=presented)
        if refuses_unknown_models(services):
            raise UnknownModel(name)
    return _by_name(services, lora_path) if lora_path else None


def refuses_unknown_models(services: Services) -> bool:
    """Return whether a model that is not served is an error: with adapters it may be a mistyped adapter."""
    word = services.config.unknown_model
    if word is not None:
        return word == "refuse"
    return services.adapters is not None and not services.dialect.ignores_adapters


def source_of(word: str | None) -> AdapterSource | None:
    """Read LoRAX's `adapter_source`; raises ValidationError."""
    if word is None:
        return None
    if word in NOT_HERE:
        raise ValidationError(
            f"`adapter_source` {word} is not supported: adapters come from `hub` or `local`"
        )
    if word not in set(AdapterSource):
        raise ValidationError("`adapter_source` must be `hub` or `local`")
    return AdapterSource(word)


def token_of(request: web.Request, token: str | None) -> str | None:
    """Return the client's own token for the hub, from the body or its header; raises ValidationError."""
    presented = token or request.headers.get(ADAPTER_TOKEN_HEADER) or None
    if presented is None:
        return None
    if len(presented) > MAX_TOKEN_LENGTH or not (presented.isascii() and presented.isprintable()):
        raise ValidationError("the token for adapters is not a token")
    return presented


def _by_name(services: Services, name: str) -> AdapterReference:
    """Return the registered adapter of this name, which cannot be a path. Raises AdapterNotFound."""
    resolver = services.adapters
    if resolver is None or resolver.registry.get(check_name(name)) is None:
        if resolver is not None and resolver.registry.was(name):
            raise AdapterRemoved(name)
        raise AdapterNotFound(name)
    return AdapterReference(name=name)


def _default(services: Services) -> AdapterReference | None:
    return None if services.adapters is None else services.adapters.default


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
