"""Names for calls, by which their results are told apart."""

from __future__ import annotations

import secrets
import string
import uuid

_ALPHABET = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Return an id as OpenAI's are."""
    return f"call_{uuid.uuid4().hex[:24]}"


def new_short_call_id() -> str:
    """Return nine letters and digits: the only ids that Mistral's templates take."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))
