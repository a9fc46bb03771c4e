"""Bodies and answers of vLLM's tokenizer routes, which serve harnesses without the tokenizer's files."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from millrace_router.api.body.fields import RequestModel, UInt32


class TokenizePromptRequest(RequestModel):
    """Body of `/tokenize` with `prompt` in place of `inputs`."""

    prompt: str
    add_special_tokens: bool | None = None
    """Whether the special tokens around every prompt are included; null is true."""


class TokenizePromptJson(TypedDict):
    """Answer of `/tokenize` to a `prompt`."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(RequestModel):
    """Body of `/detokenize`."""

    tokens: Annotated[list[UInt32], Field(fail_fast=True)]


class DetokenizeJson(TypedDict):
    """Answer of `/detokenize`: the text, special tokens included."""

    prompt: str


class TokenizerInfoJson(TypedDict):
    """Answer of `/tokenizer_info`; null for a token that the model does not have."""

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int
