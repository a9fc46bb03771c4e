"""Reads the scheduling parameters of a request from its headers and its body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b

from millrace_router.errors import ValidationError
from millrace_router.request.request import SchedulingParameters

API_KEY_HEADER = "x-api-key"
"""Anthropic's clients put the API key here; all others send it as a bearer token."""
PRIORITY_HEADER = "x-priority"
TENANT_HEADER = "x-tenant"
FAIRNESS_HEADER = "x-gateway-inference-fairness-id"
"""The tenant's header of Kubernetes' Gateway API inference extension."""
MAX_QUEUE_HEADER = "x-max-queue-ms"
MAX_PRIORITY = 10
"""Priorities are from -10 to 10."""
MAX_QUEUE_MS = 10**12 - 1
DEFAULT_SCHEDULING = SchedulingParameters()

_INTEGER = re.compile(r"[+-]?[0-9]{1,9}")
_MILLISECONDS = re.compile(r"0*[1-9][0-9]{0,11}")


def scheduling_from(
    headers: Mapping[str, str],
    priority: int | None,
    *,
    by_tenant: bool,
    key_name: str | None = None,
    max_queue_seconds: float | None = None,
    address: str | None = None,
) -> SchedulingParameters:
    """Read the scheduling parameters; `headers` ignore case, and a body's `priority` beats the header's.

    With `by_tenant` the tenant is `key_name`, the name of the client's API key, or `tenant_of` of the headers.
    `max_queue_seconds` is the longest wait that the server allows; a client's limit may be shorter. A client without a
    tenant and without a key is known by its `address`.

    Raises:
        ValidationError: the priority is out of range, or the limit is not a positive number of milliseconds.

    """
    tenant = (key_name or tenant_of(headers)) if by_tenant else ""
    return SchedulingParameters(
        priority=_priority_of(headers) if priority is None else _checked("`priority`", priority),
        tenant=tenant,
        client=tenant or key_name or key_digest(headers) or address or "",
        max_queue_seconds=_sooner(_max_queue_seconds(headers), max_queue_seconds),
    )


def tenant_of(headers: Mapping[str, str]) -> str:
    """Return the name that a header gives, else a digest of the API key, so that the key itself is not kept."""
    return named_tenant(headers) or key_digest(headers)


def key_digest(headers: Mapping[str, str]) -> str:
    """Return a digest of the API key of a request, unchecked; "" for none."""
    key = presented_key(headers)
    if not key:
        return ""
    return blake2b(key.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def named_tenant(headers: Mapping[str, str]) -> str:
    """Return the tenant that `x-tenant` names, else the one that a gateway names; "" for none."""
    return headers.get(TENANT_HEADER) or headers.get(FAIRNESS_HEADER, "")


def presented_key(headers: Mapping[str, str]) -> str:
    """Return the API key of a request, unchecked; "" for none."""
    return authorization(headers).removeprefix("Bearer ") or headers.get(API_KEY_HEADER, "")


def authorization(headers: Mapping[str, str]) -> str:
    """Return the header with its scheme as `Bearer`, in whatever case the client wrote it; "" if it is absent."""
    value = headers.get("authorization", "")
    parts = value.split(maxsplit=1)
    is_bearer = len(parts) == 2 and parts[0].lower() == "bearer"
    return f"Bearer {parts[1]}" if is_bearer else value


def _priority_of(headers: Mapping[str, str]) -> int:
    text = headers.get(PRIORITY_HEADER)
    if text is None:
        return 0
    if _INTEGER.fullmatch(text) is None:
        raise _out_of_range(f"`{PRIORITY_HEADER}`", _shown(text))
    return _checked(f"`{PRIORITY_HEADER}`", int(text))


def _checked(name: str, priority: int) -> int:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise _out_of_range(name, priority)
    return priority


def _out_of_range(name: str, value: object) -> ValidationError:
    return ValidationError(
        f"{name} must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}. Given: {value}"
    )


def _max_queue_seconds(headers: Mapping[str, str]) -> float | None:
    text = headers.get(MAX_QUEUE_HEADER)
    if text is None:
        return None
    if _MILLISECONDS.fullmatch(text) is None:
        raise ValidationError(
            f"`{MAX_QUEUE_HEADER}` must be a positive integer of milliseconds. Given: {_shown(text)}"
        )
    return int(text) / 1000


def _sooner(requested: float | None, allowed: float | None) -> float | None:
    if requested is None or allowed is None:
        return requested if allowed is None else allowed
    return min(requested, allowed)


def _shown(text: str) -> str:
    """Return the text with bytes that are not UTF-8 escaped."""
    return text.encode(errors="backslashreplace").decode()
