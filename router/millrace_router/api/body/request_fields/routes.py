"""Fields of each route."""

from __future__ import annotations

from millrace_router.api.body.request_fields.field import Support, by_name, rows
from millrace_router.api.body.request_fields.sampling import COMMON, SAMPLING

WORKS, NO_EFFECT, REFUSED = Support.WORKS, Support.NO_EFFECT, Support.REFUSED

GENERATE = by_name(
    rows(WORKS, "inputs parameters", "TL"),
    rows(WORKS, "stream", "TL", "of `POST /`; the other two routes have their form"),
)
PARAMETERS = by_name(
    rows(
        WORKS,
        "best_of temperature repetition_penalty frequency_penalty top_k top_p typical_p do_sample max_new_tokens"
        " return_full_text stop truncate watermark details decoder_input_details seed adapter_id",
        "TL",
    ),
    rows(WORKS, "top_n_tokens grammar", "T"),
    rows(WORKS, "adapter_source merged_adapters api_token response_format", "L"),
    rows(WORKS, "return_k_alternatives", "L", "candidates as `alternative_tokens`"),
    rows(WORKS, "ignore_eos_token", "L", "as `ignore_eos`"),
    rows(WORKS, "lora_path", "S"),
    rows(WORKS, "ignore_eos min_new_tokens min_p priority", "-"),
    rows(
        WORKS,
        "apply_chat_template",
        "L",
        "`inputs` is the user's turn of a chat; LoRAX itself ignores it",
    ),
)

CHAT = by_name(
    COMMON.values(),
    rows(WORKS, "messages max_completion_tokens top_logprobs logprobs", "TLOVS"),
    rows(WORKS, "tools tool_choice", "TLOVSC"),
    rows(WORKS, "parallel_tool_calls", "OVC"),
    rows(WORKS, "tool_prompt", "T"),
    rows(WORKS, "add_generation_prompt continue_final_message chat_template_kwargs", "VSC"),
    rows(WORKS, "documents", "V", "a variable of the template"),
    rows(REFUSED, "functions function_call", "O", "use `tools` and `tool_choice`"),
    rows(REFUSED, "audio web_search_options", "O"),
    rows(REFUSED, "modalities", "O", "answers are text", neutral=[["text"]]),
    rows(REFUSED, "verbosity", "O", "ask for it in a message", neutral=["medium"]),
    rows(NO_EFFECT, "prediction", "O", "of speed alone"),
    rows(WORKS, "reasoning_effort", "OVS", "a variable of the template"),
    rows(WORKS, "reasoning", "-", "OpenRouter's: `effort`, `enabled`, `max_tokens`, `exclude`"),
    rows(WORKS, "thinking_token_budget include_reasoning", "V"),
    rows(WORKS, "separate_reasoning", "S"),
    rows(REFUSED, "stream_reasoning", "S", neutral=[True]),
    rows(
        REFUSED, "reasoning_format", "C", "use `separate_reasoning`", neutral=["auto", "deepseek"]
    ),
    rows(REFUSED, "parse_tool_calls", "C", neutral=[True]),
    rows(
        REFUSED,
        "chat_template",
        "V",
        "templates are code; `--tokenizer-config-path` chooses the server's",
    ),
    rows(REFUSED, "echo", "V", neutral=[False]),
)
COMPLETION = by_name(
    COMMON.values(),
    rows(WORKS, "prompt", "TLOVSC"),
    rows(WORKS, "echo logprobs best_of", "OVS"),
    rows(REFUSED, "suffix", "TOVS", neutral=[""]),
)
RESPONSE = by_name(
    SAMPLING.values(),
    rows(
        WORKS,
        "input instructions max_output_tokens text tools tool_choice parallel_tool_calls include top_logprobs",
        "OVS",
    ),
    rows(
        NO_EFFECT, "metadata user safety_identifier prompt_cache_key", "O", "repeated in the answer"
    ),
    rows(WORKS, "chat_template_kwargs", "V"),
    rows(WORKS, "previous_response_id", "O", "with `--responses-store`; else refused with 400"),
    rows(WORKS, "store", "O", "with `--responses-store`; else the answer says false"),
    rows(REFUSED, "conversation prompt", "O", "send everything as `input`"),
    rows(REFUSED, "background", "O", "read the answer, or a stream", neutral=[False]),
    rows(NO_EFFECT, "client_metadata", "O", "sent by Codex"),
    rows(NO_EFFECT, "background_options prompt_cache_options", "O"),
    rows(WORKS, "reasoning", "OVS", "`effort` is a variable of the template"),
    rows(WORKS, "thinking_token_budget", "V"),
    rows(NO_EFFECT, "max_tool_calls", "O", "of tools that OpenAI runs"),
    rows(NO_EFFECT, "stream_options", "O", "streams are not padded"),
    rows(NO_EFFECT, "truncation context_management", "O", "an input that is too long is refused"),
)
STRUCTURED_OUTPUTS = by_name(
    rows(
        WORKS,
        "json regex choice grammar json_object",
        "V",
        "one of them; a `grammar` has Lark's syntax",
    ),
    rows(REFUSED, "structural_tag whitespace_pattern", "V", neutral=[""]),
    rows(REFUSED, "disable_any_whitespace disable_additional_properties", "V", neutral=[False]),
    rows(NO_EFFECT, "disable_fallback", "V", "there is one backend"),
)
MESSAGE = by_name(
    rows(
        WORKS,
        "model messages max_tokens system stream stop_sequences temperature top_p top_k tools tool_choice thinking"
        " output_config",
        "A",
    ),
    rows(REFUSED, "output_format", "A", "use `output_config`"),
    rows(REFUSED, "container mcp_servers", "A", "of Anthropic's servers alone", neutral=[[]]),
    rows(NO_EFFECT, "context_management", "A", "the whole conversation is the prompt"),
    rows(NO_EFFECT, "cache_control", "A", "prefixes are shared without marks"),
    rows(NO_EFFECT, "metadata service_tier inference_geo speed betas diagnostics", "A"),
    rows(NO_EFFECT, "user_profile_id workspace_id billing_policy fallback_credit_token", "A"),
    rows(NO_EFFECT, "fallbacks", "A", "of Anthropic's servers alone"),
    rows(NO_EFFECT, "compaction", "A", "the whole conversation is the prompt"),
    rows(REFUSED, "thread", "A", "send everything as `messages`"),
)
