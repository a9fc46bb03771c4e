"""Fields that OpenAI's routes share."""

from __future__ import annotations

from millrace_router.api.openapi.field_texts.field_text import SWITCH, FieldText

OF_MODEL = "the model's own, otherwise "
"""Defaults that generation_config.json may give."""
GRAMMAR = "Grammar in Lark's syntax that the answer has to match."
REGEX = "Regular expression that the whole answer has to match."
SCHEMA = "JSON schema that the answer has to match."
ONE_GRAMMAR = "beside no other grammar"

SAMPLING = {
    "temperature": FieldText(
        "How random the answer is: lower values prefer likely tokens, and 0 always takes the likeliest.",
        "0 to 2",
        OF_MODEL + "1",
    ),
    "top_p": FieldText(
        "Draws from the likeliest tokens whose probabilities add up to this.",
        "above 0 to 1; 1 is off",
        OF_MODEL + "1",
    ),
    "top_k": FieldText(
        "Draws from this many of the likeliest tokens.",
        "1 to the size of the vocabulary; 0 and -1 are off",
        OF_MODEL + "0",
    ),
    "min_p": FieldText(
        "Draws no token that is less likely than this share of the likeliest one.",
        "0 to 1; 0 is off",
        OF_MODEL + "0",
    ),
    "typical_p": FieldText(
        "Draws from the tokens whose information is nearest to the expected one, up to this mass.",
        "above 0 to 1; 1 is off",
        "1",
    ),
    "top_n_sigma": FieldText(
        "Draws from the tokens whose score is within this many standard deviations of the greatest.",
        "0 or more; 0 is off",
        "0",
    ),
    "xtc_probability": FieldText(
        "Chance to drop all likely tokens but the least likely of them.", "0 to 1; 0 is off", "0"
    ),
    "xtc_threshold": FieldText(
        "Probability from which `xtc_probability` takes a token to be likely.", "0 to 1", "0.1"
    ),
    "repetition_penalty": FieldText(
        "Divides the scores of tokens that are in the prompt or the answer.",
        "above 0; 1 is off",
        OF_MODEL + "1",
    ),
    "frequency_penalty": FieldText(
        "Lowers the score of a token for each time that it is in the answer.",
        "-2 to 2; 0 is off",
        "0",
    ),
    "presence_penalty": FieldText(
        "Lowers the scores of tokens that are in the answer.", "-2 to 2; 0 is off", "0"
    ),
    "dry_multiplier": FieldText(
        "Lowers the score of a token that would extend a repeated passage: the strength of the DRY penalty.",
        "0 or more; 0 is off",
        "0",
    ),
    "dry_base": FieldText("Growth of the DRY penalty with the passage.", "0 or more", "1.75"),
    "dry_allowed_length": FieldText(
        "Tokens that a passage may have before the DRY penalty begins.", "0 or more", "2"
    ),
    "dry_penalty_last_n": FieldText(
        "Last tokens in which the DRY penalty looks for a passage.", "0 or more; -1 is all", "-1"
    ),
    "dry_sequence_breakers": FieldText(
        "Texts that end a passage of the DRY penalty.",
        "at most 16 texts",
        "line break, colon, quotation mark, asterisk",
    ),
    "logit_bias": FieldText(
        "Adds a value to the scores of tokens, by their ids as text.",
        "-100 to 100 each; at most 300 tokens",
        "none",
    ),
    "allowed_token_ids": FieldText(
        "The only tokens that may be drawn.", "ids of the vocabulary", "all"
    ),
    "bad_words": FieldText("Words that the answer does not have.", "at most 64 words", "none"),
    "seed": FieldText(
        "Makes the answer repeatable: the same seed and request give the same tokens.",
        "whole numbers of 64 bits",
        "random",
    ),
}

ENDS = {
    "max_tokens": FieldText(
        "Most tokens of the answer.",
        "1 to what the context leaves, or to `--max-new-tokens-limit`",
        "`--default-max-new-tokens`, otherwise the model's own, otherwise what the context leaves",
    ),
    "min_tokens": FieldText(
        "Tokens before which the model cannot end the answer.", "0 to `max_tokens`", "0"
    ),
    "ignore_eos": FieldText(
        "Whether the answer goes on until `max_tokens`, whatever the model says.", SWITCH, "false"
    ),
    "stop": FieldText(
        "Texts that end the answer and are no part of it.",
        "a text, or up to `--max-stop-sequences`",
        "none",
    ),
    "stop_token_ids": FieldText(
        "Tokens that end the answer and are no part of it.", "at most 64 ids", "none"
    ),
    "include_stop_str_in_output": FieldText(
        "Whether the text or token that ended the answer is part of it.", SWITCH, "false"
    ),
    "no_stop_trim": FieldText("SGLang's name of `include_stop_str_in_output`.", SWITCH, "false"),
    "skip_special_tokens": FieldText(
        "Whether special tokens are left out of the text.", SWITCH, "true"
    ),
}

GUIDES = {
    "response_format": FieldText(
        "Form of the answer: any text, JSON, JSON of a schema, a regular expression or a grammar.",
        "an object with `type`",
        "any text",
    ),
    "structured_outputs": FieldText(
        "A grammar for the answer, in vLLM's form.",
        "one of `json`, `regex`, `choice`, `grammar` and `json_object`",
        "none",
    ),
    "guided_json": FieldText(SCHEMA, ONE_GRAMMAR, "none"),
    "guided_regex": FieldText(REGEX, ONE_GRAMMAR, "none"),
    "guided_choice": FieldText(
        "Texts of which the answer is one.", f"1 to 10000 texts, {ONE_GRAMMAR}", "none"
    ),
    "guided_grammar": FieldText(GRAMMAR, ONE_GRAMMAR, "none"),
    "json_schema": FieldText(SCHEMA, ONE_GRAMMAR, "none"),
    "regex": FieldText(REGEX, ONE_GRAMMAR, "none"),
    "ebnf": FieldText(GRAMMAR, ONE_GRAMMAR, "none"),
}

ROUTE = {
    "model": FieldText(
        "The model by one of its names, or a LoRA adapter.", "any name", "the served model"
    ),
    "stream": FieldText("Whether the answer comes in pieces, as events.", SWITCH, "false"),
    "stream_options": FieldText(
        "What a stream has besides text, such as `include_usage`.", "an object", "none"
    ),
    "n": FieldText("Number of answers to the same prompt.", "1 to `--max-n`", "1"),
    "priority": FieldText(
        "Requests of a higher priority are served first.",
        "-10 to 10",
        "the header `x-priority`, otherwise 0",
    ),
    "cache_salt": FieldText(
        "Shares computed beginnings of prompts only with requests of the same salt.",
        "1 to 1024 characters",
        "none",
    ),
    "extra_key": FieldText("A further salt, in SGLang's name.", "1 to 1024 characters", "none"),
    "truncate_prompt_tokens": FieldText(
        "Keeps this many of the prompt's last tokens.", "1 or more; -1 keeps as many as fit", "all"
    ),
    "add_special_tokens": FieldText(
        "Whether the tokenizer puts its special tokens around the prompt.",
        SWITCH,
        "false in a chat, true for a text",
    ),
    "return_token_ids": FieldText(
        "Whether the answer has the ids of its tokens and of the prompt's.", SWITCH, "false"
    ),
    "return_tokens_as_token_ids": FieldText(
        "Whether log probabilities name a token by its id, as in `token_id:5`.", SWITCH, "false"
    ),
    "prompt_logprobs": FieldText(
        "Likeliest tokens beside the log probability of each token of the prompt; not in streams.",
        "0 to `--max-top-n-tokens`",
        "none",
    ),
    "adapter_source": FieldText(
        "Where the adapter in `model` is.", "`hub` or `local`", "`--adapter-source`"
    ),
    "api_token": FieldText("The client's own token for the hub.", "any text", "none"),
    "lora_path": FieldText("The name of a registered adapter, as in SGLang.", "any name", "none"),
}

SHARED = SAMPLING | ENDS | GUIDES | ROUTE
