"""Section 3.9: tokens, information, and the routes that platforms want."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.version import VERSION
from millrace_testing.contract.contract import COLUMNS, EMPTY, Held, Reply, Rule, exactly, fits
from millrace_testing.router.edge import fail, play

FEW = {"max_new_tokens": 2}
NATIVE: dict[str, Any] = {"inputs": "hello world", "parameters": FEW}
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "user", "content": "wörld"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2}
COMPLETION: dict[str, Any] = {"prompt": "hello", "max_tokens": 2}
STREAM = {"stream": True}
GENERATED = " x x"


def span(id_: int, text: str, start: int, stop: int) -> Callable[[Any], bool]:
    """One token of /tokenize."""
    return exactly({"id": id_, "text": text, "start": start, "stop": stop})


TOKENS = [
    Rule(
        section="3.9",
        says="places of tokens count bytes, and truncate is ignored",
        path="/tokenize",
        body={"inputs": "wörld 日本 a", "parameters": {"truncate": 1}},
        default=Reply(body=[span(4, "wörld", 0, 6), span(5, "日本", 7, 13), span(6, "a", 14, 15)]),
    ),
    Rule(
        section="3.9",
        says="tokens of a chat come with the prompt it becomes",
        path="/chat_tokenize",
        body=CHAT,
        default=Reply(
            body=exactly(
                {
                    "tokenize_response": [span(2, "hello", 0, 5), span(4, "wörld", 6, 12)],
                    "templated_text": "hello wörld",
                }
            )
        ),
    ),
]

INFORMATION = [
    *(
        Rule(
            section="2.6",
            says=f"GET {path} is an empty 200",
            path=path,
            method="GET",
            default=Reply(body=EMPTY),
        )
        for path in ("/", "/health", "/ping")
    ),
    Rule(
        section="3.9",
        says="the model, the limits, what version 3 left out, and ours",
        path="/info",
        method="GET",
        default=Reply(
            body={
                "model_id": "org/tiny",
                "model_sha": "abc",
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": 4,
                "max_best_of": 2,
                "max_stop_sequences": 4,
                "max_input_tokens": 8,
                "max_total_tokens": 16,
                "validation_workers": 2,
                "max_client_batch_size": 4,
                "router": "text-generation-router",
                "version": VERSION,
                "model_dtype": "float32",
                "model_device_type": "cpu",
                "waiting_served_ratio": 0.3,
                "max_batch_total_tokens": 32,
                "max_waiting_tokens": 20,
                "max_n": 3,
                "speculate": 2,
                "grammars": True,
            }
        ),
    ),
    Rule(
        section="3.9",
        says="what is not known of it is null",
        path="/info",
        method="GET",
        default=Reply(
            body=lambda info: all(
                name in info and info[name] is None
                for name in ("sha", "docker_label", "max_batch_size")
            )
        ),
    ),
    Rule(
        section="3.9",
        says="the one model",
        path="/v1/models",
        method="GET",
        default=Reply(
            body=exactly(
                {
                    "object": "list",
                    "data": [
                        exactly(
                            {
                                "id": "org/tiny",
                                "object": "model",
                                "created": 0,
                                "owned_by": "org/tiny",
                            }
                        )
                    ],
                }
            )
        ),
    ),
    Rule(
        section="3.9",
        says="metrics are text",
        path="/metrics",
        method="GET",
        default=Reply(headers={"content-type": re.compile("text/plain; .*charset=utf-8")}),
    ),
]

SAGEMAKER = [
    Rule(
        section="3.9",
        says="/invocations takes what POST / takes",
        path="/invocations",
        body=NATIVE,
        default=Reply(body=[{"generated_text": f"hello world{GENERATED}"}]),
    ),
    Rule(
        section="3.9",
        says="/invocations takes a chat",
        path="/invocations",
        body=CHAT,
        default=Reply(
            body={"object": "chat.completion", "choices": [{"message": {"content": GENERATED}}]}
        ),
    ),
    Rule(
        section="3.9",
        says="/invocations takes a completion",
        path="/invocations",
        body=COMPLETION,
        default=Reply(body={"object": "text_completion", "choices": [{"text": GENERATED}]}),
    ),
    Rule(
        section="3.9",
        says="/invocations streams as POST / does",
        path="/invocations",
        body=NATIVE | STREAM,
        default=Reply(events=[{"index": 1}, {"generated_text": f"hello world{GENERATED}"}]),
    ),
    Rule(
        section="3.9",
        says="/invocations streams as a chat does",
        path="/invocations",
        body=CHAT | STREAM,
        default=Reply(
            body=re.compile(r'data: {"object":"chat\.completion\.chunk".*data: \[DONE\]\n\n', re.S)
        ),
    ),
    Rule(
        section="3.9",
        says="/invocations streams as a completion does",
        path="/invocations",
        body=COMPLETION | STREAM,
        default=Reply(
            body=re.compile(r'data: {"object":"text_completion".*data: \[DONE\]\n\n', re.S)
        ),
    ),
    Rule(
        section="3.9",
        says="/invocations tries one kind after the other",
        path="/invocations",
        body={"inputs": 5, **CHAT},
        default=Reply(body={"object": "chat.completion"}),
    ),
    Rule(
        section="3.9",
        says="/invocations takes the first kind that will do",
        path="/invocations",
        body=NATIVE | CHAT | COMPLETION,
        default=Reply(body=[{"generated_text": str}]),
    ),
    Rule(
        section="3.9",
        says="/invocations needs one of three keys",
        path="/invocations",
        body={"text": "a"},
        default=Reply(status=422, body={"error_type": "validation"}),
        strict=Reply(status=422, body=re.compile("Failed to deserialize the JSON body .+")),
    ),
    Rule(
        section="3.9",
        says="/invocations reports errors as the body's own route does",
        path="/invocations",
        body=CHAT | {"n": 99},
        default=Reply(status=422, body={"error": {"message": str, "type": "validation"}}),
        strict=Reply(status=422, body={"error": str, "error_type": "validation"}),
    ),
]

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def calls(_: ValidRequest, stream: TokenStream) -> None:
    """Call the tool."""
    play(stream, '{"name": "f", ', '"parameters": {}}')


def is_call(prediction: Any) -> bool:
    """Whether the prediction is a message with the call of `f`."""
    (call,) = json.loads(prediction)["tool_calls"]
    return fits(call, {"type": "function", "function": {"name": "f", "arguments": "{}"}})


HIDDEN = {"error": "Incomplete generation", "error_type": "Incomplete generation"}
VERTEX = [
    *(
        Rule(
            section="3.9",
            says=f"{path} predicts a text for each instance, in their order",
            path=path,
            server="platform",
            body={
                "instances": [NATIVE, CHAT, {"inputs": "a", "parameters": {"max_new_tokens": 1}}]
            },
            default=Reply(body=exactly({"predictions": [GENERATED, GENERATED, " x"]})),
        )
        for path in ("/vertex", "/predict")
    ),
    Rule(
        section="3.9",
        says="AIP_HEALTH_ROUTE is about health",
        path="/alive",
        method="GET",
        server="platform",
        default=Reply(body=EMPTY),
    ),
    Rule(
        section="3.9",
        says="a chat that calls a tool is predicted to, in JSON",
        path="/vertex",
        body={"instances": [CHAT | {"tools": [TOOL], "max_tokens": 64}]},
        script=calls,
        server="roomy",
        default=Reply(body={"predictions": [is_call]}),
    ),
    Rule(
        section="3.9",
        says="a chat has one prediction, whatever its n",
        path="/vertex",
        body={"instances": [CHAT | {"n": 2}]},
        default=Reply(body={"predictions": [str]}),
    ),
    Rule(
        section="3.1",
        says="AIP_PREDICT_ROUTE asks for the key",
        path="/predict",
        body={"instances": [NATIVE]},
        server="platform with a key",
        default=Reply(status=401, body=EMPTY),
    ),
    Rule(
        section="3.1",
        says="AIP_HEALTH_ROUTE does not",
        path="/alive",
        method="GET",
        server="platform with a key",
        default=Reply(body=EMPTY),
    ),
    Rule(
        section="3.1",
        says="AIP_HEALTH_ROUTE opens nothing else",
        path="/v1/quarantine",
        method="GET",
        server="platform that wants too much",
        default=Reply(status=401, body=EMPTY),
    ),
    Rule(
        section="3.9",
        says="a path that is served already stays what it is",
        path="/v1/chat/completions",
        body=CHAT,
        server="platform with known paths",
        default=Reply(body={"object": "chat.completion"}),
    ),
    Rule(
        section="3.9",
        says="all parameters of an instance count, where TGI looks at two",
        path="/vertex",
        body={
            "instances": [
                {
                    "inputs": "hello world",
                    "parameters": {"top_k": 3, "seed": 7, "truncate": 1, **FEW},
                }
            ]
        },
        default=Reply(body={"predictions": [GENERATED]}),
        generates={
            "sampling.top_k": 3,
            "sampling.seed": 7,
            "max_new_tokens": 2,
            "input_ids": (3,),
            "sampling.do_sample": False,
        },
        generates_strictly={
            "sampling.top_k": 0,
            "sampling.seed": 7,
            "max_new_tokens": 2,
            "input_ids": (2, 3),
            "sampling.do_sample": True,
        },
    ),
    *(
        Rule(
            section="3.9",
            says=f"an instance with {says} parameters samples",
            path="/vertex",
            body={"instances": [{"inputs": "a"} | more]},
            default=Reply(),
            generates={"sampling.do_sample": True},
        )
        for says, more in (("absent", {}), ("null", {"parameters": None}))
    ),
    Rule(
        section="3.3",
        says="a body without instances is refused",
        path="/vertex",
        body={"instances": []},
        default=Reply(
            status=422,
            body={
                "error": "Input validation error: `instances` cannot be empty",
                "error_type": "validation",
            },
        ),
        strict=Reply(
            status=422,
            body={"error": "Input validation error", "error_type": "Input validation error"},
        ),
    ),
    Rule(
        section="3.3",
        says="what fails at /vertex is reported, or hidden as TGI does",
        path="/vertex",
        body={"instances": [NATIVE]},
        script=fail,
        default=Reply(status=424, body={"error_type": "generation"}),
        strict=Reply(status=500, body=HIDDEN),
    ),
    Rule(
        section="3.9",
        says="one instance that is wrong fails all",
        path="/vertex",
        body={"instances": [NATIVE, {"inputs": ""}]},
        default=Reply(
            status=422, body={"error": "Input validation error: `inputs` cannot be empty"}
        ),
        strict=Reply(status=500, body=HIDDEN),
    ),
    Rule(
        section="3.9",
        says="more instances than may run at once are refused",
        path="/vertex",
        body={"instances": [NATIVE] * 5},
        default=Reply(status=422, body={"error_type": "batch size exceeded"}),
        generates={},
    ),
    Rule(
        section="3.9",
        says="an instance is a text or a chat",
        path="/vertex",
        body={"instances": [{"prompt": "a"}]},
        default=Reply(
            status=422, body={"error": re.compile(r".*instances\[0\]: one of `inputs`.*")}
        ),
        strict=Reply(status=422, body=re.compile(r".*instances\[0\]: one of `inputs`.*")),
    ),
]


def numbers(text: str) -> list[int]:
    """A text as TGI's tensors have it."""
    return list(text.encode())


def tensor(data: list[Any], name: str = "in") -> dict[str, Any]:
    """An input."""
    return {"name": name, "shape": [1, len(data)], "datatype": "BYTES", "data": data}


INFER = "/v2/models/m/versions/1/infer"
KSERVE = [
    Rule(
        section="3.1",
        says="/v2 says what this is",
        path="/v2",
        method="GET",
        default=Reply(
            body=exactly(
                {
                    "name": "text-generation-inference",
                    "version": VERSION,
                    "extensions": ["health", "models", "metrics"],
                }
            )
        ),
    ),
    Rule(
        section="3.1",
        says="the router lives",
        path="/v2/health/live",
        method="GET",
        default=Reply(body=exactly({"live": True})),
    ),
    Rule(
        section="3.1",
        says="the server is ready, in TGI's words and in the protocol's",
        path="/v2/health/ready",
        method="GET",
        default=Reply(body=exactly({"live": True, "ready": True})),
    ),
    *(
        Rule(
            section="3.1",
            says=f"{path} is ready",
            path=f"{path}/ready",
            method="GET",
            default=Reply(body={"live": True, "ready": True, "name": "org/tiny"}),
        )
        for path in ("/v2/models/org%2Ftiny", "/v2/models/org%2Ftiny/versions/1")
    ),
    Rule(
        section="3.1",
        says="a version of a model",
        path="/v2/models/m/versions/1",
        method="GET",
        default=Reply(
            body={
                "name": "m",
                "version": "1",
                "versions": ["1"],
                "extensions": ["infer", "ready"],
                "inputs": [{"datatype": "BYTES"}],
                "outputs": [{"datatype": "BYTES"}],
            }
        ),
    ),
    Rule(
        section="3.1",
        says="a model without a version",
        path="/v2/models/m",
        method="GET",
        default=Reply(body=lambda told: told["name"] == "m" and "version" not in told),
    ),
    Rule(
        section="3.1",
        says="a text as numbers is answered with numbers",
        path=INFER,
        body={
            "id": "7",
            "parameters": FEW,
            "inputs": [tensor(numbers("hello wörld"))],
            "outputs": [{"name": "out"}],
        },
        default=Reply(
            body={
                "id": "7",
                "model_name": "m",
                "model_version": "1",
                "outputs": [
                    exactly(
                        {
                            "name": "out",
                            "shape": [1, 4],
                            "datatype": "BYTES",
                            "data": numbers(GENERATED),
                        }
                    )
                ],
            }
        ),
        generates={"input_ids": (2, 4), "max_new_tokens": 2, "sampling.do_sample": False},
    ),
    Rule(
        section="3.1",
        says="texts as the protocol has them are answered with texts, under the names of the inputs",
        path="/v2/models/m/infer",
        body={"inputs": [tensor(["a", "b"]), tensor(["hello"], "more")], "parameters": FEW},
        default=Reply(
            body=exactly(
                {
                    "model_name": "m",
                    "outputs": [
                        {"name": "in", "shape": [2], "data": [GENERATED, GENERATED]},
                        {"name": "more", "shape": [1], "data": [GENERATED]},
                    ],
                }
            )
        ),
    ),
    Rule(
        section="3.1",
        says="absent parameters sample at /infer as everywhere",
        path=INFER,
        body={"inputs": [tensor(["a"])]},
        default=Reply(),
        generates={"sampling.do_sample": True},
    ),
    Rule(
        section="3.1",
        says="there must be as many outputs as inputs",
        path=INFER,
        body={"inputs": [tensor(["a"])], "outputs": [{"name": "x"}, {"name": "y"}]},
        default=Reply(
            status=422,
            body={
                "error": "Inputs and outputs length mismatch",
                "error_type": "length mismatch",
            },
        ),
        generates={},
    ),
    Rule(
        section="3.1",
        says="bytes must be UTF-8",
        path=INFER,
        body={"inputs": [tensor([255])], "outputs": [{"name": "x"}]},
        default=Reply(status=422, body={"error_type": "utf8"}),
        generates={},
    ),
    Rule(
        section="3.1",
        says="what fails at /infer is reported, or hidden as TGI does",
        path=INFER,
        body={"inputs": [tensor(["a"])]},
        script=fail,
        default=Reply(status=424, body={"error_type": "generation"}),
        strict=Reply(status=500, body=HIDDEN),
    ),
    Rule(
        section="3.1",
        says="more texts than may run at once are refused",
        path=INFER,
        body={"inputs": [tensor(["a"] * 5)]},
        default=Reply(status=422, body={"error_type": "batch size exceeded"}),
        generates={},
    ),
]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("rule", [*TOKENS, *INFORMATION, *SAGEMAKER, *VERTEX, *KSERVE], ids=str)
def test_rule_holds(servers: Callable[[str, str], Held], rule: Rule, column: str) -> None:
    servers(rule.server, column).check(rule, column)
