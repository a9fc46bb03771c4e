"""Fields that all of OpenAI's routes have in this server."""

from __future__ import annotations

from millrace_router.api.body.request_fields.field import Support, by_name, rows

WORKS, NO_EFFECT, REFUSED = Support.WORKS, Support.NO_EFFECT, Support.REFUSED

SAMPLING = by_name(
    rows(WORKS, "model", "TLOVSC", "names the model, an alias of it or an adapter"),
    rows(WORKS, "stream stop temperature top_p seed", "TLOVSC"),
    rows(WORKS, "frequency_penalty presence_penalty", "TLOVSC", "over the answer"),
    rows(WORKS, "repetition_penalty", "TLVS", "over prompt and answer"),
    rows(WORKS, "top_k", "LVSC", "0 and -1 are off"),
    rows(WORKS, "min_p ignore_eos", "VSC"),
    rows(WORKS, "min_tokens", "VS"),
    rows(WORKS, "priority", "VS", "-10 to 10; higher is sooner, as in SGLang, unlike vLLM"),
    rows(WORKS, "stop_token_ids", "VS", "at most 64; their text is no part of the answer"),
    rows(
        WORKS,
        "include_stop_str_in_output",
        "V",
        "the stop string or the stop token stays in the text",
    ),
    rows(WORKS, "no_stop_trim", "S", "as `include_stop_str_in_output`"),
    rows(WORKS, "skip_special_tokens", "VS", "false: special tokens are part of the text"),
    rows(
        NO_EFFECT,
        "spaces_between_special_tokens",
        "V",
        "the tokenizer's own decoder decides about blanks",
    ),
    rows(WORKS, "truncate_prompt_tokens", "V", "keeps the last tokens; -1: as many as fit"),
    rows(REFUSED, "truncation_side", "V", "the last tokens are kept", neutral=["left"]),
    rows(
        WORKS,
        "cache_salt",
        "VS",
        "requests share prefixes only with the same salt; 1 to 1024 characters",
    ),
    rows(WORKS, "extra_key", "S", "as `cache_salt`, beside it"),
    rows(
        REFUSED,
        "use_beam_search",
        "V",
        "there is no beam search; `n` and `best_of` sample several answers",
        neutral=[False],
    ),
    rows(NO_EFFECT, "length_penalty early_stopping", "V", "of beam search alone"),
    rows(
        REFUSED,
        "logits_processors custom_logit_processor custom_params vllm_xargs",
        "VS",
        "clients bring no code",
        neutral=[[], {}],
    ),
    rows(REFUSED, "repetition_detection stop_regex logprob_token_ids", "VS", neutral=["", [], {}]),
    rows(
        REFUSED,
        "return_hidden_states return_routed_experts return_cached_tokens_details",
        "S",
        neutral=[False],
    ),
    rows(REFUSED, "routed_experts_prompt_start", "V", neutral=[0]),
    rows(REFUSED, "prompt_embeds session_params", "VS"),
    rows(
        NO_EFFECT,
        "kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room data_parallel_rank",
        "VS",
        "one group of shards computes the whole request",
    ),
    rows(
        NO_EFFECT,
        "request_id rid session_id custom_labels",
        "VS",
        "the header `x-request-id` names a request",
    ),
    rows(NO_EFFECT, "return_token_offsets", "V", "of vLLM's `render` routes alone"),
    rows(NO_EFFECT, "stream_interval watermarking", "V"),
    rows(
        NO_EFFECT,
        "media_io_kwargs mm_processor_kwargs max_dynamic_patch min_dynamic_patch",
        "VS",
        "images are refused",
    ),
    rows(NO_EFFECT, "user store metadata service_tier", "OVS"),
    rows(
        NO_EFFECT,
        "safety_identifier prompt_cache_key prompt_cache_retention",
        "O",
        "prefixes are shared without a key",
    ),
    rows(REFUSED, "dynatemp_range mirostat min_keep n_indent t_max_predict_ms", "C", neutral=[0]),
    rows(
        NO_EFFECT,
        "dynatemp_exponent mirostat_tau mirostat_eta",
        "C",
        "of samplers that are refused",
    ),
    rows(REFUSED, "samplers", "C", "the [order](sampling.md#order) is fixed"),
    rows(REFUSED, "repeat_penalty", "C", "use `repetition_penalty`", neutral=[1]),
    rows(NO_EFFECT, "repeat_last_n", "C", "penalties see the whole sequence"),
    rows(REFUSED, "n_predict", "C", "use `max_tokens`", neutral=[-1]),
    rows(REFUSED, "n_cmpl", "C", "use `n`", neutral=[1]),
    rows(REFUSED, "n_probs", "C", "use `logprobs`", neutral=[0]),
    rows(NO_EFFECT, "post_sampling_probs", "C", "log probabilities are those after all steps"),
    rows(REFUSED, "return_tokens", "C", "use `return_token_ids`", neutral=[False]),
    rows(REFUSED, "timings_per_token return_progress", "C", neutral=[False]),
    rows(REFUSED, "response_fields lora", "C", neutral=[[]]),
    rows(REFUSED, "grammar", "C", "use `structured_outputs`", neutral=[""]),
    rows(
        NO_EFFECT,
        "n_keep n_discard n_cache_reuse cache_prompt id_slot sse_ping_interval",
        "C",
        "a prompt that is too long is refused; the cache changes no bit",
    ),
    rows(NO_EFFECT, "speculative.n_max speculative.n_min speculative.p_min", "C"),
    rows(WORKS, "top_n_sigma", "C", "0 and less are off"),
    rows(WORKS, "xtc_probability xtc_threshold", "C", "0 is off; the threshold is 0.1 by default"),
    rows(WORKS, "dry_multiplier", "C", "0 is off"),
    rows(WORKS, "dry_base dry_allowed_length", "C", "1.75 and 2 by default"),
    rows(WORKS, "dry_penalty_last_n", "C", "-1, the default, is all tokens; 0 is off"),
    rows(
        WORKS,
        "dry_sequence_breakers",
        "C",
        "a token whose text has one ends a passage; at most 16",
    ),
    rows(WORKS, "allowed_token_ids", "V", "all others are impossible, also the end of the text"),
    rows(WORKS, "bad_words", "V", "as their tokens, alone and after a blank; at most 64"),
)
"""Of chats, text completions and responses."""

GUIDED = by_name(
    rows(WORKS, "response_format", "TLOVS"),
    rows(
        WORKS,
        "structured_outputs",
        "V",
        "one of `json`, `regex`, `choice`, `grammar` and `json_object`",
    ),
    rows(
        WORKS,
        "guided_json guided_regex guided_choice guided_grammar",
        "V",
        "grammars in Lark's syntax",
    ),
    rows(NO_EFFECT, "guided_decoding_backend", "V", "there is one backend"),
    rows(REFUSED, "guided_whitespace_pattern structural_tag", "VS", neutral=[""]),
    rows(WORKS, "json_schema regex ebnf", "SC", "a grammar, as in `structured_outputs`"),
)
"""Of chats and text completions: what the text has to match."""

COMMON = by_name(
    SAMPLING.values(),
    GUIDED.values(),
    rows(WORKS, "max_tokens n logit_bias", "TLOVSC"),
    rows(WORKS, "stream_options", "TOVS"),
    rows(WORKS, "typical_p", "C", "1 is off"),
    rows(WORKS, "adapter_source api_token", "L"),
    rows(WORKS, "lora_path", "S"),
    rows(WORKS, "add_special_tokens", "V"),
    rows(
        WORKS,
        "return_token_ids",
        "V",
        "`token_ids` beside each text, and `prompt_token_ids`",
    ),
    rows(
        WORKS,
        "return_tokens_as_token_ids",
        "V",
        "log probabilities name tokens as `token_id:5`",
    ),
    rows(
        WORKS,
        "prompt_logprobs",
        "V",
        "without a stream, up to `--max-top-n-tokens`; `rank` is null beyond them",
    ),
)
"""Of chats and text completions."""
