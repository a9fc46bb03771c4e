"""Flags for making prompts of requests, and answers of texts."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator
from pydantic_settings import NoDecode

from millrace_proto.sampling import SamplingPresets
from millrace_router.config.values import split_commas

DEFAULTED = [field.name for field in fields(SamplingPresets)]


class TextFlags(BaseModel):
    """Templates, parsers, tasks and the dialect of answers."""

    validation_workers: int = Field(default=2, description="Threads that tokenize prompts.")
    tokenizer_config_path: Path | None = Field(
        default=None,
        description="tokenizer_config.json to take the chat template and end tokens from.",
    )
    tool_call_parser: Literal[
        "auto",
        "cohere_command3",
        "cohere_command4",
        "command_r7b",
        "deepseek_v3",
        "deepseek_v31",
        "functiongemma",
        "gemma4",
        "glm45",
        "glm47",
        "gpt_oss",
        "granite",
        "granite-20b-fc",
        "granite4",
        "harmony",
        "hermes",
        "json",
        "kimi_k2",
        "lfm2",
        "llama",
        "llama3_json",
        "llama4_json",
        "llama4_pythonic",
        "mimo",
        "minimax",
        "minimax_m2",
        "mistral",
        "nemotron_json",
        "olmo3",
        "openai",
        "phi4_mini_json",
        "pythonic",
        "qwen3_coder",
        "qwen3_json",
        "qwen3_xml",
        "seed_oss",
        "step3p5",
    ] = Field(
        default="auto",
        description="How the model writes tool calls, by the names of docs/tool-calling.md and of other servers; auto"
        " reads it from the chat template.",
    )
    reasoning_parser: Literal[
        "auto",
        "none",
        "think",
        "mistral",
        "gpt_oss",
        "cohere",
        "gemma4",
        "granite",
        "granite_phrases",
        "seed_oss",
        "deepseek_r1",
        "deepseek_v3",
        "glm45",
        "hunyuan_a13b",
        "kimi_k2",
        "magistral",
        "minimax_m2",
        "minimax_m3",
        "nemotron",
        "openai_gptoss",
        "qwen3",
        "smollm3",
        "step3",
    ] = Field(
        default="auto",
        description="How the model writes thoughts, which answers to chats separate from their text; auto reads it from"
        " the chat template. With none, thoughts stay in the text.",
    )
    strict_tgi: bool = Field(
        default=False,
        description="Answer as TGI does even where OpenAI's contract or its own clients want otherwise.",
    )
    allow_special_tokens_in_content: bool = Field(
        default=False,
        description="Read texts of control tokens, such as <|im_end|>, as control tokens even in messages, tools and"
        " other parts of chats, where they otherwise are plain text.",
    )
    generation_config: Literal["auto", "off"] = Field(
        default="auto",
        description="Whether the model's generation_config.json gives defaults for what requests to OpenAI's and"
        f" Anthropic's routes leave out: {', '.join(DEFAULTED)}, max_new_tokens.",
    )
    task: Annotated[tuple[Literal["auto", "generate", "embed", "score"], ...], NoDecode] = Field(
        default=("auto",),
        description="What the server does with the model: generate text, embed texts, score (rerank) pairs of texts, or"
        " several of these, separated by commas; auto reads it from the model's files.",
    )
    strict_fields: bool = Field(
        default=False,
        description="Refuse requests with unknown fields, which are otherwise named in a header of the answer.",
    )
    disable_grammar_support: bool = Field(
        default=False, description="Refuse requests with a grammar, or with tools that need one."
    )
    trust_remote_code: bool = Field(
        default=False, description="No effect: code from a model repository is never run."
    )
    max_image_fetch_size: int = Field(
        default=1_073_741_824,
        ge=0,
        description="No effect: --max-image-bytes limits images, whether they are fetched or sent.",
    )

    @field_validator("task", mode="before")
    @classmethod
    def _split_tasks(cls, value: object) -> object:
        return split_commas(value)
