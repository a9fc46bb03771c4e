"""The words about the fields of chats and of TGI's generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace_router.api.openapi.field_texts.field_text import SWITCH, FieldText
from millrace_router.api.openapi.field_texts.sampling import SHARED

CHAT = SHARED | {
    "messages": FieldText(
        "The conversation, the oldest turn first.",
        "1 turn or more, each with `role` and `content`",
        "none, it is required",
    ),
    "max_completion_tokens": FieldText(
        "The newer name of `max_tokens`, which it beats.", "as of `max_tokens`", "`max_tokens`"
    ),
    "logprobs": FieldText(
        "Whether the answer has the log probability of each token.", SWITCH, "false"
    ),
    "top_logprobs": FieldText(
        "Likeliest tokens beside each token; needs `logprobs`.",
        "0 to 20, or to `--max-top-n-tokens` if that is more",
        "0",
    ),
    "tools": FieldText("Functions that the model may call.", "a list of functions", "none"),
    "tool_choice": FieldText(
        "Whether the model calls a function, and which.",
        "`auto`, `none`, `required`, or a function",
        "`auto`",
    ),
    "parallel_tool_calls": FieldText("Whether an answer may have several calls.", SWITCH, "true"),
    "tool_prompt": FieldText(
        "Text after the last message if there are tools.",
        "any text",
        "none if the template lists the tools itself, otherwise TGI's",
    ),
    "add_generation_prompt": FieldText(
        "Whether the prompt ends with the beginning of the assistant's turn.",
        SWITCH,
        "true, unless the last turn is the assistant's",
    ),
    "continue_final_message": FieldText(
        "Whether the answer goes on with the last turn.",
        SWITCH,
        "true if the last turn is the assistant's",
    ),
    "chat_template_kwargs": FieldText(
        "Further variables of the chat template, such as `enable_thinking`.", "an object", "none"
    ),
    "documents": FieldText(
        "Documents for chat templates that know them.", "a list of objects", "none"
    ),
    "reasoning_effort": FieldText(
        "How much the model is to think.",
        "`none`, `minimal`, `low`, `medium`, `high`, or what its template knows",
        "the template's",
    ),
    "reasoning": FieldText(
        "OpenRouter's form of what the model is to think.",
        "an object with `effort`, `enabled`, `max_tokens` and `exclude`",
        "none",
    ),
    "thinking_token_budget": FieldText(
        "Tokens after which a thought is closed.", "0 or more", "no budget"
    ),
    "include_reasoning": FieldText("Whether the answer has the thought.", SWITCH, "true"),
    "separate_reasoning": FieldText(
        "Whether the thought is kept apart from the text.", SWITCH, "true"
    ),
}

_SAME = ("temperature", "top_p", "top_k", "typical_p", "min_p", "repetition_penalty", "priority")
PARAMETERS = {name: SHARED[name] for name in _SAME} | {
    "temperature": SHARED["temperature"]._replace(
        sentence="How random the answer is: lower values prefer likely tokens.",
        values="above 0",
        default="1",
    ),
    "top_p": SHARED["top_p"]._replace(values="above 0 and below 1", default="1, which is off"),
    "top_k": SHARED["top_k"]._replace(values="1 or more", default="0, which is off"),
    "typical_p": SHARED["typical_p"]._replace(
        values="above 0 and below 1", default="1, which is off"
    ),
    "min_p": SHARED["min_p"]._replace(default="0"),
    "repetition_penalty": SHARED["repetition_penalty"]._replace(default="1"),
    "frequency_penalty": FieldText(
        "Lowers the score of a token by its share of the prompt and the answer.",
        "-2 to 2; 0 is off",
        "0",
    ),
    "do_sample": FieldText(
        "Whether tokens are drawn, instead of taking the likeliest each time.",
        SWITCH,
        "false; true without `parameters`, or with a field that restricts the draw",
    ),
    "seed": SHARED["seed"]._replace(values="0 to 2^64 - 1"),
    "max_new_tokens": SHARED["max_tokens"]._replace(
        default="`--default-max-new-tokens`, otherwise what the context leaves"
    ),
    "min_new_tokens": FieldText(
        "Tokens before which the model cannot end the answer.", "0 to `max_new_tokens`", "0"
    ),
    "ignore_eos": FieldText(
        "Whether the answer goes on until `max_new_tokens`, whatever the model says.",
        SWITCH,
        "false",
    ),
    "stop": FieldText(
        "Texts that end the answer, and are the end of it.",
        "up to `--max-stop-sequences` texts",
        "none",
    ),
    "truncate": FieldText(
        "Keeps this many of the prompt's last tokens.", "1 to `--max-input-tokens`", "all"
    ),
    "return_full_text": FieldText(
        "Whether the text begins with the prompt.", SWITCH, "false; true on `POST /`"
    ),
    "details": FieldText(
        "Whether the answer has its tokens, the seed and the reason of its end.", SWITCH, "false"
    ),
    "decoder_input_details": FieldText(
        "Whether the details have the prompt's tokens; needs `--enable-prefill-logprobs`.",
        SWITCH,
        "false",
    ),
    "top_n_tokens": FieldText(
        "Likeliest tokens beside each token of the details.", "0 to `--max-top-n-tokens`", "0"
    ),
    "best_of": FieldText(
        "Draws this many answers, and returns the likeliest; not in streams.",
        "1 to `--max-best-of`",
        "1",
    ),
    "watermark": FieldText(
        "Whether the answer has a watermark that statistics can find.", SWITCH, "false"
    ),
    "grammar": FieldText(
        "What the answer has to match: a JSON schema, a regular expression or a grammar.",
        "an object with `type` and `value`",
        "none",
    ),
    "response_format": FieldText(
        "LoRAX's form of `grammar`, for JSON.", "an object with `type`", "none"
    ),
    "adapter_id": FieldText("The LoRA adapter of this request.", "any name", "the default one"),
    "adapter_source": SHARED["adapter_source"]._replace(sentence="Where the adapter is."),
    "merged_adapters": FieldText(
        "Several LoRA adapters, merged for this request.", "an object with `ids`", "none"
    ),
    "api_token": SHARED["api_token"],
    "lora_path": SHARED["lora_path"],
    "return_k_alternatives": FieldText(
        "LoRAX's form of `top_n_tokens`.", "0 to `--max-top-n-tokens`", "0"
    ),
    "apply_chat_template": FieldText(
        "Whether `inputs` is the user's turn of a chat, and the chat template makes the prompt.",
        SWITCH,
        "false",
    ),
}

GENERATE = {
    "inputs": FieldText("The prompt.", "a text that is not empty", "none, it is required"),
    "parameters": FieldText("How to generate.", "an object", "sampling with a temperature of 1"),
}

COMPLETION = SHARED | {
    "max_tokens": SHARED["max_tokens"]._replace(
        values="1 to what the context leaves, or to `--max-new-tokens-limit`; 0 with `echo`"
    ),
}
RESPONSE = SHARED | {"max_output_tokens": SHARED["max_tokens"]}
"""Of the other fields of these two routes, OpenAI's documentation says what they are."""

TEXTS: Mapping[str, Mapping[str, FieldText]] = {
    "ChatRequest": CHAT,
    "CompletionRequest": COMPLETION,
    "ResponsesRequest": RESPONSE,
    "GenerateParameters": PARAMETERS,
    "GenerateRequest": GENERATE,
    "CompatGenerateRequest": GENERATE | {"stream": SHARED["stream"]},
}
"""By the names of schemas in the document, and of their fields."""


def describe(name: str, schema: dict[str, Any]) -> None:
    """Put the words into the schema of this name; fields without any stay as they are."""
    texts = TEXTS.get(name, {})
    for field, described in schema.get("properties", {}).items():
        if field in texts:
            described["description"] = str(texts[field])
