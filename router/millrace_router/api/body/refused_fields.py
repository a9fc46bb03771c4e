"""Fields of other servers that this one does not use: those it refuses, with the reason, and those without effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace_router.api.body.fields import FieldScope


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field that would change the answer and is not supported."""

    name: str
    reason: str = ""
    neutral: tuple[Any, ...] = ()
    """Values, besides null, that change nothing, so that the field may have them."""

    def refuses(self, value: object) -> bool:
        """Return whether `value` would change the answer."""
        # 0 == False in Python, and both change nothing.
        return value is not None and value not in self.neutral


@dataclass(frozen=True, slots=True)
class UnusedFields:
    """What becomes of the fields of one object that its model does not have; other fields are unknown."""

    refused: Mapping[str, RefusedField] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    """Accepted, since they do not change the answer here or anywhere."""


def _refused(
    names: str, reason: str = "", *, neutral: Iterable[object] = ()
) -> Iterator[RefusedField]:
    for name in names.split():
        yield RefusedField(name, reason, tuple(neutral))


def _unused(*groups: Iterable[RefusedField], without_effect: str = "") -> UnusedFields:
    fields = [one for group in groups for one in group]
    return UnusedFields({one.name: one for one in fields}, frozenset(without_effect.split()))


SAMPLERS = "the order of sampling is fixed, and other samplers do not exist here"
ENDS = "a text ends by tokens, stop strings and `max_tokens`"
NOT_IN_ANSWERS = "answers do not contain it here"
ONE_FORM = "structured output has one form here"
FOREIGN_GRAMMARS = (
    "responseSchema responseJsonSchema responseFormat jsonSchema output_schema json_mode guided_decoding"
    " guided_decoding_params guided_decoding_guide regex_pattern grammar_string structural_tag"
)
"""Fields of other servers alone that have a grammar."""
GRAMMARS = (
    "structured_outputs guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf schema"
    f" response_schema format {FOREIGN_GRAMMARS}"
)
"""Fields of other servers and routes that have a grammar."""
ANTHROPICS = "output_format output_config"
WRAPPERS = (
    *_refused("extra_body parameters", "its fields belong to the body itself", neutral=[{}]),
    *_refused(
        "nvext sampling_params generation_config generationConfig",
        "the body itself has fields for it",
        neutral=[{}],
    ),
)
"""Objects of clients and of other servers whose fields would change the answer."""
SAMPLING = (
    *WRAPPERS,
    *_refused("truncation_side", "the last tokens are kept", neutral=["left"]),
    *_refused(
        "use_beam_search",
        "there is no beam search; `n` and `best_of` sample several answers",
        neutral=[False],
    ),
    *_refused(
        "logits_processors custom_logit_processor custom_params vllm_xargs",
        "clients bring no code",
        neutral=[[], {}],
    ),
    *_refused("repetition_detection stop_regex", ENDS, neutral=["", [], {}]),
    *_refused("logprob_token_ids", neutral=["", [], {}]),
    *_refused(
        "return_hidden_states return_routed_experts return_cached_tokens_details",
        NOT_IN_ANSWERS,
        neutral=[False],
    ),
    *_refused("routed_experts_prompt_start", NOT_IN_ANSWERS, neutral=[0]),
    *_refused("prompt_embeds session_params"),
    *_refused("dynatemp_range mirostat min_keep", SAMPLERS, neutral=[0]),
    *_refused("n_indent t_max_predict_ms", ENDS, neutral=[0]),
    *_refused("samplers", SAMPLERS),
    *_refused("repeat_penalty", "use `repetition_penalty`", neutral=[1]),
    *_refused("n_predict", "use `max_tokens`", neutral=[-1]),
    *_refused("n_cmpl", "use `n`", neutral=[1]),
    *_refused("n_probs", "use `logprobs`", neutral=[0]),
    *_refused("return_tokens", "use `return_token_ids`", neutral=[False]),
    *_refused("timings_per_token return_progress", NOT_IN_ANSWERS, neutral=[False]),
    *_refused("response_fields", NOT_IN_ANSWERS, neutral=[[]]),
    *_refused("lora", "name the adapter as `model`", neutral=[[]]),
    *_refused("grammar", "use `structured_outputs`", neutral=[""]),
)
"""Of chats, text completions and responses."""
SAMPLING_WITHOUT_EFFECT = """
    spaces_between_special_tokens length_penalty early_stopping kv_transfer_params ec_transfer_params bootstrap_host
    bootstrap_port bootstrap_room data_parallel_rank request_id rid session_id custom_labels return_token_offsets
    stream_interval watermarking media_io_kwargs mm_processor_kwargs max_dynamic_patch min_dynamic_patch user store
    metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention dynatemp_exponent mirostat_tau
    mirostat_eta repeat_last_n post_sampling_probs n_keep n_discard n_cache_reuse cache_prompt id_slot
    sse_ping_interval speculative.n_max speculative.n_min speculative.p_min
"""
COMMON = (
    *SAMPLING,
    *_refused(
        f"{FOREIGN_GRAMMARS} {ANTHROPICS} text",
        "use `response_format`",
        neutral=["", False],
    ),
    *_refused("schema response_schema format", "use `response_format`", neutral=[""]),
    *_refused("guided_whitespace_pattern structural_tag", ONE_FORM, neutral=[""]),
)
"""Of chats and text completions."""
COMMON_WITHOUT_EFFECT = f"{SAMPLING_WITHOUT_EFFECT} guided_decoding_backend"
POOLING = (*_refused("embed_dtype endianness", "numbers are float32, little-endian"),)
POOLING_WITHOUT_EFFECT = "mm_processor_kwargs user request_id rid"

UNUSED_FIELDS: dict[FieldScope, UnusedFields] = {
    FieldScope.VERTEX: _unused(
        _refused("parameters", "each instance has its own", neutral=[{}]),
    ),
    FieldScope.GENERATE: _unused(
        WRAPPERS,
        _refused(
            f"{GRAMMARS} {ANTHROPICS} grammar", "use `parameters.grammar`", neutral=["", False]
        ),
        _refused("response_format", "use `parameters.grammar`", neutral=[{"type": "text"}]),
    ),
    FieldScope.PARAMETERS: _unused(
        WRAPPERS, _refused(f"{GRAMMARS} {ANTHROPICS}", "use `grammar`", neutral=["", False])
    ),
    FieldScope.CHAT: _unused(
        COMMON,
        _refused("functions function_call", "use `tools` and `tool_choice`"),
        _refused("audio web_search_options", "answers are text"),
        _refused("modalities", "answers are text", neutral=[["text"]]),
        _refused("verbosity", "request it in a message", neutral=["medium"]),
        _refused("stream_reasoning", "use `separate_reasoning`", neutral=[True]),
        _refused("reasoning_format", "use `separate_reasoning`", neutral=["auto", "deepseek"]),
        _refused("parse_tool_calls", "calls are always parsed", neutral=[True]),
        _refused(
            "chat_template", "templates are code; `--tokenizer-config-path` chooses the server's"
        ),
        _refused("echo", neutral=[False]),
        without_effect=f"{COMMON_WITHOUT_EFFECT} prediction",
    ),
    FieldScope.COMPLETION: _unused(
        COMMON, _refused("suffix", neutral=[""]), without_effect=COMMON_WITHOUT_EFFECT
    ),
    FieldScope.RESPONSE: _unused(
        SAMPLING,
        _refused("conversation prompt", "send everything as `input`"),
        _refused("background", "read the answer, or a stream", neutral=[False]),
        _refused(f"{GRAMMARS} {ANTHROPICS}", "use `text.format`", neutral=["", False]),
        _refused("response_format", "use `text.format`", neutral=[{"type": "text"}]),
        without_effect=f"""{SAMPLING_WITHOUT_EFFECT} client_metadata background_options prompt_cache_options
        max_tool_calls stream_options truncation context_management""",
    ),
    FieldScope.STRUCTURED_OUTPUTS: _unused(
        _refused("structural_tag whitespace_pattern", ONE_FORM, neutral=[""]),
        _refused("disable_any_whitespace disable_additional_properties", ONE_FORM, neutral=[False]),
        without_effect="disable_fallback",
    ),
    FieldScope.MESSAGE: _unused(
        WRAPPERS,
        _refused("output_format", "use `output_config`"),
        _refused(GRAMMARS, "use `output_config.format`", neutral=["", False]),
        _refused("grammar text", "use `output_config.format`", neutral=[""]),
        _refused("response_format", "use `output_config.format`", neutral=[{"type": "text"}]),
        _refused("container mcp_servers", "only Anthropic's servers have them", neutral=[[]]),
        _refused("thread", "send everything as `messages`"),
        without_effect="""context_management cache_control metadata service_tier inference_geo speed betas diagnostics
        user_profile_id workspace_id billing_policy fallback_credit_token fallbacks compaction""",
    ),
    FieldScope.EMBEDDINGS: _unused(
        POOLING,
        _refused("messages", "send the text as `input`"),
        without_effect=POOLING_WITHOUT_EFFECT,
    ),
    FieldScope.EMBED: _unused(POOLING, without_effect=POOLING_WITHOUT_EFFECT),
    FieldScope.EMBED_PARAMETERS: _unused(),
    FieldScope.RERANK: _unused(
        POOLING,
        _refused("rank_fields", "send texts"),
        _refused("max_tokens_per_doc max_chunks_per_doc", "use `truncate_prompt_tokens`"),
        without_effect=POOLING_WITHOUT_EFFECT,
    ),
    FieldScope.SCORE: _unused(POOLING, without_effect=POOLING_WITHOUT_EFFECT),
}

NESTED = frozenset(
    (
        *("annotations", "cache_control", "caller", "citations", "data", "detail", "id", "index"),
        *("encrypted_content", "logprobs", "signature", "status", "summary", "thinking"),
        *("allowed_callers", "defer_loading", "eager_input_streaming"),
    )
)
"""Fields of messages, tools and their parts that do not change the prompt, or are in parts that it does not have."""
