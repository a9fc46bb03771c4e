"""The text that is printed once the server answers: its address, and requests to paste."""

from __future__ import annotations

import json

PROMPT = "What is continuous batching?"
NUM_TOKENS = 60


def url(hostname: str, port: int, *, scheme: str = "http") -> str:
    """The server's URL for clients on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(hostname)  # noqa: S104
    if host is None:
        host = f"[{hostname}]" if ":" in hostname else hostname
    return f"{scheme}://{host}:{port}"


def closing_banner(base: str, *, model: str, needs_key: bool) -> str:
    """URLs, a curl command and two lines of Python."""
    request = {"inputs": PROMPT, "parameters": {"max_new_tokens": NUM_TOKENS}}
    body = json.dumps(request, separators=(",", ":"))
    key = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    token = ', token="YOUR_API_KEY"' if needs_key else ""
    call = (
        f'InferenceClient("{base}"{token}).text_generation("{PROMPT}", max_new_tokens={NUM_TOKENS})'
    )
    return "\n".join(
        (
            "",
            f"  {model} is served at {base}, with a chat page for browsers",
            f"  documentation at {base}/docs, metrics at {base}/metrics",
            "",
            f"  curl {base}/generate -X POST -d '{body}' -H 'Content-Type: application/json'{key}",
            "",
            "  from huggingface_hub import InferenceClient",
            f"  print({call})",
            "",
            "",
        )
    )
