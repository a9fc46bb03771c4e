"""What vLLM's routes for tokenizers take and answer, which harnesses ask where they have no tokenizer's files."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from millrace_router.api.fields import RequestModel, UInt32


class TokenizePromptRequest(RequestModel):
    """Body of `/tokenize` that has a `prompt` in the place of `inputs`."""

    prompt: str
    add_special_tokens: bool | None = None
    """Whether the tokens that begin or end every prompt are among them; null is yes."""


class TokenizePromptJson(TypedDict):
    """Answer to that."""

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
    """Answer of `/tokenizer_info`; null for what the model has not."""

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int
