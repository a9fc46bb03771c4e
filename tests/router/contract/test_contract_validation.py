"""Section 4: what is refused, in which words and in which order; section 9.4: TGI's own cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millrace_testing.contract.contract import COLUMNS, Held, Reply, Rule

EIGHT = " ".join(["a"] * 8)
NINE = " ".join(["a"] * 9)
NO_PROPERTIES = {"type": "array", "items": {"type": "integer"}}
PREFIX = "Input validation error: "


def asked(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters, of which `inputs` is none."""
    rest = {name: value for name, value in parameters.items() if name != "inputs"}
    return {"inputs": parameters.get("inputs", "hello"), "parameters": rest}


def refusal(message: str) -> Reply:
    """The answer to a request that validation refuses."""
    return Reply(status=422, body={"error": PREFIX + message, "error_type": "validation"})


# By the numbers of section 4: what breaks each, and nothing before it.
BROKEN: list[tuple[str, str, dict[str, Any], str]] = [
    ("0", "choosy", {"best_of": 2}, "`best_of` != 1 is not allowed for this endpoint"),
    ("0", "usual", {"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ("1", "usual", {"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ("2", "usual", {"temperature": 0}, "`temperature` must be strictly positive"),
    ("2", "usual", {"temperature": -0.5}, "`temperature` must be strictly positive"),
    ("3", "usual", {"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ("4", "usual", {"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("4", "usual", {"frequency_penalty": -2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("5", "usual", {"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ("5", "usual", {"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ("6", "usual", {"typical_p": 0}, "`typical_p` must be > 0.0 and < 1.0"),
    ("6", "usual", {"typical_p": 1}, "`typical_p` must be > 0.0 and < 1.0"),
    ("7", "usual", {"top_k": 0}, "`top_k` must be strictly positive"),
    ("7", "usual", {"top_k": -1}, "`top_k` must be strictly positive"),
    ("8", "usual", {"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ("9", "usual", {"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    (
        "10",
        "usual",
        {"seed": 1, "best_of": 2, "do_sample": True},
        "`seed` must not be set when `best_of` > 1",
    ),
    ("11", "usual", {"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ("12", "usual", {"inputs": ""}, "`inputs` cannot be empty"),
    (
        "13",
        "usual",
        {"truncate": 0},
        "`truncate` must be strictly positive and less than 8. Given: 0",
    ),
    (
        "13",
        "usual",
        {"truncate": 9},
        "`truncate` must be strictly positive and less than 8. Given: 9",
    ),
    (
        "15",
        "usual",
        {"inputs": EIGHT, "max_new_tokens": 9},
        "`inputs` tokens + `max_new_tokens` must be <= 16. "
        "Given: 8 `inputs` tokens and 9 `max_new_tokens`",
    ),
    (
        "15, before 16",
        "usual",
        {"inputs": NINE, "max_new_tokens": 8},
        "`inputs` tokens + `max_new_tokens` must be <= 16. "
        "Given: 9 `inputs` tokens and 8 `max_new_tokens`",
    ),
    (
        "16",
        "usual",
        {"inputs": NINE, "max_new_tokens": 1},
        "`inputs` must have less than 8 tokens. Given: 9",
    ),
    (
        "17",
        "grammarless",
        {"grammar": {"type": "regex", "value": "a"}},
        "grammar is not supported",
    ),
    ("17", "usual", {"grammar": {"type": "json", "value": 5}}, "grammar is not supported"),
    ("17", "usual", {"grammar": {"type": "json", "value": True}}, "grammar is not supported"),
]

IN_STREAMS: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
    (
        {"decoder_input_details": True},
        "`decoder_input_details` == true is not supported when streaming tokens",
    ),
]

ALLOWED: list[tuple[str, dict[str, Any]]] = [
    ("top_p of 0.99", {"top_p": 0.99}),
    ("top_p of null", {"top_p": None}),
    ("top_n_tokens of 5", {"top_n_tokens": 5}),
    ("top_n_tokens of 0", {"top_n_tokens": 0}),
    ("best_of of 1", {"best_of": 1}),
    ("best_of with a temperature", {"best_of": 2, "temperature": 0.5}),
    ("best_of with top_k", {"best_of": 2, "top_k": 1}),
    ("four stop sequences", {"stop": list("abcd")}),
    ("the longest prompt", {"inputs": EIGHT, "max_new_tokens": 8}),
    ("a longer prompt that is cut", {"inputs": NINE, "truncate": 8, "max_new_tokens": 8}),
    ("the longest truncate", {"truncate": 8}),
]

RULES = [
    *(
        Rule(
            section=f"4.{number}",
            says=f"{message[:40]} on {path} with {str(broken)[:40]}",
            path=path,
            body=asked(broken),
            server=server,
            default=refusal(message),
            generates={},
        )
        for path in ("/generate", "/")
        for number, server, broken, message in BROKEN
    ),
    *(
        Rule(
            section="4.0",
            says=f"{next(iter(broken))} in a stream",
            path="/generate_stream",
            body=asked(broken),
            default=refusal(message),
            strict=Reply(events=[refusal(message).body]),
            generates={},
        )
        for broken, message in IN_STREAMS
    ),
    *(
        Rule(
            section="9.4",
            says=f"{says} is allowed",
            path="/generate",
            body=asked(parameters),
            default=Reply(),
        )
        for says, parameters in ALLOWED
    ),
    *(
        Rule(
            section="4.18",
            says=f"a schema without properties at its top is as good as any: {path}",
            path=path,
            body=body,
            default=Reply(),
            strict=Reply(
                status=422,
                body={
                    "error": f"{PREFIX}grammar is not valid: Grammar must have a 'properties' field"
                },
            ),
        )
        for path, body in (
            ("/generate", asked({"grammar": {"type": "json", "value": NO_PROPERTIES}})),
            (
                "/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": "a"}],
                    "response_format": {"type": "json_object", "value": NO_PROPERTIES},
                },
            ),
        )
    ),
    Rule(
        section="4.18",
        says="a schema has to be one",
        path="/generate",
        body=asked({"grammar": {"type": "json", "value": "{"}}),
        default=Reply(
            status=422,
            body={
                "error": lambda error: error.startswith(f"{PREFIX}grammar is not valid: "),
                "error_type": "validation",
            },
        ),
        generates={},
    ),
]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule_holds(servers: Callable[[str, str], Held], rule: Rule, column: str) -> None:
    servers(rule.server, column).check(rule, column)
