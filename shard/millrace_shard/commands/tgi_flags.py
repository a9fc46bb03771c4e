"""Flags of TGI's `text-generation-server` that are accepted without effect."""

from __future__ import annotations

from collections.abc import Iterator

from millrace_shard.config import ShardConfig

WITHOUT_EFFECT = {
    "trust_remote_code": "code from a model repository is never run",
    "max_input_tokens": "the router limits prompts",
}


def notices(config: ShardConfig) -> Iterator[str]:
    """A line for each flag that was set and has no effect."""
    for name, reason in WITHOUT_EFFECT.items():
        if getattr(config, name):
            yield f"{_option(name)} has no effect: {reason}"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
